"""Ticks that are replayed do what ordinary ticks do, bit for bit; graphs are stood in for by recorded operations."""

import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.captures import assert_same, assert_same_results, data, dropping, pair, step, tiny
from helpers.operation_capture import OperationCapture
from helpers.trainers import make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import Network, ReversibleBlock, ReversibleResidual
from petra.cudagraph import CudaGraphCapture, TickCapture
from petra.cudagraph.graph_capture import GraphMemory
from petra.cudagraph.guards import Guards
from petra.cudagraph.ring_buffers import make_copies
from petra.measure import Fidelity
from petra.optim import Muon
from petra.trainer.validation import make_graph_capture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("schedule", "accumulate", "method"),
    [
        (schedule, k, ("petra", "checkpointed")[(number + k) % 2])
        for number, schedule in enumerate(["lock-step", "low-staleness", (7, 4, 2, 0)])
        for k in (1, 2, 3)
    ],
    ids=str,
)
def test_replayed_ticks_are_ordinary_ticks(schedule, accumulate, method):
    """Every order with every number of micro-batches an update, and both methods with each of these."""
    trainers = pair(method=method, schedule=schedule, accumulate=accumulate)
    ticks = 12 + 5 * accumulate
    for x, y in data(ticks):
        step(trainers, x, y)
        assert_same(*trainers)
    executor = trainers[1].executor
    assert executor.capture.ineligible_reason is None
    assert executor.capture.captured_ticks >= ticks - trainers[1].schedule.staleness(0) - 5 * accumulate
    assert executor.capture._graph_capture.recorded == accumulate


@pytest.mark.parametrize(
    ("method", "accumulate"), [("backprop", 2), ("reversible", 1), ("pareprop", 2), ("features-replay", 1)]
)
def test_methods_without_a_pipeline(method, accumulate):
    trainers = pair(method=method, accumulate=accumulate)
    for x, y in data(20):
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks >= 17 - 4 * accumulate - 4 * (method == "features-replay")


def assert_same_to_the_end(trainers, ticks=24):
    """After each of some ticks, and when the pipeline is empty."""
    for x, y in data(ticks):
        step(trainers, x, y)
        assert_same(*trainers)
    for trainer in trainers:
        trainer.drain()
    assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 5


@pytest.mark.parametrize("schedule", ["lock-step", "low-staleness", (7, 4, 2, 0)], ids=str)
@pytest.mark.parametrize("method", ["delayed", "petra-stashed"])
def test_stashed_weights(method, schedule):
    trainers = pair(method=method, schedule=schedule)
    assert_same_to_the_end(trainers)


@pytest.mark.parametrize(
    ("corrections", "accumulate"),
    [
        (["predict"], 2),
        (["coast"], 2),
        (["spike"], 2),  # at updates alone: ticks with and without one are all there is
        (["shrink:0.8"], 2),
        (["reschedule:20"], 2),
        (["discrepancy"], 1),
        (["discrepancy"], 2),
        (["predict", "inertia:4", "reschedule:9"], 1),
        (["predict", "inertia:4", "reschedule:9"], 2),
    ],
    ids=str,
)
def test_corrections(corrections, accumulate):
    trainers = pair(corrections=corrections, accumulate=accumulate, schedule="lock-step")
    assert_same_to_the_end(trainers, ticks=20 + 2 * accumulate)


@pytest.mark.parametrize(
    ("method", "corrections"),
    [
        ("delayed", ["shrink:0.9"]),
        ("petra-stashed", ["spike"]),
        ("delayed", ["reschedule:20", "spike"]),
        ("petra-stashed", ["inertia:4", "shrink:0.9"]),
        ("delayed", ["inertia:4"]),
    ],
    ids=str,
)
def test_corrections_of_updates_with_stashed_weights(method, corrections):
    assert_same_to_the_end(pair(method=method, corrections=corrections), ticks=16)


