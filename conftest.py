"""Settings for all tests."""

import gc
import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # test processes share the cores
torch.backends.mkldnn.set_flags(False)  # its set-up costs more than the tiny convolutions of the tests
settings.register_profile("petra", deadline=None, max_examples=int(os.environ.get("PETRA_EXAMPLES", "12")))
settings.load_profile("petra")


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request, monkeypatch):
    """Every available device. Tiny networks never keep a GPU busy, so PaReprop is made to believe that they do."""
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: False)
    monkeypatch.setattr("petra.reversible.reverse_pass._CAUGHT_UP", {})
    return request.param


def pytest_collection_modifyitems(items):
    """Run tests that wait for other processes first, so that nobody waits for them at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_jobs.py", "test_ranks.py"))


def pytest_collection_finish():
    """Exclude the modules of PyTorch and of the tests from garbage collections, each of which would visit them."""
    gc.collect()
    gc.freeze()
