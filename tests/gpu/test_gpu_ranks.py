"""Ranks that share one GPU: captured ticks, ordinary ones and one process compute the same bits. Messages use gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]
TESTS = Path(__file__).parents[1]


def run(processes, **case):
    """Return the numbers of captured ticks; no rank may give a reason against it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command += ["-m", "helpers.gpu_rank", json.dumps(case)]
    done = subprocess.run(command, env=environment, timeout=150, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(rank for rank, _, _ in found) == list(range(processes))
    assert {reason for _, _, reason in found} == {None}
    return [ticks for _, ticks, _ in found]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["lock-step", "low-staleness"])
def test_two_hundred_ticks(ranks, schedule):
    assert min(run(ranks, schedule=schedule)) > 80


@pytest.mark.parametrize("method", ["delayed", "petra-stashed", "checkpointed", "features-replay"])
def test_methods(method):
    assert min(run(2, method=method, ticks=130)) > 20


def test_accumulation():
    assert min(run(2, accumulate=2)) > 60


def test_a_flushed_pipeline():
    assert min(run(2, schedule="1f1b", accumulate=4)) > 40


def test_replicas():
    assert min(run(4, replicas=2)) > 60
