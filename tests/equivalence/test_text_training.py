"""Training on text: losses over tokens, AdamW and its schedule, networks that fit their data, runs that resume."""

import json
import math

import pytest
import torch
from helpers.trainers import make
from safetensors.torch import load_file
from torch import Tensor, nn

from petra import Network, ReversibleResidual, models
from petra.cli.main import main
from petra.cli.parser import build_parser
from petra.cli.plan_config import PlanConfig
from petra.data import Vocabulary, load_data
from petra.models import registry
from petra.runs.config import RunConfig
from petra.runs.model_arguments import network_arguments
from petra.runs.recipes import RECIPES, Recipe
from petra.runs.run import Run
from petra.trainer.loss import count_answers, count_correct, cross_entropy
from petra.trainer.lr_schedules import CosineLRSchedule
from petra.trainer.optimizers import adamw

# --- stand-ins for the transformers ---


class Embed(nn.Module):
    def __init__(self, vocab_size: int, seq_len: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, 2 * width)
        self.positions = nn.Parameter(torch.zeros(seq_len, 2 * width))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.tokens(x) + self.positions[: x.shape[1]]).chunk(2, dim=-1)


class Read(nn.Module):
    def __init__(self, width: int, outputs: int, pool: bool) -> None:
        super().__init__()
        self.fc, self.pool = nn.Linear(2 * width, outputs), pool

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([x, y], -1)
        return self.fc(both.mean(1) if self.pool else both)


def body(width: int, depth: int, dropout: float) -> list[nn.Module]:
    def f() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))

    return [ReversibleResidual(f()) for _ in range(depth)]


def modeller(
    *, vocab_size: int = 9, seq_len: int = 8, width: int = 4, depth: int = 2, dropout: float = 0.0, scale: float = 1
) -> Network:
    return Network(Embed(vocab_size, seq_len, width), *body(width, depth, dropout), Read(width, vocab_size, False))


def classifier(
    *, vocab_size: int = 9, seq_len: int = 8, num_classes: int = 2, width: int = 4, depth: int = 2, pad: int = 0
) -> Network:
    network = Network(Embed(vocab_size, seq_len, width), *body(width, depth, 0.0), Read(width, num_classes, True))
    network.pad = pad
    return network


def patcher(
    *, num_classes: int = 10, in_channels: int = 3, image_size: int = 224, patch: int = 16, heads: tuple = (1, 2)
) -> Network:
    if image_size % patch:
        raise ValueError(f"image_size {image_size} is not a multiple of patch {patch}")
    cells = (image_size // patch) ** 2
    return Network(nn.Conv2d(in_channels, 2, patch, patch), nn.Flatten(), nn.Linear(2 * cells, num_classes))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    for name, build in (("modeller", modeller), ("classifier", classifier), ("patcher", patcher)):
        monkeypatch.setitem(registry._ENTRIES, name, registry.Entry(name, f"a {name}", build, {}))


# --- losses and right answers ---


def test_loss_of_tokens_is_the_mean_over_all_of_them():
    outputs, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    by_hand = -torch.stack([outputs[i, j].log_softmax(0)[targets[i, j]] for i in range(3) for j in range(5)]).mean()
    torch.testing.assert_close(cross_entropy(outputs, targets), by_hand)
    smooth = -outputs.log_softmax(-1).mean()
    torch.testing.assert_close(cross_entropy(outputs, targets, label_smoothing=0.3), 0.7 * by_hand + 0.3 * smooth)
    rows, classes = outputs[:, 0], targets[:, 0]
    assert torch.equal(cross_entropy(rows, classes), nn.functional.cross_entropy(rows, classes))
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 5, 7\) for targets of shape \(3,\)"):
        cross_entropy(outputs, classes)


