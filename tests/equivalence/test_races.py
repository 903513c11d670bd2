"""No two lanes of a recorded tick touch the same memory without one waiting for the other; and what finds that out."""

import pytest
import torch
from helpers.captures import data, fused, tiny, warming
from helpers.grids import all_pairs
from helpers.race_detector import RaceRecorder
from helpers.trainers import make
from torch import nn

from petra.cudagraph import TickCapture
from petra.cudagraph.tick_capture import _assign_branches
from petra.schedule import Kind, LockedForwardSchedule, SequentialSchedule, lock_step, low_staleness

SCHEDULES = ["lock-step", "low-staleness", "locked-forward"]


def record(capture=TickCapture, graph_capture=RaceRecorder, carried_out=None, **options):
    """The recorder of a trainer, when every tick of the cycle of accumulation has been recorded."""
    options = {"optimizer": fused, "scheduler": warming, "stages": 4, "clip_norm": 0.5, "accumulate": 1, **options}
    trainer, graph_capture = make(tiny(), **options), graph_capture()
    trainer.executor._current = carried_out or trainer.schedule
    trainer.executor.capture = capture(trainer.executor, graph_capture)
    for x, y in data(30):
        trainer.step(x, y)
        if graph_capture.recorded == options["accumulate"]:
            return graph_capture
    raise AssertionError(trainer.executor.capture.ineligible_reason)


@pytest.mark.parametrize(("method", "schedule", "accumulate"), all_pairs(["petra", "checkpointed"], SCHEDULES, [1, 2]))
def test_pipelines_have_no_race(method, schedule, accumulate):
    graph_capture = record(method=method, schedule=schedule, accumulate=accumulate)
    assert graph_capture.races == []
    # The last stage has nothing to do beside its forward; stages that are never at work at the same time share lanes.
    assert graph_capture.lanes == set(range(4 if schedule == "low-staleness" else 7))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", ["petra-stashed", "delayed"])
def test_stashed_weights_have_no_race(method, schedule):
    assert record(method=method, schedule=schedule, stages=3).races == []


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", ["reversible", "backprop", "pareprop", "features-replay"])
def test_methods_without_a_pipeline_have_no_race(method, accumulate):
    assert record(method=method, accumulate=accumulate, stages=3).races == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_synthesizers_have_no_race(accumulate, monkeypatch):
    monkeypatch.setattr("petra.methods.synthesizer.FUSED", ("cpu",))
    assert record(method="dni", accumulate=accumulate, stages=4).races == []


@pytest.mark.parametrize(
    ("correction", "schedule", "accumulate"), all_pairs(["predict", "discrepancy"], SCHEDULES, [1, 2])
)
def test_corrections_have_no_race(correction, schedule, accumulate):
    assert record(corrections=[correction], schedule=schedule, accumulate=accumulate, stages=3).races == []


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 6},
        {"schedule": (7, 4, 2, 0)},
        {"comm_dtype": torch.bfloat16},
        {"comm_dtype": torch.bfloat16, "autocast": torch.bfloat16, "stages": 6},
        {"clip_norm": None},
        {"corrections": ["spike", "shrink:0.8"]},
    ],
    ids=str,
)
def test_other_pipelines_have_no_race(options):
    assert record(**options).races == []


@pytest.mark.parametrize(
    ("method", "schedule", "accumulate"),
    [
        *all_pairs(["petra", "checkpointed"], SCHEDULES, [1, 2]),
        *(("features-replay", None, accumulate) for accumulate in (1, 2)),
    ],
)
def test_stages_that_share_a_branch_have_no_race(method, schedule, accumulate, monkeypatch):
    monkeypatch.setattr("petra.cudagraph.tick_capture._ENOUGH_ELEMENTS", 1)
    graph_capture = record(method=method, schedule=schedule, accumulate=accumulate)
    assert graph_capture.races == []
    assert graph_capture.lanes == {0, 1}


class Hasty(RaceRecorder):
    def after(self, number, other):
        pass


class Loose(RaceRecorder):
    def join(self):
        pass


class Forgetful(list):
    def append(self, message):
        pass


class Careless(TickCapture):
    def _perform_in_branches(self, tick):
        self._executor.mailbox.held = Forgetful()
        return super()._perform_in_branches(tick)


