"""Networks on the meta device, and their sizes."""

import torch

from petra import models


def on_paper(name, **arguments):
    with torch.device("meta"):
        return models.create(name, **arguments)


def count(network):
    return sum(p.numel() for p in network.parameters())


SIZES = {  # layers, parameters with 10 classes
    "resnet164-basic": (83, 2_602_906),
    "resnet512-basic": (257, 8_241_434),
    "resnet101-cifar": (35, 42_512_970),
    "resnet152-cifar": (52, 58_156_618),
}
