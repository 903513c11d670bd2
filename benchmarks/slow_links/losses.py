"""Losses of short trainings and errors of gradients with rounded messages, for every codec.

    python benchmarks/slow_links/losses.py --jobs 2
    python benchmarks/slow_links/losses.py --smoke

A decoder of bytes and a RevNet, six stages of one layer, with PETRA and with the exact reversible pipeline (1F1B), in
one process, which rounds as ranks do. Prints tables, and writes losses.json after every training, so that an
interrupted benchmark continues where it was. `--smoke` trains a few steps and stores nothing.
"""

import argparse
import hashlib
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.functional import cross_entropy

import petra
from petra.data import Batches, load_data
from petra.formatting import render
from petra.measure import environment
from petra.methods import BackwardMessage

SEQ_LEN, LAST = 32, 50
TEXTS = Path(__file__).parents[2] / "docs" / "guides"
NETWORKS = ("decoder", "revnet")
DEPTHS = {"decoder": 4, "decoder of 12 blocks": 12}
LEARNING_RATES = {"petra": 3e-4, "exact": 1e-3}
"""Of the decoder: late gradients need a lower one."""
METHODS = {"petra": {"method": "petra"}, "exact": {"method": "reversible", "schedule": "1f1b"}}
CASES = {
    "float32": {},
    "float32, weights changed by 1e-6": {"change": 1e-6},
    "bf16": {"comm_dtype": "bf16"},
    "int8": {"comm_dtype": "int8"},
    "fp8": {"comm_dtype": "fp8"},
    "streams=int8": {"comm_dtype": "streams=int8"},
    "gradients=int8": {"comm_dtype": "gradients=int8"},
    "streams=bf16,gradients=int8": {"comm_dtype": "streams=bf16,gradients=int8"},
    "streams=bf16,gradients=fp8": {"comm_dtype": "streams=bf16,gradients=fp8"},
    "int8, error feedback of gradients": {"comm_dtype": "int8", "feedback": ("gradients",)},
    "int8, error feedback of both": {"comm_dtype": "int8", "feedback": ("streams", "gradients")},
}
ROUNDED = ("bf16", "int8", "fp8", "streams=bf16", "gradients=bf16", "streams=int8", "gradients=int8", "streams=fp8")


def read_texts():
    """Return the bytes of the guides, training and test part, and their checksum."""
    data = b"".join(file.read_bytes() for file in sorted(TEXTS.glob("*.md")))
    tokens, border = torch.tensor(list(data)), len(data) * 9 // 10
    return tokens[:border], tokens[border:], hashlib.sha256(data).hexdigest()


def windows(tokens, count, size, seed):
    """Yield micro-batches of text and the text one byte later."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(tokens) - SEQ_LEN, (size,), generator=generator).tolist()
        found = torch.stack([tokens[start : start + SEQ_LEN + 1] for start in starts])
        yield found[:, :-1], found[:, 1:]


def loss_of(outputs, targets):
    """Cross-entropy over classes or over the bytes of a text."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def task(network, method="exact"):
    """Return a network, a function that yields micro-batches, the test batches, and the optimizer."""
    lr = LEARNING_RATES[method]
    if network in DEPTHS:
        model = petra.models.create(
            "rev-gpt", width=32, depth=DEPTHS[network], heads=4, vocab_size=256, seq_len=SEQ_LEN
        )
        train, test, _ = read_texts()

        def batches(count, seed):
            return windows(train, count, 4, seed)

        return model, batches, list(windows(test, 16, 16, 0)), lambda p: torch.optim.AdamW(p, lr)
    model = petra.models.create("revnet18", width=4, depths=(1, 1, 1, 1), num_classes=10, in_channels=1)
    data = load_data("digits")

    def digits(count, seed):
        epochs = (batch for epoch in range(count) for batch in Batches(data, "train", 32, seed=seed).epoch(epoch))
        return (next(epochs) for _ in range(count))

    test_batches = list(Batches(data, "test", batch_size=360).epoch(0))
    return model, digits, test_batches, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)


def feed_errors_back(trainer, kinds):
    """Add what was rounded away from a message to the next message of the same kind between the same stages."""
    mailbox, errors = trainer.executor.mailbox, {}
    send_forward, send_backward = mailbox.send_forward, mailbox.send_backward

    def corrected(tensors, codec, *key):
        found = []
        for number, x in enumerate(tensors or ()):
            error = errors.get((*key, number))
            if x is not None and error is not None and error.shape == x.shape:
                x = x + error
            if x is not None and x.dtype == torch.float32:
                errors[*key, number] = x - codec.unpack(codec.pack((x,)))[0]
            found.append(x)
        return tuple(found)

    def forward(action, streams):
        found = corrected(streams, mailbox.format.streams, "up", action.stage) if "streams" in kinds else streams
        send_forward(action, found)

    def backward(action, message):
        streams, gradients = message.streams, message.gradients
        if "streams" in kinds and streams is not None:
            streams = corrected(streams, mailbox.format.streams, "down", action.stage)
        if "gradients" in kinds:
            gradients = corrected(gradients, mailbox.format.gradients, "gradients", action.stage)
        send_backward(action, BackwardMessage(streams, gradients))

    mailbox.send_forward, mailbox.send_backward = forward, backward


