"""Captured ticks of several ranks do what ordinary ones do, bit for bit; recorded operations stand in for graphs.

Ranks are threads here. `tests/gpu` has processes with real graphs.
"""

import copy

import pytest
import torch
from helpers.captures import assert_equal, assert_same_results, data, fused, tiny, warming
from helpers.operation_capture import OperationCapture
from helpers.trainers import make
from hypothesis import given, settings
from hypothesis import strategies as st

from petra.cudagraph import RankTickCapture
from petra.distributed import run_together

pytestmark = pytest.mark.slow

TICKS = 22


def pair(transport, network, capture=OperationCapture, **options):
    """The trainer of a rank twice, the second with ticks that are captured."""
    options = {"optimizer": fused, "scheduler": warming, "stages": 4, **options}
    trainers = tuple(make(copy.deepcopy(network), transport=transport, **options) for _ in range(2))
    trainers[1].executor.capture = RankTickCapture(trainers[1].executor, capture())
    return trainers


def state(trainer):
    """The state of the stages of this rank."""
    return [[*stage.trained(), *(g for g in stage.gradients() if g is not None)] for stage in trainer.stages]


def train(transport, network=None, batches=None, weights=(), **options):
    """Train both in turns, and compare them after every tick; return the captured ticks and the reason against it."""
    plain, captured = pair(transport, tiny() if network is None else network, **options)
    replica = transport.position.replica
    for number, (x, y) in enumerate(batches or data(TICKS)):
        share = slice(2 * replica, 2 * replica + 2) if transport.position.replicas > 1 else slice(None)
        weight = weights[number] if number < len(weights) else 1.0
        results = [trainer.step(x[share], y[share], weight) for trainer in (plain, captured)]
        assert_same_results(list(zip(*results, strict=True)))
        assert_equal(state(plain), state(captured))
    for trainer in (plain, captured):
        trainer.drain()
    assert_equal(state(plain), state(captured))
    assert_equal(plain.state_dict(), captured.state_dict())
    return captured.executor.capture.captured_ticks, captured.executor.capture.ineligible_reason


def together(ranks=2, replicas=1, fewest=8, **options):
    found = run_together(lambda transport: train(transport, **options), ranks, replicas)
    assert [reason for _, reason in found] == [None] * (ranks * replicas)
    assert min(ticks for ticks, _ in found) >= fewest
    return found


@pytest.mark.parametrize(
    ("ranks", "schedule"), [(2, "lock-step"), (2, (9, 6, 3, 0)), (4, "low-staleness"), (4, "lock-step")], ids=str
)
def test_petra(ranks, schedule):
    together(ranks, schedule=schedule, fewest=TICKS - 18)


def test_accumulation():
    together(accumulate=3, batches=data(34))


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        ("checkpointed", "low-staleness"),
        ("delayed", "lock-step"),
        ("petra-stashed", "low-staleness"),
        ("features-replay", None),
        ("reversible", None),
        ("backprop", None),
    ],
)
def test_methods(method, schedule):
    together(method=method, schedule=schedule, batches=data(26 if schedule == "lock-step" else TICKS))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_flushed_pipelines(schedule):
    together(schedule=schedule, accumulate=2, batches=data(24))


def test_interleaved_stages():
    together(placement=[0, 1, 0, 1], schedule="low-staleness")


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 2), (2, 1)])
def test_replicas(ranks, accumulate):
    together(ranks, 2, accumulate=accumulate, batches=data(14 + 6 * accumulate))


def test_replicas_of_which_one_cannot_capture_a_tick():
    """Shares of different sizes: both make the same collective calls, captured or not."""
    weights = [1.0] * 14 + [1.5] + [1.0] * 8

    def one(transport):
        return train(transport, weights=weights if transport.position.replica == 0 else (), batches=data(24))

    assert min(ticks for ticks, _ in run_together(one, 2, 2)) > 5


@pytest.mark.parametrize("corrections", [["predict"], ["predict", "inertia:4"], ["shrink:0.8"]], ids=str)
def test_corrections(corrections):
    together(corrections=corrections)