class UpdatesBeside(TickCapture):
    def _branch(self, number, action, before):
        if action.kind is Kind.UPDATE:
            return self._graph_capture.branch(2 * number + 1)
        return super()._branch(number, action, before)


class AlwaysBeside(TickCapture):
    def _branch(self, number, action, before):
        lane = 2 * number + (action.kind is Kind.BACKWARD)
        for other in (2 * number, 2 * number + 1):
            self._graph_capture.after(lane, other)
        return self._graph_capture.branch(lane)


class OneLane(TickCapture):
    def _branch(self, number, action, before):
        return self._graph_capture.branch(0)


class Overlapping(LockedForwardSchedule):
    """A stage goes backward while the one above it reads what it has just sent; no order of the library does that."""

    def tick(self, index, fed):
        *up, down = super().tick(index, fed)
        phases = [list(phase) for phase in (*up, ())]
        for action in down:
            phases[action.stage + 1].append(action)
        return tuple(map(tuple, phases))


@pytest.mark.parametrize(
    ("options", "race"),
    [
        (
            {"graph_capture": Hasty, "schedule": "lock-step"},
            "_fused_sgd_ in lane 2 writes what convolution_backward in lane 3 reads",
        ),
        (
            {"graph_capture": Hasty, "method": "delayed"},
            "_fused_sgd_ in lane 2 writes what convolution_backward in lane 3",
        ),
        ({"graph_capture": Loose}, "threshold_backward in lane 1 reads what add in lane 3 writes"),
        ({"graph_capture": Loose, "schedule": "lock-step"}, "nobody waits for lane 5 in the end"),
        ({"capture": UpdatesBeside}, "_fused_sgd_ in lane 1 writes what convolution in lane 0 reads"),
        (
            {"capture": AlwaysBeside, "schedule": "lock-step"},
            "CatBackward0 of a graph from lane 6 goes back in lane 7",
        ),
        ({"capture": AlwaysBeside, "method": "backprop"}, "ReluBackward0 of a graph from lane 0 goes back in lane 1"),
        (
            {"capture": Careless, "carried_out": Overlapping(4)},
            "_foreach_norm in lane 0 may be given memory that add in lane 2 reads",
        ),
    ],
)
def test_an_executor_with_a_fault_is_found_out(options, race):
    assert any(race in found for found in record(**options).races)


def test_what_is_held_is_not_given_to_another():
    assert record(carried_out=Overlapping(4)).races == []


def test_one_lane_has_no_race():
    assert record(capture=OneLane).races == []


def found(work):
    """The races of a few operations."""
    graph_capture = RaceRecorder()
    graph_capture.capture(lambda: work(graph_capture))
    return graph_capture.races


@pytest.mark.parametrize(
    ("first", "second", "race"),
    [
        (lambda x: x.add_(1), lambda x: x * 2, "mul in lane 1 reads what add_ in lane 0 writes"),
        (lambda x: x * 2, lambda x: x.add_(1), "add_ in lane 1 writes what mul in lane 0 reads"),
        (lambda x: x.add_(1), lambda x: x.mul_(2), "mul_ in lane 1 writes what add_ in lane 0 writes"),
        (lambda x: x[1:].zero_(), lambda x: x.view(2, 2) * 2, "mul in lane 1 reads what zero_ in lane 0 writes"),
        (
            lambda x: torch.add(x, 1, out=x),
            lambda x: torch._foreach_mul_([x], 2),
            "_foreach_mul_ in lane 1 writes what add in lane 0 writes",
        ),
        (lambda x: x * 2, lambda x: x + 1, None),
        (lambda x: x.add_(1), lambda x: x[1:].detach(), None),
        (lambda x: x.add_(1), lambda x: torch.zeros_like(x), None),
    ],
)
def test_two_lanes(first, second, race):
    x = torch.ones(4)

    def work(graph_capture, wait=lambda graph_capture: None):
        with graph_capture.branch(0):
            first(x)
        wait(graph_capture)
        with graph_capture.branch(1):
            second(x)
        graph_capture.join()

    assert (race in found(work)) if race else found(work) == []
    assert found(lambda graph_capture: work(graph_capture, lambda graph_capture: graph_capture.after(1, 0))) == []
    assert found(lambda graph_capture: work(graph_capture, lambda graph_capture: graph_capture.join())) == []
    assert race is None or found(
        lambda graph_capture: work(graph_capture, lambda graph_capture: graph_capture.after(0, 1))
    )