@pytest.mark.parametrize("corrections", ["predict", "coast"])
@pytest.mark.parametrize("method", ["delayed", "petra-stashed"])
def test_predicted_weights_that_are_stashed_are_not_recorded(method, corrections):
    _, captured = pair(method=method, corrections=[corrections])
    for x, y in data(12):
        captured.step(x, y)
    assert (captured.executor.capture.ineligible_reason, captured.executor.capture.captured_ticks) == (
        "predicted weights are stashed",
        0,
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_momentum_that_falls_with_the_learning_rate(accumulate):
    trainers = pair(corrections=["predict", "inertia:4"], accumulate=accumulate, scheduler=dropping)
    for x, y in data(30 * accumulate):
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture._graph_capture.recorded == 2 * accumulate
    assert trainers[1].executor.capture.captured_ticks > 10 * accumulate


def test_momentum_that_falls_with_a_learning_rate_that_someone_sets():
    trainers = pair(corrections=["predict", "inertia:4"], accumulate=2, scheduler=None)
    for tick, (x, y) in enumerate(data(60)):
        for stage in (stage for trainer in trainers for stage in trainer.stages):
            stage.optimizer.param_groups[0]["lr"] = 0.05 if tick < 35 else 0.005
        step(trainers, x, y)
        assert_same(*trainers)
        assert trainers[1].stages[0].corrections.context.lr_ratio == (1 if tick < 35 else 0.125)
    assert trainers[1].executor.capture._graph_capture.recorded == 4


@pytest.mark.parametrize("corrections", [[], ["predict", "inertia:4"]])
def test_a_group_without_parameters(corrections):
    def grouped(parameters):
        groups = ([p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2])
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.05, momentum=0.9, fused=True)

    assert_same_to_the_end(pair(corrections=corrections, optimizer=grouped))


def test_around_replayed_ticks_everything_goes_on():
    """An uneven batch, one that counts less, an evaluation, a checkpoint, a drain, another batch size and rate."""
    trainers = pair(accumulate=2, schedule="lock-step")
    for turn in range(3):
        for number, (x, y) in enumerate(data(30, seed=turn)):
            uneven = 3 if number == 21 else 4
            step(trainers, x[:uneven], y[:uneven], weight=0.5 if (turn, number) == (2, 15) else 1.0)
            if number == 11:
                assert all(t.evaluate(data(2)) == trainers[0].evaluate(data(2)) for t in trainers)
            if number == 13:
                saved = copy.deepcopy([t.state_dict() for t in trainers])
            if number == 17 and turn == 1:
                for trainer, old in zip(trainers, saved, strict=True):
                    trainer.load_state_dict(old)
            if number == 5:
                for trainer in trainers:
                    for stage in trainer.stages:
                        stage.scheduler.base_lrs = [0.01 * (turn + 1)] * len(stage.scheduler.base_lrs)
            assert_same(*trainers)
        for trainer in trainers:
            trainer.drain()
        assert_same(*trainers)
    for x, y in data(20, size=6):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 30


@pytest.mark.parametrize("corrections", [[], ["discrepancy"]], ids=str)
def test_a_state_that_was_loaded_is_what_is_replayed(corrections):
    """With an optimizer that has no state, whose new memory would be noticed; that of a correction is."""
    trainers = pair(optimizer=lambda p: torch.optim.SGD(p, 0.05, fused=True), corrections=corrections)
    for number, (x, y) in enumerate(data(30)):
        if number == 16:
            saved = copy.deepcopy([t.state_dict() for t in trainers])
        if number == 19:
            for trainer, old in zip(trainers, saved, strict=True):
                trainer.load_state_dict(old)
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture._graph_capture.recorded == (2 if corrections else 1)
    assert trainers[1].executor.capture.captured_ticks > 12


def test_memory_is_given_back_with_the_trainer():
    """At once: collectors of garbage look only at the host's memory, and know nothing of what a GPU has."""
    _, replaying = pair()
    for x, y in data(16):
        replaying.step(x, y)
    assert replaying.executor.capture.captured_ticks > 0
    alive = weakref.ref(replaying.executor)
    gc.disable()
    try:
        del replaying, _
        assert alive() is None
    finally:
        gc.enable()


