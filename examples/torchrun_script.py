"""A script of your own on several processes, each with a part of the stages.

torchrun --standalone --nproc-per-node 4 examples/torchrun_script.py
python examples/torchrun_script.py                           # the same in one process, with the same weights
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import petra
from petra.data import Batches, load_data
from petra.distributed import join


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/torchrun"))
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # every rank creates the same weights and reads the same batches
    sizes = {"width": 8, "depths": (1, 1)} if options.smoke else {"width": 32, "depths": (2, 2)}
    network = petra.models.create("revnet18", in_channels=1, num_classes=10, **sizes)
    digits = load_data("digits")
    train, test = Batches(digits, "train", 32), Batches(digits, "test", 360)
    with join(device) as transport:
        trainer = petra.Trainer(
            network, method="petra", stages=4, loss=nn.functional.cross_entropy, device=device, transport=transport,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        )  # fmt: skip
        trainer.fit(train, test, epochs=1 if options.smoke else 8)
        weights = trainer.weights()  # every rank calls it
        if weights is not None:  # on the rank of the last stage
            options.out.mkdir(parents=True, exist_ok=True)
            torch.save(weights, options.out / "weights.pt")


if __name__ == "__main__":
    main()
