"""`Trainer.fit` with sources of batches: continued exactly after a failure, also where batches are read ahead."""

import pytest
import torch
from helpers.libraries import library
from torch import nn

import petra
from petra.data import LoaderBatches, SampleBatches, StreamBatches

ROWS = [(torch.arange(6.0) * (i % 5 - 2), i % 3) for i in range(22)]


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(6)


class Stream:
    """A stream that knows its position."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self):
        while self.at < len(ROWS):
            self.at += 1
            yield ROWS[self.at - 1]


def make_loader():
    return LoaderBatches(library("torchdata.stateful_dataloader").StatefulDataLoader(ROWS, batch_size=4, shuffle=True))


pytestmark = pytest.mark.slow

SOURCES = {
    "samples": lambda: SampleBatches(ROWS, 4, transform=noise),
    "workers": lambda: SampleBatches(ROWS, 4, transform=noise, workers=1),
    "stream": lambda: StreamBatches(Stream(), 4, transform=noise, shuffle_block=7),
    "stream with workers": lambda: StreamBatches(Stream(), 4, transform=noise, shuffle_block=7, workers=1),
    "loader": make_loader,
}


class Failure(petra.Callback):
    def on_update(self, loop) -> None:
        if loop.step == 4:
            raise KeyboardInterrupt


def fit(source, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = petra.Trainer(
        network,
        method="petra",
        stages=3,
        accumulate=2,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    )
    trainer.fit(source, epochs=2, quiet=True, **options)
    return list(network.state_dict().values())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # called by torchdata
@pytest.mark.filterwarnings("ignore:.*nothing reversible.*", "ignore:.*no layer.*")
@pytest.mark.parametrize("name", SOURCES)
def test_a_training_continues_exactly_after_a_failure(name: str, tmp_path) -> None:
    wanted = fit(SOURCES[name]())
    broken = SOURCES[name]()
    with pytest.raises(KeyboardInterrupt):
        fit(broken, checkpoint_every=1, out=tmp_path, callbacks=[Failure()])
    found = fit(SOURCES[name](), checkpoint_every=1, out=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
