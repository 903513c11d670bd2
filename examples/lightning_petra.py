"""PETRA in Lightning: checkpoints, logs and callbacks are those of Lightning.

python examples/lightning_petra.py
"""

import argparse

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import petra
from petra.integrations.lightning import PetraModule


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few seconds")
    options = parser.parse_args(arguments)
    epochs = 1 if options.smoke else 8
    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    data = TensorDataset(x, torch.tensor(classes))
    train, test = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    loaders = DataLoader(train, 32, shuffle=True, drop_last=True), DataLoader(test, 256)

    torch.manual_seed(0)
    sizes = {"width": 8, "depths": (1, 1)} if options.smoke else {"width": 16, "depths": (2, 2)}
    module = PetraModule(
        petra.models.create("revnet18", in_channels=1, num_classes=10, **sizes),
        method="petra", stages=4, loss=nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=epochs * len(loaders[0]), cycle_momentum=False
        ),
    )  # fmt: skip
    best = ModelCheckpoint(monitor="val_accuracy", mode="max", save_last=True)
    trainer = Trainer(
        max_epochs=epochs, devices=1, callbacks=[best, LearningRateMonitor()], logger=CSVLogger("runs"),
        enable_progress_bar=False, log_every_n_steps=10,
    )  # fmt: skip
    trainer.fit(module, *loaders)  # ckpt_path="…/last.ckpt" continues exactly, with everything in flight
    score = trainer.validate(module, loaders[1], verbose=False)[0]
    print(score, best.best_model_path)
    return float(score["val_accuracy"])


if __name__ == "__main__":
    main()
