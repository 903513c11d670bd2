"""Reading ahead for a GPU, with a stand-in for CUDA streams that notes the order of events."""

from contextlib import contextmanager

import pytest
import torch

from petra.data.device_batches import Normalise, read_ahead

CUDA = torch.device("cuda")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What happens, in order; copies to the device stay on the CPU."""
    noted: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_stream(self, other: object) -> None:
            noted.append("wait")

    @contextmanager
    def use(stream: Stream):
        noted.append("side stream")
        yield
        noted.append("main stream")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr("petra.data.device_batches._pin", lambda item: item)
    monkeypatch.setattr("petra.data.device_batches._to_device", lambda item, device: item)
    return noted


def test_one_item_is_read_ahead(events: list[str]) -> None:
    def items():
        for i in range(3):
            events.append(f"read {i}")
            yield i, torch.tensor(i)

    def finish(item):
        events.append(f"finish {item[0]}")
        return item[0], item[1] * 2

    found = []
    for i, x in read_ahead(items(), CUDA, finish):
        events.append(f"use {i}")
        found.append(int(x))
    assert found == [0, 2, 4]
    wanted = ["read 0", "side stream", "finish 0", "main stream"]
    for i in range(3):
        wanted += ["wait"]
        wanted += [f"read {i + 1}", "side stream", f"finish {i + 1}", "main stream"] if i < 2 else []
        wanted += [f"use {i}"]
    assert events == wanted


def test_nothing_to_read(events: list[str]) -> None:
    assert list(read_ahead(iter([]), CUDA)) == []
    assert events == []


def test_errors_pass_through(events: list[str]) -> None:
    def items():
        yield torch.tensor(0)
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        list(read_ahead(items(), CUDA))


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    taken = []
    iterator = read_ahead((taken.append(i) or torch.tensor(i) for i in range(3)), torch.device("cpu"))
    next(iterator)
    assert taken == [0]


def test_normalisation_rounds_once() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    exact = (pixels.double() / 255 - 0.3) / 0.7
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = Normalise((0.3,), (0.7,), torch.device("cpu"), dtype)(pixels)
        assert found.dtype == dtype
        limit = 1e-12 if dtype == torch.float64 else 2e-7 if dtype == torch.float32 else 4e-3 * 1.5
        assert (found.double() - exact).abs().max() < limit