def test_a_pipeline_that_fills_again_is_replayed_without_being_recorded_again():
    trainers = pair()
    found = []
    for x, y in data(20):
        found += step(trainers, x, y)
    assert_same_results(found)  # ticks that were replayed since have not written over them
    executor = trainers[1].executor
    captured_ticks, recorded = executor.capture.captured_ticks, executor.capture._graph_capture.recorded
    for trainer in trainers:
        trainer.drain()
    for x, y in data(20):
        step(trainers, x, y)
    assert_same(*trainers)
    assert executor.capture._graph_capture.recorded == recorded
    assert executor.capture.captured_ticks > captured_ticks + 10


def test_adam_is_replayed_too():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    trainers = pair(optimizer=adamw, clip_norm=0.5)
    for x, y in data(20):
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 5


def test_modes_that_change_are_noticed():
    trainers = pair()
    for number, (x, y) in enumerate(data(30)):
        if number in (16, 18):
            for trainer in trainers:
                trainer.network.train(number == 18)
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 5


class Tempered(nn.Module):
    """A loss with a number that its owner may change."""

    def __init__(self):
        super().__init__()
        self.strength = 1.0

    def forward(self, outputs, targets):
        return self.strength * nn.functional.cross_entropy(outputs, targets)


def test_numbers_that_modules_hold_are_noticed_when_they_change():
    losses = [Tempered(), Tempered()]
    trainers = pair()
    for trainer, loss in zip(trainers, losses, strict=True):
        trainer.stages[-1].loss = loss
    trainers[1].executor.capture = TickCapture(trainers[1].executor, OperationCapture())
    for number, (x, y) in enumerate(data(40)):
        for trainer, loss in zip(trainers, losses, strict=True):
            loss.strength = 1.0 if number < 16 else 0.1
            norms = [m for m in trainer.network.modules() if isinstance(m, nn.BatchNorm2d)]
            for norm in norms:
                norm.momentum = 0.1 if number < 28 else 0.5
        step(trainers, x, y)
        assert_same(*trainers)
    assert norms
    assert trainers[1].executor.capture._graph_capture.recorded == 3
    assert trainers[1].executor.capture.captured_ticks > 15


def test_the_guards_notice_every_change():
    network = tiny()
    trainer, _ = pair(network)
    for x, y in data(10):
        trainer.step(x, y)
    guards = Guards(trainer.stages)
    stage = trainer.stages[1]
    norm = next(m for layer in stage.layers for m in layer.modules() if isinstance(m, nn.BatchNorm2d))
    parameter, optimizer = stage.parameters[0], stage.optimizer

    def replace_momentum():
        optimizer.state[parameter]["momentum_buffer"] = optimizer.state[parameter]["momentum_buffer"].clone()

    changes = {
        "a mode": lambda: norm.eval(),
        "a number": lambda: setattr(norm, "momentum", 0.3),
        "a number that is deleted": lambda: delattr(norm, "eps"),
        "another number after that": lambda: setattr(norm, "momentum", 0.4),
        "a frozen parameter": lambda: parameter.requires_grad_(False),
        "the memory of a parameter": lambda: setattr(parameter, "data", parameter.data.clone()),
        "the memory of a buffer": lambda: setattr(norm, "running_mean", norm.running_mean.clone()),
        "a buffer that is deleted": lambda: setattr(norm, "running_var", None),
        "a setting": lambda: optimizer.param_groups[0].update(weight_decay=0.5),
        "a new setting": lambda: optimizer.param_groups[0].update(more=True),
        "the memory of a momentum": replace_momentum,
        "a momentum that is deleted": lambda: optimizer.state[parameter].clear(),
        "a loaded state": lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    }
    before = guards()
    assert before == guards()
    for what, change in changes.items():
        change()
        after = guards()
        assert after != before, what
        assert after == guards()
        before = after
    optimizer.param_groups[0]["lr"] = 0.123  # it is read from memory
    optimizer.state[parameter]["step"] = 5
    assert guards() == before


