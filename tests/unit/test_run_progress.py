"""Figures of an epoch: the sums of today's floats to the bit, read when they are wanted and not at every tick."""

from dataclasses import asdict

import pytest
import torch
from helpers.operation_capture import Recording
from hypothesis import given
from hypothesis import strategies as st

from petra.pipeline import MicrobatchResult
from petra.trainer import progress_bar as progress
from petra.trainer.loss import count_correct
from petra.trainer.progress import RunProgress, ThroughputTimer
from petra.trainer.progress_bar import ProgressBar


def finished(loss, size=3, weight=1.0):
    outputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
    return MicrobatchResult(0, torch.tensor(loss, dtype=torch.float32), outputs, torch.arange(size) % 4, weight)


@given(st.lists(st.tuples(st.floats(0, 100, width=32), st.integers(1, 9)), max_size=8), st.integers(0, 8))
def test_sums_are_those_of_numbers_added_one_by_one(batches, reads_after):
    progress = RunProgress(loss=0.1, correct=2, samples=5)  # as a resumed run goes on with
    loss, correct = 0.1, 2
    for number, (value, size) in enumerate(batches):
        one = finished(value, size)
        progress.count([one])
        loss += float(one.loss) * size
        correct += int(count_correct(one.outputs, one.targets))
        if number == reads_after:
            progress.read()
            assert (progress.loss, progress.correct) == (loss, correct)
    progress.read()
    assert (progress.loss, progress.correct, progress.samples) == (loss, correct, 5 + sum(n for _, n in batches))
    assert all(value is None or isinstance(value, int | float | list) for value in asdict(progress).values())


def test_counting_does_not_make_the_host_wait():
    progress = RunProgress()
    with Recording():
        for _ in range(3):
            progress.count([finished(1.5)])
        with pytest.raises(RuntimeError, match="the host reads a number"):
            progress.read()
    progress.read()
    assert progress.loss == 3 * 3 * 1.5


def test_sums_begin_with_nothing_and_stand_ins_do_not_count():
    progress = RunProgress(batch=7)
    progress.count([finished(1.0), finished(9.0, weight=0.0)])
    progress.read()
    assert (progress.loss, progress.samples) == (3.0, 3)
    progress.reset_sums()
    progress.read()
    assert (progress.batch, progress.loss, progress.correct, progress.samples) == (7, 0.0, 0, 0)
    progress.count([finished(2.0)])
    progress.read()
    assert progress.loss == 6.0


def test_what_has_no_classes_has_a_loss_all_the_same():
    progress = RunProgress()
    progress.count([MicrobatchResult(0, torch.tensor(0.5), torch.zeros(4, 2), torch.zeros(4, 2))])
    progress.read()
    assert (progress.loss, progress.correct, progress.samples) == (2.0, -1, 4)


def test_outputs_of_a_chunked_loss_count_tokens_but_no_correct_answers():
    progress = RunProgress()
    targets = torch.tensor([[1, 2, -100], [0, -100, -100]])
    for _ in range(2):
        progress.count([MicrobatchResult(0, torch.tensor(0.5), (torch.zeros(2, 3, 4), torch.zeros(5, 4)), targets)])
    progress.read()
    assert (progress.loss, progress.correct, progress.samples) == (3.0, -1, 6)


def test_an_unknown_accuracy_is_not_shown(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown = ProgressBar("petra", 1, 40)
    shown.start(0, 0)
    shown.step(lambda: (6.0, -1, 4, 99.0))
    assert shown._bar.postfix == "loss 1.500, 99 samples/s"
    record = {"epoch": 1, "step": 9, "train_loss": 1.5, "train_accuracy": None, "test_accuracy": 0.5, "test_loss": 2.0}
    shown.end(record | {"samples_per_second": 99.0})
    assert "petra epoch 1/1: loss 1.500, test 50.0% (loss 2.000)" in capsys.readouterr().err


def test_time_is_added_lap_by_lap_and_not_while_the_watch_stands(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("petra.trainer.progress.time.perf_counter", lambda: now[0])
    progress = RunProgress(seconds=1.0, trained=90)
    watch = ThroughputTimer(progress, torch.device("cpu"))
    watch.start()
    now[0] = 12.0
    watch.lap()
    now[0] = 15.0
    watch.stop()
    assert progress.seconds == 6.0
    now[0] = 100.0
    watch.start()
    now[0] = 103.0
    watch.stop()
    assert progress.seconds == 9.0
    assert progress.rate == 10.0


def test_a_bar_looks_at_figures_twice_a_second(monkeypatch):
    now, looks = [0.0], []
    monkeypatch.setattr("petra.trainer.progress_bar.time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown = ProgressBar("petra", 1, 40)
    shown.start(0, 0)
    assert shown._bar is not None
    for tick in range(40):
        now[0] = 100 + tick * 0.1
        shown.step(lambda: looks.append(1) or (6.0, 3, 4, 99.0))
    assert len(looks) == 4 / progress._PERIOD
    assert shown._bar.n == 40
    assert "loss 1.500, accuracy 75.0%, 99 samples/s" in shown._bar.postfix
    shown.close()
    ProgressBar("petra", 1, 40, quiet=True).step(lambda: pytest.fail("nobody sees them"))