def test_running_statistics_are_written():
    norm, x = nn.BatchNorm1d(2), torch.randn(3, 2)

    def work(graph_capture):
        for lane in (0, 1):
            with graph_capture.branch(lane):
                norm(x)
        graph_capture.join()

    assert "native_batch_norm in lane 1 writes what native_batch_norm in lane 0 writes" in found(work)


def test_a_lane_waits_for_the_main_one_when_it_opens_only():
    x = torch.ones(2)

    def work(graph_capture, joins):
        x.add_(1)
        with graph_capture.branch(0):
            x * 2
        if joins:
            graph_capture.join()
        y = x + 1
        with graph_capture.branch(0):
            y * 2
        graph_capture.join()
        y.add_(1)

    assert found(lambda graph_capture: work(graph_capture, False)) == [
        "mul in lane 0 reads what add in the main lane writes"
    ]
    assert found(lambda graph_capture: work(graph_capture, True)) == []


def test_waits_add_up():
    x = torch.ones(2)

    def work(graph_capture, waits):
        for lane, operation in ((0, lambda: x.add_(1)), (1, lambda: torch.ones(2)), (2, lambda: x * 2)):
            for other in waits.get(lane, ()):
                graph_capture.after(lane, other)
            with graph_capture.branch(lane):
                operation()
        graph_capture.join()

    assert found(lambda graph_capture: work(graph_capture, {1: [0], 2: [1]})) == []
    assert found(lambda graph_capture: work(graph_capture, {2: [1]})) == [
        "mul in lane 2 reads what add_ in lane 0 writes"
    ]
    assert found(lambda graph_capture: work(graph_capture, {2: [3]})) == [
        "mul in lane 2 reads what add_ in lane 0 writes"
    ]


@pytest.mark.parametrize("how", ["freed", "held", "waited for", "of another lane", "there before", "in use by nobody"])
def test_memory_that_was_freed(how):
    x = [torch.ones(2)]

    def work(graph_capture):
        with graph_capture.branch(0):
            if how != "there before":
                x[0] = torch.ones(2)
        graph_capture.after(1, 0)
        with graph_capture.branch(1):
            if how != "in use by nobody":
                x[0] * 2
        held = x.pop()
        if how != "held":
            del held
        if how == "waited for":
            graph_capture.after(0, 1)
        with graph_capture.branch(2 if how == "of another lane" else 0):
            torch.zeros(3)
        graph_capture.join()

    race = "zeros in lane 0 may be given memory that mul in lane 1 reads"
    assert found(work) == ([race] if how == "freed" else [])


def test_a_graph_goes_back_where_it_was_made():
    x = torch.ones(2, requires_grad=True)

    def work(graph_capture, lane):
        with graph_capture.branch(0):
            y = (x * 2).sin()
        graph_capture.after(1, 0)
        with graph_capture.branch(lane):
            torch.autograd.grad(y.sum(), x)
        graph_capture.join()

    names = ["SinBackward0", "MulBackward0"]
    assert found(lambda graph_capture: work(graph_capture, 0)) == []
    assert found(lambda graph_capture: work(graph_capture, 1)) == [
        f"{n} of a graph from lane 0 goes back in lane 1" for n in names
    ]


@pytest.mark.parametrize("schedule", [lock_step, low_staleness, LockedForwardSchedule, SequentialSchedule])
@pytest.mark.parametrize("stages", [1, 2, 5, 10])
def test_stages_of_a_phase_have_branches_of_their_own(schedule, stages):
    tick = schedule(stages).tick(40, 41)
    phases = [{action.stage for action in phase} for phase in tick]
    numbers = _assign_branches(tick, 100)
    assert all(len({numbers[s] for s in phase}) == len(phase) for phase in phases)
    assert len(set(numbers.values())) == max(map(len, phases))
    assert set(_assign_branches(tick, 2).values()) <= {0, 1}