def test_settings_of_an_optimizer_that_change_are_noticed():
    """A learning rate is read at every replay; momentum and weight decay are what they were in the recording."""
    trainers = pair()
    for number, (x, y) in enumerate(data(40)):
        for group in (g for t in trainers for stage in t.stages for g in stage.optimizer.param_groups):
            group["momentum"] = 0.9 if number < 16 else 0.5
            group["weight_decay"] = 1e-3 if number < 28 else 0.1
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture._graph_capture.recorded == 3
    assert trainers[1].executor.capture.captured_ticks > 15


def test_the_dtype_of_an_optimizer_is_a_setting_too():
    trainers = pair(optimizer=lambda p: Muon([x for x in p if x.ndim > 1], 0.01))
    for number, (x, y) in enumerate(data(28)):
        for group in (g for t in trainers for stage in t.stages for g in stage.optimizer.param_groups):
            group["dtype"] = torch.float32 if number < 16 else torch.bfloat16
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture._graph_capture.recorded == 2


def test_momentum_that_changes_all_the_time_is_not_replayed():
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)

    trainers = pair(scheduler=cycle)
    for x, y in data(30):
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks == 0


def test_weights_that_are_frozen_or_freed_are_noticed():
    trainers = pair()
    for number, (x, y) in enumerate(data(40)):
        if number in (16, 28):
            for trainer in trainers:
                for parameter in trainer.stages[1].parameters:
                    parameter.requires_grad_(number == 28)
        step(trainers, x, y)
        assert_same(*trainers)
    assert trainers[1].executor.capture._graph_capture.recorded == 3


def test_a_loss_that_is_not_a_number_is_found_a_little_later():
    """Or at once where a state is asked for or the pipeline is emptied; a state of before knows nothing of it."""
    _, replaying = pair(optimizer=lambda p: torch.optim.SGD(p, 0.05, fused=True))
    for x, y in data(16):
        replaying.step(x, y)
    x, y = data(1)[0]
    saved = copy.deepcopy(replaying.state_dict())
    for steps, go_on in ((30, lambda: None), (4, replaying.state_dict), (4, replaying.drain)):
        replaying.stages[0].parameters[0].data.fill_(float("nan"))
        with pytest.raises(RuntimeError, match=r"micro-batch 16 .*is nan.*updates were made"):
            [replaying.step(x, y) for _ in range(steps)] and go_on()
        replaying.load_state_dict(saved)
    [replaying.step(x, y) for _ in range(12)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "delayed", "accumulate": 2}, "weight stash"),
        ({"method": "backprop", "schedule": "1f1b", "accumulate": 2}, "keeps autograd graphs"),
        ({"method": "delayed", "schedule": "flush:2"}, "where the pipeline is flushed, the weight stash"),
        ({"method": "ddg"}, "keeps autograd graphs"),
        ({"method": "dni"}, "the optimizer of a synthesizer is not fused"),
        ({"method": "delayed", "corrections": ["predict"]}, "predicted weights"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "SGD is neither fused"),
    ],
)
def test_what_cannot_be_recorded_says_why_and_is_done_all_the_same(options, reason):
    trainers = pair(**options)
    for x, y in data(12):
        step(trainers, x, y)
    assert_same(*trainers)
    assert reason in trainers[1].executor.capture.ineligible_reason
    assert trainers[1].executor.capture.captured_ticks == 0


def test_dropout_is_noticed():
    network = tiny()
    network[1].f.append(nn.Dropout(0.5))
    trainers = pair(network)
    for x, y in data(20):
        step(trainers, x, y)
    assert_same(*trainers)
    assert "random numbers" in trainers[1].executor.capture.ineligible_reason


def test_what_is_watched_is_not_replayed():
    trainers = pair()
    seen, timed = [], []
    for number, (x, y) in enumerate(data(30)):
        if number == 20:
            trainers[1].executor.observers.append(lambda *said: seen.append(said))
        if number == 25:
            trainers[1].executor.observers.clear()
            trainers[1].executor.clock = lambda *said: timed.append(said)
        step(trainers, x, y)
        assert_same(*trainers)
    assert len(seen) == len(timed) == 5 * 4 * 3