def test_right_answers_are_counted_by_token():
    outputs = torch.eye(4)[torch.tensor([[0, 1, 2], [3, 0, 1]])]
    targets = torch.tensor([[0, 1, 1], [3, 3, 3]])
    assert int(count_correct(outputs, targets)) == 3
    assert int(count_answers(outputs, targets, 2)) == 6
    assert int(count_correct(outputs[:, 0], targets[:, 0])) == 2
    assert int(count_answers(outputs[:, 0], targets[:, 0], 2)) == 2
    assert int(count_correct(outputs, outputs)) == 6  # one-hot targets
    assert int(count_correct(outputs, 2 * outputs)) < 0  # no probabilities
    assert count_answers(outputs, outputs, 2) == 2
    assert count_correct(outputs.float(), targets.float()) is None
    assert count_correct(outputs, None) is None
    ignored = torch.where(targets == 1, -100, targets)
    assert int(count_correct(outputs, ignored)) == 2
    assert int(count_answers(outputs, ignored, 2)) == 4


def test_classes_where_pytorch_has_them():
    """In the second dimension, as its cross-entropy wants them."""
    outputs = torch.randn(2, 4, 3, 5)
    targets = outputs.argmax(1)
    targets[0, 0, :2] = -100
    targets[1, 2, 4] = (targets[1, 2, 4] + 1) % 4
    assert int(count_correct(outputs, targets)) == 27
    assert int(count_answers(outputs, targets, 2)) == 28
    assert int(count_correct(outputs[:, :, 0], targets[:, 0])) == 8
    assert int(count_answers(outputs[:, :, 0], targets[:, 0], 2)) == 8
    tokens = torch.randn(2, 3, 3)  # where both could be meant, they are in the last
    assert int(count_correct(tokens, tokens.argmax(-1))) == 6


@pytest.mark.parametrize("targets", [torch.tensor([0, 1, 1]), torch.tensor([-1, 1, -1])])
def test_one_output_is_no_choice_of_classes(targets):
    assert count_correct(torch.randn(3), targets) is None
    assert count_correct(torch.randn(3, 1), targets) is None
    assert count_answers(torch.randn(3, 1), targets, 3) == 3
    assert count_correct(torch.randn(3, 1, 4), targets[:, None].expand(3, 4)) is None


def test_evaluation_weighs_tokens_alike_however_they_are_batched():
    trainer = make(modeller(), loss=cross_entropy, stages=2)
    batches = [(torch.randint(9, shape), torch.randint(9, shape)) for shape in ((3, 8), (2, 5), (1, 1))]
    found = trainer.evaluate(batches)
    outputs = torch.cat([trainer.predict(x).flatten(0, 1) for x, _ in batches])
    targets = torch.cat([y.flatten() for _, y in batches])
    assert found.loss == pytest.approx(float(cross_entropy(outputs, targets)), rel=1e-6)
    assert found.accuracy == float((outputs.argmax(1) == targets).double().mean())
    assert found.samples == 6
    doubled = trainer.evaluate(batches, lambda outputs, targets: 2 * cross_entropy(outputs, targets))
    assert doubled.loss == pytest.approx(2 * found.loss)


# --- optimizer, schedule, configuration ---


def test_adamw_decays_matrices_only():
    network = modeller()
    optimizer = adamw(list(network.parameters()), lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[p] for name, p in network.named_parameters()} == {
        name: 0.3 if p.ndim > 1 else 0.0 for name, p in network.named_parameters()
    }
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    assert sorted(set(decay.values())) == [0.0, 0.3]