def train(network, method, case, seed, steps):
    """Train one network, and return its losses: the mean of the last updates, and that of the test data."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    options = dict(CASES[case])
    change, feedback = options.pop("change", 0.0), options.pop("feedback", ())
    model, batches, test, optimizer = task(network, method)
    with torch.no_grad():
        for parameter in model.parameters() if change else ():
            parameter.mul_(1 + change * torch.randn_like(parameter))
    trainer = petra.Trainer(
        model,
        loss=loss_of,
        optimizer=optimizer,
        stages=len(model),
        clip_norm=1.0,
        seed=seed,
        **METHODS[method],
        **options,
    )
    if feedback:
        feed_errors_back(trainer, feedback)
    losses = [float(r.loss) for x, y in batches(steps, seed) for r in trainer.step(x, y)]
    losses += [float(r.loss) for r in trainer.drain()]
    model.eval()
    with torch.no_grad():  # without messages, so that the weights are compared
        tested = fmean(float(loss_of(model(x), y)) for x, y in test)
    last = fmean(losses[-LAST:])
    return {"network": network, "method": method, "case": case, "seed": seed, "train": last, "test": tested}


def gradients(network, method, comm_dtype):
    """Return the gradient of one micro-batch for every stage, as one vector."""
    torch.manual_seed(0)
    model, batches, _, _ = task(network)
    trainer = petra.Trainer(
        model,
        loss=loss_of,
        optimizer=lambda p: torch.optim.SGD(p, 0.0),
        stages=len(model),
        method=method,
        comm_dtype=comm_dtype,
    )
    for x, y in batches(1, 0):
        trainer.step(x, y)
    trainer.drain()
    return [torch.cat([g.flatten() for g in s.gradients() if g is not None]) for s in trainer.stages]


def gradient_errors():
    """Return the relative errors of exact gradients, for reconstructed and for stored activations."""
    found = []
    for network in (*DEPTHS, "revnet"):
        exact = gradients(network, "reversible", None)
        for codec in ROUNDED:
            for method in ("reversible", "backprop"):
                rounded = gradients(network, method, codec)
                errors = [float((a - b).norm() / b.norm()) for a, b in zip(rounded, exact, strict=True)]
                found.append({"network": network, "method": method, "codec": codec, "errors": errors})
    return found


def loss_table(trainings):
    """Return a line for every network, method and case: losses, and their differences from those of float32."""
    rows = []
    for network in NETWORKS:
        for method in METHODS:
            own = [t for t in trainings if (t["network"], t["method"]) == (network, method)]
            plain = {t["seed"]: t for t in own if t["case"] == "float32"}
            for case in CASES:
                same = [t for t in own if t["case"] == case and t["seed"] in plain]
                if same:
                    rows.append([network, method, case, *_compared(same, plain)])
    return render(["network", "method", "messages", "training loss", "change", "test loss", "change"], rows)


def _compared(trainings, plain):
    for name in ("train", "test"):
        changes = [t[name] / plain[t["seed"]][name] - 1 for t in trainings]
        yield f"{fmean(t[name] for t in trainings):.4f}"
        yield ", ".join(f"{change:+.2%}" for change in changes)


def error_table(errors):
    """Return a line for every network, codec and method: errors of the last stage, and of some below it."""
    rows = []
    for e in errors:
        below = e["errors"][-2::-1]
        shown = (e["errors"][-1], below[0], below[len(below) // 2], below[-2], below[-1])
        rows.append([e["network"], e["codec"], e["method"], *(f"{error:.2%}" for error in shown)])
    return render(["network", "messages", "method", "last", "next to last", "middle", "second", "first"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="updates (default %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="(default 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the network with this name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at the same time")
    parser.add_argument("--smoke", action="store_true", help="a few steps, and nothing is stored")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.smoke:
        found = [train(network, "petra", case, 0, 3) for network in NETWORKS for case in ("float32", "int8")]
        print(loss_table(found))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "losses.json"
    result = json.loads(file.read_text()) if file.exists() else {"trainings": []}
    if result["trainings"] and (result["steps"], result["text"]) != (options.steps, read_texts()[2]):
        parser.error(f"{file} has other steps or another text: give another --out, or delete it")
    trainings = result["trainings"]
    done = {(t["network"], t["method"], t["case"], t["seed"]) for t in trainings}
    todo = [(n, m, c, s) for s in options.seeds for n in NETWORKS for c in CASES for m in METHODS]
    todo = [one for one in todo if one not in done and options.only in ("", one[0])]

    def store():
        trainings.sort(key=lambda t: (t["network"], t["method"], list(CASES).index(t["case"]), t["seed"]))
        known = {"steps": options.steps, "text": read_texts()[2], "environment": environment(torch.device("cpu"))}
        file.write_text(json.dumps({**result, **known}, indent=2) + "\n")

    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(train, *one, options.steps) for one in todo]):
            trainings.append(future.result())
            store()
    if "gradient_errors" not in result:
        result["gradient_errors"] = gradient_errors()
        store()
    print(loss_table(trainings))
    print(error_table(result["gradient_errors"]))


if __name__ == "__main__":
    main()