def test_synthesizers_learn_in_a_replay(monkeypatch):
    monkeypatch.setattr("petra.methods.synthesizer.FUSED", ("cpu",))
    trainers = pair(method="dni")
    for number, (x, y) in enumerate(data(40)):
        uneven = 3 if number == 25 else 4
        step(trainers, x[:uneven], y[:uneven])
        assert_same(*trainers)
        if number == 10:
            saved = [copy.deepcopy(trainer.state_dict()) for trainer in trainers]
        if number == 20:  # they are in other memory from here on
            for synthesizer in (s.synthesizer for t in trainers for s in t.stages if not s.last):
                synthesizer.load_state_dict(copy.deepcopy(synthesizer.state_dict()))
        if number == 30:
            for trainer, before in zip(trainers, saved, strict=True):
                trainer.load_state_dict(before)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 25


@pytest.mark.parametrize(("here", "there"), [((), ("cpu",)), (("cpu",), ())], ids=["to a GPU", "from a GPU"])
def test_synthesizers_of_another_device_learn_as_it_is_done_here(here, there, monkeypatch):
    """A GPU has another kind of Adam than the CPU, whatever a checkpoint was written by."""
    monkeypatch.setattr("petra.methods.synthesizer.FUSED", here)
    saved, _ = pair(method="dni")
    for x, y in data(3):
        saved.step(x, y)
    monkeypatch.setattr("petra.methods.synthesizer.FUSED", there)
    _, loaded = pair(method="dni")
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    synthesizers = [stage.synthesizer for stage in loaded.stages if not stage.last]
    assert [s.capturable for s in synthesizers] == [bool(there)] * 3
    assert [s.optimizer.param_groups[0]["fused"] for s in synthesizers] == [bool(there)] * 3
    for x, y in data(10):
        loaded.step(x, y)
    assert (loaded.executor.capture.captured_ticks > 5) is bool(there)