def test_cosine_curve():
    curve = CosineLRSchedule(epochs=10, updates_per_epoch=10, warmup_epochs=2)
    assert [curve(0), curve(9)] == pytest.approx([1 / 20, 1 / 2])
    assert curve(19) == 1
    assert curve(19 + 81 / 2 - 0.5) == pytest.approx(0.5, abs=0.02)
    assert 0 < curve(99) < 0.001  # the last update counts
    assert curve(100) == curve(200) == pytest.approx(0, abs=1e-12)
    rates = [curve(update) for update in range(101)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert CosineLRSchedule(2, 3, warmup_epochs=0)(0) == 1
    assert 0.9 < CosineLRSchedule(10, 1, warmup_epochs=2.5)(2) < 1  # warm before it has ended
    short = CosineLRSchedule(epochs=1, updates_per_epoch=2, warmup_epochs=4)  # ends before it is warm
    assert [short(0), short(1)] == [1 / 8, 2 / 8]


def test_what_an_optimizer_and_a_schedule_are_by_default():
    plain = RunConfig(model="modeller", data="text:x", batch_size=128)
    assert (plain.base_lr, plain.decay) == (0.05, 5e-4)
    adam = RunConfig(model="modeller", data="text:x", optimizer="adamw", momentum=0.8, beta2=0.95)
    made = adam.make_optimizer(list(modeller().parameters()))
    assert type(made) is torch.optim.AdamW
    assert [made.param_groups[0][name] for name in ("lr", "betas", "weight_decay")] == [1e-3, (0.8, 0.95), 0.05]
    given = RunConfig(model="modeller", data="text:x", optimizer="adamw", lr=0.3, weight_decay=0.0)
    assert (given.base_lr, given.decay) == (0.3, 0.0)
    curve = RunConfig(
        model="modeller", data="text:x", lr_schedule="cosine", accumulate=4, epochs=3, warmup_epochs=1
    ).curve(20)
    assert curve == CosineLRSchedule(3, 5.0, 1)


def test_the_outline_does_not_need_the_image_size():
    for patch in (3, 4, 5, 7):  # 224 is not a multiple of all of them
        RunConfig(model="patcher", data="digits", stages=3, model_options={"patch": patch}).validate()


@pytest.mark.parametrize("name", ["tiny-shakespeare", "sst2", "rev-vit-cifar10"])
def test_recipes_of_transformers_are_theirs(name):
    options = RECIPES[name].options
    assert (options["optimizer"], options["lr_schedule"], options["method"]) == ("adamw", "cosine", "reversible")
    assert "data" not in options


def test_a_recipe_is_for_the_twin_of_its_network_too(monkeypatch):
    for name, width in (("rev-gpt", 4), ("gpt", 4), ("gpt-wide", 8)):
        entry = registry.Entry(name, name, modeller, {"width": width, "scale": name.startswith("rev")})
        monkeypatch.setitem(registry._ENTRIES, name, entry)
    options = {"width": 6, "depth": 3, "dropout": 0.5}
    recipe = Recipe("small", "a small one", {"model": "rev-gpt", "model_options": options, "data": "text:x"})
    monkeypatch.setitem(RECIPES, "small", recipe)
    assert RunConfig.from_options("small", {}).model_options == options
    assert RunConfig.from_options("small", {"model": "gpt"}).model_options == options
    wide = RunConfig.from_options("small", {"model": "gpt-wide", "model_options": {"depth": 2}})
    assert wide.model_options == {"depth": 2, "dropout": 0.5}  # its name stands for its width
    assert RunConfig.from_options("small", {"model": "classifier"}).model_options == {}


# --- networks and data ---


@pytest.fixture
def verse(tmp_path):
    """A text that repeats, so that the next character can be learned."""
    path = tmp_path / "verse.txt"
    path.write_text("so long as men can breathe or eyes can see\n" * 12)
    return path


@pytest.fixture
def sentences(tmp_path):
    folder = tmp_path / "films"
    folder.mkdir()
    lines = [f"{word} {other} film\t{label}" for word, label in (("good", 1), ("bad", 0)) for other in "abcdefghij"]
    (folder / "train.tsv").write_text("\n".join(lines))
    (folder / "dev.tsv").write_text("a good film\t1\nbad film\t0\n")
    return folder


def test_networks_get_what_they_take_of_what_the_data_tells(verse, sentences):
    text, films, digits = load_data(f"text:{verse}", seq_len=8), load_data(str(sentences)), load_data("digits")

    def arguments(model, data, **options):
        return network_arguments(model, data.arguments, options, data.name)

    assert arguments("modeller", text) == {"vocab_size": len(text.vocabulary), "seq_len": 8}
    assert arguments("modeller", text, width=3, seq_len=9)["seq_len"] == 9
    assert arguments("classifier", films)["num_classes"] == 2
    assert arguments("classifier", films)["pad"] == 1
    assert arguments("patcher", digits) == {"num_classes": 10, "in_channels": 1, "image_size": 8}
    assert arguments("revnet18", digits) == {"num_classes": 10, "in_channels": 1}
    bad = [
        ("revnet18", text, {}, "revnet18 is for classes of images, but verse.txt asks for the next token of text"),
        ("revnet18", films, {}, "films asks for classes of text: choose one that does, such as "),
        ("modeller", digits, {}, "modeller is for the next token of text, but digits asks for classes of images"),
        ("classifier", text, {}, "classifier is for classes of text, but verse.txt asks for the next token of text"),
        ("modeller", films, {}, "modeller is for the next token of text"),
        ("modeller", text, {"vocab_size": 3}, "vocab_size is 3, but verse.txt has"),
        ("classifier", films, {"num_classes": 1}, "num_classes is 1, but films has 2"),
        ("patcher", digits, {"image_size": 32}, "image_size is 32, but digits has 8"),
        (
            "patcher",
            load_data("synthetic:1x4x6:2:4"),
            {},
            "patcher takes square images, but those of synthetic are 4×6",
        ),
    ]
    for model, data, options, words in bad:
        with pytest.raises(ValueError, match=words):
            arguments(model, data, **options)


# --- runs ---

COMMON = ["--quiet", "--threads", "1", "--device", "cpu", "--batch-size", "8", "--warmup-epochs", "1"]
ADAM = ["--optimizer", "adamw", "--lr-schedule", "cosine", "--lr", "0.02"]


def train(*arguments):
    return main(["train", *COMMON, *map(str, arguments)])


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["petra", "reversible"])
def test_a_language_model_learns_a_verse(verse, tmp_path, method):
    text = ["--model", "modeller", "--data", f"text:{verse}", "--seq-len", 12, "--width", 16, "--depth", 3]
    folder = tmp_path / "run"
    assert train(*text, *ADAM, "--method", method, "--stages", 3, "--epochs", 8, "--out", folder) == 0
    summary = json.loads((folder / "summary.json").read_text())
    seen = records(folder)
    assert seen[0]["test_loss"] > 1.5
    assert summary["test_loss"] == seen[-1]["test_loss"] < 1.4
    assert summary["test_accuracy"] > 0.4  # of 15 characters; a pair of them does not tell all
    assert seen[-1]["train_loss"] < seen[0]["train_loss"]
    assert 0.4 < seen[-1]["train_accuracy"] <= 1
    assert seen[-1]["lr"] < 1e-3
    characters = sorted(set(verse.read_text()))
    assert json.loads((folder / "vocabulary.json").read_text()) == characters
    network = models.create("modeller", vocab_size=len(characters), seq_len=12, width=16, depth=3)
    network.load_state_dict(load_file(folder / "weights.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert (config["optimizer"], config["lr_schedule"], config["seq_len"]) == ("adamw", "cosine", 12)
    assert config["model_options"] == {"width": 16, "depth": 3}


def test_a_classifier_learns_sentences(sentences, tmp_path):
    films = ["--model", "classifier", "--data", sentences, "--seq-len", 6, "--vocab-size", 40, "--label-smoothing", 0.1]
    assert train(*films, *ADAM, "--lr", 0.1, "--stages", 2, "--epochs", 10, "--out", tmp_path / "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] == 1
    # No training on targets of 0.95 can bring their loss below this; the test loss is not smoothed.
    least = -0.95 * math.log(0.95) - 0.05 * math.log(0.05)
    assert records(tmp_path / "run")[-1]["train_loss"] > least > summary["test_loss"]
    vocabulary = Vocabulary(json.loads((tmp_path / "run" / "vocabulary.json").read_text()))
    assert "good" in vocabulary.entries
    assert len(vocabulary) <= 40


def test_a_network_for_images_gets_their_size(tmp_path):
    patches = ["--model", "patcher", "--data", "synthetic:2x6x6:3:20", "--patch", 3, "--epochs", 1, "--stages", 1]
    assert train(*patches, "--set", "heads=3,1", "--out", tmp_path / "run") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model_options"] == {"patch": 3, "heads": [3, 1]}


class Killed(Exception):
    pass


@pytest.mark.parametrize(("method", "tick"), [("petra", 3), ("petra", 8), ("petra", 11), ("reversible", 8)])
def test_a_text_run_that_is_resumed_equals_one_that_was_not_stopped(verse, tmp_path, method, tick):
    options = {
        "model": "modeller",
        "model_options": {"dropout": 0.2},
        "data": f"text:{verse}",
        "seq_len": 12,
        "method": method,
        "stages": 3,
        "accumulate": 2,
        "epochs": 3,
        "batch_size": 8,
        "optimizer": "adamw",
        "lr_schedule": "cosine",
        "warmup_epochs": 1.0,
        "clip_norm": 1.0,
        "label_smoothing": 0.1,
        "checkpoint_every": 2,
    }
    config = RunConfig.from_options(None, options)
    straight = Run(config, tmp_path / "straight", quiet=True)()
    stopped = Run(config, tmp_path / "stopped", quiet=True)
    assert len(stopped.train) == 5

    def kill(now, action, stage):
        if now == tick:
            raise Killed

    stopped.trainer.executor.observers.append(kill)
    with pytest.raises(Killed):
        stopped()
    resumed = Run(config, tmp_path / "stopped", resume=True, quiet=True)
    assert 0 < resumed.trainer.executor.microbatches <= tick
    assert resumed()["weights_sha256"] == straight["weights_sha256"]
    without_speed = [
        [{**record, "samples_per_second": 0, "seconds": 0} for record in records(tmp_path / name)]
        for name in ("straight", "stopped")
    ]
    assert without_speed[0] == without_speed[1]


def test_resume_from_the_command_line_with_other_options(verse, tmp_path, capsys):
    text = ["--model", "modeller", "--data", f"text:{verse}", "--seq-len", 12, "--epochs", 1, "--stages", 2]
    assert train(*text, *ADAM, "--out", tmp_path / "run") == 0
    assert train("--resume", "--out", tmp_path / "run", *text, *ADAM) == 0
    capsys.readouterr()
    for option, value, words in (
        ("--seq-len", "10", "has seq_len 12, not 10"),
        ("--optimizer", "sgd", "has optimizer adamw, not sgd"),
        ("--set", "scale=2", "has scale its default, not 2"),
    ):
        assert train("--resume", "--out", tmp_path / "run", option, value) == 2
        assert words in capsys.readouterr().err
    verse.write_text(verse.read_text()[::-1])
    assert train("--resume", "--out", tmp_path / "run") == 2
    assert "is not the data that the run started with, or has changed since" in capsys.readouterr().err


BAD = {
    "cnn": (["--model", "revnet18"], "revnet18 is for classes of images, but verse.txt asks for the next token"),
    "images": (["--data", "synthetic:1x8x8:2:8"], "--seq-len is 12, but synthetic:1x8x8:2:8 contains images: leave"),
    "no file": (["--data", "text:gone.txt"], "there is no file 'gone.txt': give text:FILE"),
    "too long": (["--seq-len", "60"], "the test split has 51 tokens, too few for a sample of 60"),
    "no length": (["--seq-len", "0"], "--seq-len is 0: give 1 or more"),
    "words of characters": (["--vocab-size", "50"], "--vocab-size is 50, but text:FILE has a fixed vocabulary"),
    "optimizer": (
        ["--optimizer", "adamv"],
        "--optimizer is 'adamv': give a name or package.module:Class; did you mean 'adam'?",
    ),
    "lr_schedule": (["--lr-schedule", "step"], "--lr-schedule is 'step': did you mean 'steps'?"),
    "beta2": (["--beta2", "1"], "--beta2 is 1.0: give 0 or more and less than 1"),
    "beta2 of sgd": (["--optimizer", "sgd", "--beta2", "0.5"], "--beta2 is 0.5, but sgd has none"),
    "exact": (
        ["--model", "gpt", "--coupling", "fixed-point"],
        "--coupling fixed-point is for reversible layers, and gpt has none",
    ),
    "momentum": (["--momentum", "1"], "--momentum is 1.0: give 0 or more and less than 1"),
    "smoothing": (["--label-smoothing", "nan"], "--label-smoothing is nan: give 0 or more"),
    "lr_milestones": (["--lr-milestones", "0.5"], "--lr-milestones is [0.5], but --lr-schedule is cosine: leave one"),
    "heads": (["--heads", "2"], "modeller has no argument 'heads': it takes vocab_size"),
    "set": (["--set", "width"], "--set is 'width': give NAME=VALUE"),
    "twice": (["--width", "4", "--set", "width=5"], "width is given as 4 and as 5: give it once"),
    "a word": (["--set", "width=wide"], "width is 'wide', but modeller takes a whole number: give one like 4"),
    "a part": (["--set", "width=2.5"], "width is 2.5, but modeller takes a whole number"),
    "a list": (["--set", "dropout=1,2"], "dropout is [1, 2], but modeller takes a number: give one like 0.0"),
    "one for all": (["--model", "patcher", "--heads", "2"], "heads is 2, but patcher takes a number for each group"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, verse, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    text = ["--model", "modeller", "--data", f"text:{verse}", "--seq-len", "12", "--stages", "2"]
    try:
        code = train(*text, *ADAM, *arguments)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2
    assert len(error.strip().splitlines()) == 1
    assert words in error
    assert [path.name for path in tmp_path.iterdir()] == ["verse.txt"]


def test_options_of_any_kind_can_be_set():
    settings = ("a=1", "b=0.5", "c=1,2", "d=true", "e=x=y")
    parsed = build_parser().parse_args(["train", *(f"--set={setting}" for setting in settings)])
    assert dict(parsed.set) == {"a": 1, "b": 0.5, "c": [1, 2], "d": True, "e": "x=y"}
    assert type(dict(parsed.set)["a"]) is int
    RunConfig(
        model="modeller", data="text:x", stages=2, model_options={"scale": 2.5}
    ).validate()  # 1 stands for a float there


def test_the_list_of_models_tells_what_they_are_for(capsys):
    assert main(["models"]) == 0
    sections = capsys.readouterr().out.split("\n\n")
    titles = [section.strip().splitlines()[0] for section in sections]
    assert sum(title.startswith("for classes of images") for title in titles) == 1
    assert any(title.startswith("for the next token of text") for title in titles)
    assert any(title.startswith("for classes of text") for title in titles)
    [text] = [section for section in sections if "a modeller" in section]
    assert "revnet" not in text
    sizes = {line.split()[0]: line.split()[-1] for line in "\n".join(sections).splitlines() if line.strip()}
    assert (sizes["revnet18"], sizes["revnet110"], sizes["revnet104"]) == ("12.2M", "1.7M", "45.4M")
    assert (sizes["resnet164-basic"], sizes["resnet101-cifar"]) == ("2.6M", "42.5M")  # for CIFAR, with 10 classes


def test_plans_of_text_models_are_made_on_random_tokens():
    def case(*options):
        return PlanConfig.from_options(
            build_parser().parse_args(["plan", "--ranks", "1", "--batch-size", "3", *options])
        )

    x, y = case("--model", "modeller", "--seq-len", "5", "--vocab-size", "7").batch()
    assert x.shape == y.shape == (3, 5)
    assert 0 <= int(x.min()) <= int(x.max()) < 7
    made = case("--model", "classifier", "--seq-len", "5", "--vocab-size", "7", "--classes", "4")
    x, y = made.batch()
    assert (x.shape, y.shape) == ((3, 5), (3,))
    assert made.network()(x).shape == (3, 4)
    made = case("--model", "patcher", "--image", "2x6x6", "--patch", "3")
    assert made.network()(made.batch()[0]).shape == (3, 10)
    with pytest.raises(ValueError, match="--image are 6×3"):
        case("--model", "patcher", "--image", "2x6x3")