@pytest.mark.parametrize("comm_dtype", [torch.bfloat16, "int8", "streams=bf16,gradients=int8"], ids=str)
def test_rounded_messages(comm_dtype):
    together(3, comm_dtype=comm_dtype)


def test_images_in_channels_last():
    together(network=tiny().to(memory_format=torch.channels_last))


def test_batches_of_other_sizes_are_not_captured():
    batches = data(12) + data(3, size=3) + data(12)
    together(batches=batches, fewest=5)


@pytest.mark.parametrize("last", [False, True])
def test_a_rank_without_the_first_and_the_last_stage_needs_no_data(last):
    """Only the shapes."""

    def work(transport):
        network = tiny().to(memory_format=torch.channels_last if last else torch.contiguous_format)
        plain, captured = pair(transport, network)
        for x, y in data(TICKS):
            plain.step(x, y)
            captured.step(*((x.to("meta"), y.to("meta")) if transport.position.rank == 1 else (x, y)))
            assert_equal(state(plain), state(captured))
        return captured.executor.capture.captured_ticks

    assert min(run_together(work, 3)) > 8


@pytest.mark.parametrize("comm_dtype", [None, "int8"])
def test_around_evaluations_states_and_drains(comm_dtype):
    def work(transport):
        plain, captured = pair(transport, tiny(), comm_dtype=comm_dtype)
        for trainer in (plain, captured):
            for number, (x, y) in enumerate(data(40)):
                trainer.step(x, y)
                if number == 14:
                    trainer.evaluate(data(2))
                if number == 18:
                    saved = copy.deepcopy(trainer.state_dict())
                if number == 24:
                    trainer.load_state_dict(saved)
                if number == 26:
                    trainer.drain()
                if number == 36:
                    for stage in trainer.stages:
                        stage.optimizer.param_groups[0]["lr"] = 0.001
        assert_equal(state(plain), state(captured))
        assert_equal(plain.state_dict(), captured.state_dict())
        return captured.executor.capture.captured_ticks

    assert min(run_together(work, 2)) > 10


def test_a_message_that_waits_in_a_ring_buffer_leaves_before_it_is_overwritten():
    together(3, stages=6, schedule="lock-step", accumulate=3, flush_until=4, batches=data(42), fewest=5)


@pytest.mark.parametrize("method", ["petra", "reversible"])
def test_batches_of_another_size_from_some_tick_on(method):
    together(3, stages=3, method=method, batches=data(16) + data(16, size=3), fewest=12)


def test_a_smaller_batch_now_and_then():
    batches = [batch for _ in range(4) for batch in (*data(6), *data(1, size=3))]
    together(3, stages=3, method="reversible", batches=batches, fewest=8)


class FailsAt(OperationCapture):
    """A capture of which one call fails half-way."""

    call, calls = 0, 0

    def capture(self, work):
        self.calls += 1
        if self.calls == self.call:

            def half():
                work()
                raise RuntimeError("this graph could not be captured")

            return super().capture(half)
        return super().capture(work)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_part_that_cannot_be_captured(call):
    """The tick continues without graphs, and no message is lost or sent twice."""
    fails = type("Fails", (FailsAt,), {"call": call})

    def work(transport):
        capture = fails if transport.position.rank == 0 else OperationCapture
        return train(transport, capture=capture, stages=4, placement=[0, 1, 0, 1])

    (ticks, reason), (others, fine) = run_together(work, 2)
    assert (ticks, fine) == (0, None)
    assert "this graph could not be captured" in reason
    assert others > 8


@settings(max_examples=3, deadline=None)
@given(
    placement=st.sampled_from([[0, 0, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 2], [2, 1, 0, 2]]),
    schedule=st.sampled_from(["lock-step", "low-staleness", (7, 4, 2, 0)]),
    accumulate=st.integers(1, 2),
    method=st.sampled_from(["petra", "checkpointed"]),
)
def test_any_placement(placement, schedule, accumulate, method):
    together(
        max(placement) + 1,
        placement=placement,
        schedule=schedule,
        accumulate=accumulate,
        method=method,
        batches=data(14 + 6 * accumulate),
        fewest=2,
    )
