"""Networks, data and trainers for tests of Features Replay, DDG and DNI."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from petra import Network, Trainer

SEED = 5
METHODS = ("features-replay", "ddg", "dni")


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.05)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def make(network, loss=cross_entropy, **options):
    options = {"stages": 1} | options
    return Trainer(network, loss=loss, optimizer=optimizer, scheduler=scheduler, seed=SEED, **options)


def conv_network(dropout=True):
    """Eight layers of one stream, with batch norm where layers are cut and within them, and dropout."""

    def block(inputs, outputs, stride=1):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), *([nn.Dropout(0.1)] if dropout else []))

    head = (nn.Flatten(), nn.Linear(5 * 16, 4))
    return Network(block(2, 4), block(4, 4), block(4, 5, 2), block(5, 5), nn.BatchNorm2d(5), nn.Tanh(), *head)


def images(count, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(3, 2, size, size, generator=generator), torch.randint(4, (3,), generator=generator))
        for _ in range(count)
    ]