@pytest.mark.parametrize(
    ("method", "accumulate"), [("petra", 1), ("petra", 2), ("backprop", 2), ("features-replay", 1)]
)
def test_ticks_between_those_whose_gradients_are_compared_are_replayed(method, accumulate):
    trainers = pair(method=method, accumulate=accumulate)
    watches = [Fidelity(trainer.executor, every=16 // accumulate) for trainer in trainers]
    with watches[0], watches[1]:
        for number, (x, y) in enumerate(data(44)):
            step(trainers, x, y)
            if number == 36:
                for trainer in trainers:
                    trainer.drain()
    assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 15
    assert watches[0].measurements == watches[1].measurements
    assert len({m.update for m in watches[1].measurements}) >= 2


@pytest.mark.parametrize("name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
def test_the_pool_of_a_failed_recording_is_left_in_old_and_new_versions_of_pytorch(name, monkeypatch):
    called = []
    for other in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        monkeypatch.delattr(torch._C, other, raising=False)
    for known in (name, "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, known, lambda *given, known=known: called.append((known, *given)), raising=False)
    generator = SimpleNamespace(clone_state=lambda: "cloned", graphsafe_set_state=called.append)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    graph_capture = object.__new__(CudaGraphCapture)
    graph_capture._device = torch.device("cuda", 0)
    graph_capture._reset_after_failure((0, 1))
    assert called == ["cloned", (name, 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]


def test_a_failed_recording_leaves_the_stream_that_was_there(monkeypatch):
    """PyTorch stays on the stream of the recording when CUDA ends it."""
    here = ["default"]

    @contextmanager
    def stream(other):
        before, here[0] = here[0], other
        try:
            yield
        finally:
            here[0] = before

    class Invalidated:
        def capture_begin(self, *pool, **how):
            assert here == ["recording"]

        def capture_end(self):
            raise RuntimeError("capture was invalidated")

    def fail():
        raise ValueError("no")

    def nothing(*given):
        return nullcontext()

    for name, stand_in in {"CUDAGraph": Invalidated, "stream": stream, "device": nothing}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: here[0])
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch._C, "_host_emptyCache", nothing, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", "its own")  # made on a GPU otherwise
    monkeypatch.setattr(CudaGraphCapture, "_reset_after_failure", nothing)
    graph_capture = object.__new__(CudaGraphCapture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    graph_capture._device, graph_capture._memory = torch.device("cuda", 0), GraphMemory()
    graph_capture._stream, graph_capture._open = "recording", []
    with pytest.raises(ValueError, match="no"):
        graph_capture.capture(fail)
    assert here == ["default"]


@settings(max_examples=100)
@given(st.permutations(range(6)), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_copies_never_read_what_they_have_overwritten(to, sources):
    memory = torch.arange(6.0)
    expected = memory.clone()
    for a, b in zip(to, sources, strict=True):
        expected[a] = memory[b]
    make_copies([(memory[a : a + 1], memory[b : b + 1]) for a, b in zip(to, sources, strict=True)])
    assert memory.equal(expected)


class Reading(nn.Module):
    def forward(self, x):
        return x * (1.0 if float(x.detach().sum()) > -1e9 else 2.0)


@pytest.mark.parametrize(
    "options", [{}, {"method": "delayed"}, {"corrections": ["predict", "spike"]}, {"accumulate": 2}]
)
def test_a_layer_that_cannot_be_recorded_is_done_all_the_same(options):
    """It fails in the middle of the tick, when half of the stages have been recorded."""
    network = tiny()
    network[2].f.append(Reading())
    trainers = pair(network, **options)
    for number, (x, y) in enumerate(data(20)):
        step(trainers, x, y)
        assert_same(*trainers)
        if number == 1:
            assert trainers[1].executor.capture.ineligible_reason is None
    assert "could not be captured (layer 2" in trainers[1].executor.capture.ineligible_reason
    assert trainers[1].executor.capture.captured_ticks == 0


def test_capture_is_for_gpus():
    with pytest.raises(ValueError, match="the device is cpu"):
        make(tiny(), cuda_graph=True)
    assert make_graph_capture(torch.device("cpu")) is None


def test_capture_is_the_default_on_a_gpu(monkeypatch):
    monkeypatch.setattr("petra.trainer.validation.CudaGraphCapture", lambda device: f"recorder of {device}")
    assert make_graph_capture(torch.device("cuda")) == "recorder of cuda"
    assert make_graph_capture(torch.device("cuda"), True) == "recorder of cuda"
    assert make_graph_capture(torch.device("cuda"), False) is None


class Masked(nn.Module):
    """A stem with a mask of a number a sample, repeated and not copied, for the layers that follow."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 8)

    def forward(self, x):
        return *self.fc(x).chunk(2, 1), (x[:, :1] > 0).float().expand(-1, 4)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *more):
        return torch.tanh(self.fc(sum(more, x))) * more[-1]


def test_a_companion_that_repeats_its_values_is_not_taken_for_one_without_values():
    torch.manual_seed(0)
    network = Network(Masked(), ReversibleBlock(Gated(), Gated()), Gated(), nn.Linear(4, 4), nn.Linear(4, 4))
    trainers = pair(network, stages=[3, 1, 1])
    for _ in range(12):
        step(trainers, torch.randn(5, 6), torch.randint(4, (5,)))
        assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 5


def test_what_is_kept_without_values_is_so_in_a_state_that_was_loaded_too():
    torch.manual_seed(0)
    couplings = (ReversibleResidual(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(3))
    network = Network(Halves(), *couplings, Joined())
    trainers = pair(network, stages=5, method="checkpointed", schedule="lock-step")
    batches = [(torch.randn(5, 8), torch.randint(8, (5,))) for _ in range(24)]
    for x, y in batches[:9]:
        step(trainers, x, y)
    saved = copy.deepcopy([trainer.state_dict() for trainer in trainers])
    trainers = pair(network, stages=5, method="checkpointed", schedule="lock-step")
    for trainer, state in zip(trainers, saved, strict=True):
        trainer.load_state_dict(state)
    for x, y in batches[9:]:
        step(trainers, x, y)
    for plain, replaying in zip(*(trainer.network.parameters() for trainer in trainers), strict=True):
        assert plain.equal(replaying)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 8


class Halves(nn.Module):
    def forward(self, x):
        return x.chunk(2, 1)


class Joined(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, y], 1)
