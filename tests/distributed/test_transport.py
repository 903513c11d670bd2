"""Ranks as threads of this process: any partition, placement and schedule gives the bits of one process."""

import copy
from itertools import product

import pytest
import torch
from helpers.networks import batches, mixed_network, reversible_network
from helpers.rank_worker import fingerprint
from helpers.replicas import train_replicas
from helpers.trainers import make, same_weights, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import Network, models
from petra.distributed import run_together
from petra.distributed.host_message import BadMessage, HostMessage, ScatteredMessage
from petra.distributed.message_buffers import MessageBuffers
from petra.distributed.transport import flatten, make_buckets, unflatten_into
from petra.measure import MemoryProbe
from petra.pipeline import message_layout
from petra.pipeline.message_layout import MessageLayout, layout_of
from petra.reversible import AffineCoupling, FixedPointCoupling
from petra.schedule import Action, Deadlock, Kind

pytestmark = pytest.mark.slow

TICKS = 12
METHODS = ["petra", "delayed", "checkpointed", "backprop 1f1b", "reversible 1f1b", "reversible"]


def train(transport=None, ticks=TICKS, **options):
    """Fingerprints of the stages of this rank after every tick and at the end, losses, and an evaluation."""
    torch.manual_seed(0)
    trainer = make(mixed_network(), seed=3, transport=transport, **options)
    seen, losses = [], {}
    for i, (x, y) in enumerate(batches(ticks)):
        losses |= {f.microbatch: float(f.loss) for f in trainer.step(x, y)}
        seen.append({stage.index: fingerprint(stage) for stage in trainer.stages})
        if i == 7:
            found = trainer.evaluate(batches(3, seed=5))
    losses |= {f.microbatch: float(f.loss) for f in trainer.drain()}
    seen.append({stage.index: fingerprint(stage) for stage in trainer.stages})
    return seen, losses, found


@st.composite
def layouts(draw):
    """The number of layers and the rank of each stage, with the last stage on the last rank."""
    stages = draw(st.integers(1, 6))
    borders = sorted(draw(st.permutations(range(1, 6)))[: stages - 1])
    sizes = [b - a for a, b in zip([0, *borders], [*borders, 6], strict=True)]
    ranks = draw(st.integers(1, stages))
    others = draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))
    placement = [*draw(st.permutations([*range(ranks - 1), *others])), ranks - 1]
    return sizes, placement


@settings(max_examples=8)
@given(layouts(), st.integers(1, 3), st.sampled_from(METHODS), st.data())
def test_any_placement_gives_the_bits_of_one_process(layout, k, method, data):
    sizes, placement = layout
    method, _, schedule = method.partition(" ")
    options = {"method": method, "stages": sizes, "accumulate": k, "schedule": schedule or None}
    if method not in ("backprop", "reversible"):
        options["schedule"] = data.draw(st.sampled_from(["lock-step", "low-staleness", "1f1b", "flush:2"]))
        options["comm_dtype"] = data.draw(st.sampled_from([None, torch.bfloat16, "int8", "streams=bf16,gradients=fp8"]))
    expected = train(**options)
    ranks = max(placement) + 1
    found = run_together(lambda transport: train(transport, placement=placement, **options), ranks)
    for tick, stages in enumerate(expected[0]):
        assert {k: v for rank in found for k, v in rank[0][tick].items()} == stages, tick
    assert {m: loss for rank in found for m, loss in rank[1].items()} == expected[1]
    assert all(rank[2] == expected[2] for rank in found)


def test_layers_that_are_compiled_one_by_one_train_on_ranks():
    def train(transport=None):
        torch.manual_seed(0)
        layers = models.create("resnet18", depths=(1, 1), width=2, num_classes=4, in_channels=2)
        network = Network(*(torch.compile(layer, backend="eager", dynamic=False) for layer in layers))
        trainer = make(network, method="delayed", stages=4, transport=transport)
        return {f.microbatch: float(f.loss) for x, y in batches(5) for f in trainer.step(x, y)}

    (_, found), expected = run_together(train, 2), train()
    assert found
    assert found == expected


def test_bf16_messages_change_the_result_a_little():
    plain, rounded = (train(stages=4, comm_dtype=dtype)[1] for dtype in (None, torch.bfloat16))
    assert plain != rounded
    assert max(abs(plain[m] - rounded[m]) for m in plain) < 0.5


@pytest.mark.parametrize("method", ["petra", "checkpointed", "delayed"])
def test_inputs_are_saved_in_the_dtype_of_messages(method):
    def trained(dtype):
        torch.manual_seed(0)
        trainer = make(mixed_network(), method=method, stages=6, comm_dtype=dtype)
        for x, y in batches(12):
            trainer.step(x, y)
        stages = trainer.stages[1:]
        inputs = [streams for stage in stages for saved in stage.saved.values() for streams in saved.inputs]
        return trainer, [x for streams in inputs for x in streams if 0 not in x.stride()]

    trainer, inputs = trained(torch.bfloat16)
    assert inputs
    assert {x.dtype for x in inputs} == {torch.bfloat16}
    for stage in trainer.stages:  # as if they had been saved in the dtype that the layers compute with
        for saved in stage.saved.values():
            saved.inputs = [trainer.executor.mailbox.unpack(stage, streams) for streams in saved.inputs]
    trainer.drain()
    twin, _ = trained(torch.bfloat16)
    twin.drain()
    assert same_weights(trainer.network, twin.network)
    assert {x.dtype for x in trained(None)[1]} == {torch.float32}


@pytest.mark.parametrize("method", ["petra", "checkpointed"])
def test_a_layer_that_computes_in_bf16_does_not_unpack_messages(method, monkeypatch):
    def trained(widened):
        torch.manual_seed(0)
        network = models.create("revnet18", width=2, num_classes=4, in_channels=2)
        options = {"autocast": torch.bfloat16, "comm_dtype": torch.bfloat16}
        trainer = make(network, method=method, stages=[1] * 8 + [2], **options)
        assert [stage.accepts(torch.bfloat16) for stage in trainer.stages] == [True] * 8 + [False]
        for stage in trainer.stages if widened else ():
            monkeypatch.setattr(stage, "accepts", lambda dtype: False)
        for x, y in batches(13):
            trainer.step(x.repeat(1, 1, 4, 4), y)
        trainer.drain()
        return trainer.network

    assert same_weights(trained(False), trained(True))


class Scaled(nn.Conv2d):
    def forward(self, x):
        return (0.1 * super().forward(x)).chunk(2, dim=1)


@pytest.mark.parametrize("coupling", [FixedPointCoupling, AffineCoupling])
def test_couplings_that_need_float32_get_it(coupling):
    """A fixed-point coupling rejects other dtypes, and an affine coupling would round both its product and its sum."""
    torch.manual_seed(0)
    network = reversible_network(3)
    for layer in network[1:-1]:
        layer.coupling = coupling
        if coupling is AffineCoupling:
            layer.f, layer.g = Scaled(3, 6, 1), Scaled(3, 6, 1)
    options = {"autocast": torch.bfloat16, "comm_dtype": torch.bfloat16}
    trainer = make(network, stages=5, **options)
    assert [stage.accepts(torch.bfloat16) for stage in trainer.stages] == [True, False, False, False, True]
    for x, y in batches(10):
        trainer.step(x, y)
    trainer.drain()


def test_bf16_messages_need_a_float32_network():
    with pytest.raises(ValueError, match=r"is torch\.float64, but comm_dtype is for float32 networks only"):
        make(mixed_network().double(), stages=2, comm_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("method", "dtype", "stream", "gradient"),
    [
        ("petra", None, 576, 576),
        ("petra", torch.bfloat16, 288, 288),
        ("petra", "streams=bf16,gradients=int8", 288, 156),
        ("checkpointed", "int8", 156, 156),
    ],
)
def test_two_streams_go_up_and_four_go_down_at_any_depth(method, dtype, stream, gradient):
    """Bytes per micro-batch and direction between two reversible stages: 3 · 3 · 4 · 4 values, in 3 blocks.

    Stages that save their inputs send gradients only.
    """
    per_edge = {}
    down = 2 * gradient + (2 * stream if method == "petra" else 0)

    def work(transport):
        torch.manual_seed(0)
        layers = transport.position.ranks
        trainer = make(
            reversible_network(layers),
            transport=transport,
            stages=[2, *[1] * (layers - 2), 2],
            method=method,
            comm_dtype=dtype,
        )
        for x, y in [*batches(3), *batches(3)]:  # all of one size
            trainer.step(x, y)
        trainer.drain()
        return dict(transport.sent)

    for ranks in (2, 3, 5):
        for rank, sent in enumerate(run_together(work, ranks)):
            for (to, kind), count in sent.items():
                assert to == rank + (1 if kind == "F" else -1)
                per_edge.setdefault((ranks, kind), set()).add(count / 6)
    for ranks in (2, 3, 5):
        assert per_edge[ranks, "F"] == {2 * stream}
        assert per_edge[ranks, "B"] == {down}


def test_memory_of_a_reversible_rank_does_not_grow_with_the_pipeline():
    def work(transport):
        torch.manual_seed(0)
        ranks = transport.position.ranks
        trainer = make(reversible_network(ranks - 2), transport=transport, stages=ranks)
        data = list(batches(5)) * 12
        for x, y in data[: ranks + 4]:  # it is full after as many ticks as there are ranks
            trainer.step(x, y)
        with MemoryProbe(trainer.executor) as probe:
            trainer.step(*data[0])
        return probe.activation_peak, probe.stages[0].total

    peaks = {}
    for ranks in (4, 10):
        found = run_together(work, ranks)
        # Every other rank, because two kinds of blocks alternate.
        peaks[ranks] = {found[rank] for rank in range(2, ranks - 1, 2)}
    assert len(peaks[4]) == 1
    assert peaks[4] == peaks[10]


@pytest.mark.parametrize("method", ["petra", "delayed", "backprop"])
@pytest.mark.parametrize("uneven", [False, True])
def test_replicas_equal_one_pipeline_with_all_their_samples(method, uneven):
    options = {"stages": 3, "accumulate": 2, "method": method, "clip_norm": 1.0}
    expected = train_replicas(uneven=uneven, **options)
    for ranks, replicas in ((3, 2),) if uneven else ((2, 2), (1, 4)):
        found = run_together(lambda t: train_replicas(t, uneven=uneven, **options), ranks, replicas)
        for weights in found:
            for name, value in weights.items():
                assert torch.allclose(value, expected[name], rtol=0, atol=1e-10), (name, ranks, replicas)
        assert {name for weights in found for name in weights} == set(expected)


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_of_all_ranks_are_gathered_on_the_last(replicas):
    def work(transport):
        torch.manual_seed(0)
        placement = [0, 1, 0, 2] if transport.position.ranks > 1 else None
        trainer = make(mixed_network(), transport=transport, stages=4, placement=placement)
        finished = [done for x, y in batches(9) for done in trainer.step(x, y)] + trainer.drain()
        found = trainer.weights()
        if found is not None:  # they are copies
            kept = {name: value.clone() for name, value in found.items()}
            next(p for p in trainer.network.parameters() if not p.is_meta).data.zero_()
            assert all(torch.equal(value, kept[name]) for name, value in found.items())
        return found, len(finished), trainer.predict(next(iter(batches(1)))[0]) is not None

    (whole, *_), *_ = run_together(work, 1, replicas)
    parts = run_together(work, 3, replicas)
    assert list(whole) == list(mixed_network().state_dict())
    assert [rest for _, *rest in parts] == [[0, False]] * 2 * replicas + [[9, True]] * replicas
    (found,) = [found for found, *_ in parts if found is not None]
    assert found is parts[-replicas][0]  # on the last rank of the first replica
    assert list(found) == list(whole)
    network = mixed_network()
    network.load_state_dict(found)
    assert all(torch.equal(value, whole[name]) for name, value in network.state_dict().items())


def test_only_tensors_can_be_gathered():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return "seven"

    network = nn.Sequential(nn.Linear(2, 2), Counting(2, 2))

    def work(transport):
        make(copy.deepcopy(network), transport=transport, stages=2).weights()

    with pytest.raises(ValueError, match=r"1\._extra_state is not a tensor"):
        run_together(work, 2)


def test_states_of_all_ranks_can_be_loaded_together_but_not_alone():
    data = list(batches(12))

    def work(transport=None, parts=()):
        torch.manual_seed(0)
        trainer = make(mixed_network(), transport=transport, stages=4)
        if parts:
            with pytest.raises(ValueError, match="stage 0 is not in this state, which has 2, 3: it is the state"):
                trainer.load_state_dict(parts[1])
            stages = {index: stage for part in parts for index, stage in part["stages"].items()}
            trainer.load_state_dict({**parts[0], "stages": stages})
        for x, y in data[7:] if parts else data[:7]:
            trainer.step(x, y)
        if transport is not None:
            return copy.deepcopy(trainer.state_dict())
        trainer.drain()
        return trainer.weights()

    found = work(parts=run_together(work, 2))
    torch.manual_seed(0)
    expected = trained(mixed_network(), 12, stages=4).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_drained_state_of_one_rank_is_rejected():
    def work(transport):
        torch.manual_seed(0)
        trainer = make(mixed_network(), transport=transport, stages=4)
        trainer.drain()
        return copy.deepcopy(trainer.state_dict())

    part, _ = run_together(work, 2)
    with pytest.raises(ValueError, match="stage 2 is not in this state, which has 0, 1: it is the state of one rank"):
        make(mixed_network(), stages=2).load_drained(part)


@pytest.mark.parametrize("method", ["petra", "ddg"])  # saves graphs while statistics are averaged
def test_replicas_keep_the_same_weights_and_statistics(method):
    def work(transport):
        torch.manual_seed(0)
        trainer = make(mixed_network(), transport=transport, method=method, stages=2, seed=3)
        for x, y in batches(9):
            share = [t.tensor_split(2)[transport.position.replica] for t in (x, y)]
            trainer.step(*share, weight=2 * len(share[1]) / len(y))
        trainer.drain()
        return trainer.network.state_dict()

    first, second = run_together(work, 1, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_deadlock_is_detected():
    layout = layout_of((torch.empty(2, device="meta"),))

    def work(transport):
        return transport.receive(1 - transport.position.rank, Action(0, Kind.FORWARD, 0), layout)()

    with pytest.raises(Deadlock, match="every rank waits"):
        run_together(work, 2)


def test_an_error_on_one_rank_ends_all_ranks():
    def work(transport):
        if transport.position.rank == 1:
            raise ZeroDivisionError("on purpose")
        transport.gather(1)

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run_together(work, 3)


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x), 2 * self.inner(x)


class Choose(nn.Module):
    """Uses its second input every other time."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, y):
        self.calls += 1
        return x if self.calls > 6 else x + y


def test_a_gradient_that_is_sometimes_missing_is_rejected():
    data = [(torch.randn(3, 4), torch.randint(4, (3,))) for _ in range(6)]

    def work(transport):
        torch.manual_seed(0)
        trainer = make(Network(Fork(), Choose(), nn.Linear(4, 4)), transport=transport, stages=3, placement=[0, 1, 1])
        for x, y in data:
            trainer.step(x, y)

    with pytest.raises(ValueError, match="stage 1 has gradients for different inputs in micro-batch"):
        run_together(work, ranks=2)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_message_with_another_shape_or_dtype_is_rejected(other):
    def work(transport):
        action = Action(0, Kind.FORWARD, 0)
        if transport.position.rank == 0:
            transport.send(1, action, (other,))
        else:
            with pytest.raises(BadMessage, match=r"received .* instead of"):
                transport.receive(0, action, layout_of((torch.empty(2, device="meta"),)))()

    run_together(work, 2)


def test_loading_a_state_discards_messages_that_were_received_later():
    def work(transport):
        torch.manual_seed(0)
        trainer = make(mixed_network(), stages=2, schedule="lock-step", transport=transport)
        trainer.step(*data[0])
        state = copy.deepcopy(trainer.state_dict())
        for x, y in data[1:]:
            trainer.step(x, y)
        trainer.load_state_dict(state)
        for index, stage in trainer.state_dict()["stages"].items():
            for what in ("forward", "backward"):
                assert stage["flight"][what].keys() == state["stages"][index]["flight"][what].keys()

    data = list(batches(4))
    run_together(work, 2)


def test_an_error_on_one_rank_is_raised_on_all():
    """Otherwise, the other ranks would continue and wait for it."""

    def adamw(parameters):
        return torch.optim.AdamW(parameters, 1e-3)

    def trainer(transport, frozen, **options):
        torch.manual_seed(0)
        network = mixed_network()
        network[:3].requires_grad_(not frozen)
        return make(network, stages=2, transport=transport, **options)

    def work(transport):
        with pytest.raises(ValueError, match="spike works with SGD with momentum, not with AdamW"):
            trainer(transport, True, optimizer=adamw, corrections=["spike"])  # rank 0 has nothing to correct
        state = trainer(transport, True).state_dict()
        with pytest.raises(ValueError, match=r"0\.body.* was not trained when the checkpoint was written"):
            trainer(transport, False).load_state_dict(state)
        for lost, kinds, message in (
            ({}, ValueError, "stage 1 is not in this state, which has none"),
            ({1: {}}, (KeyError, RuntimeError), "weights"),
        ):
            damaged = {**state, "stages": lost if transport.position.rank else state["stages"]}
            with pytest.raises(kinds, match=message):
                trainer(transport, True).load_state_dict(damaged)

    run_together(work, 2)


def test_ranks_with_different_options_are_rejected():
    def work(transport):
        make(mixed_network(), transport=transport, stages=2, accumulate=1 + transport.position.rank)

    with pytest.raises(ValueError, match="rank 1 has accumulate 2, rank 0 has 1: start every rank with the same"):
        run_together(work, 2)


@pytest.mark.parametrize("placement", [[0, 1], [0, 0, 0], [1, 1, 0], [0, 2, 2], [0, 1, 0]])
def test_an_invalid_placement_is_rejected(placement):
    with pytest.raises(ValueError, match="give the rank of each of the 3 stages"):
        run_together(lambda t: make(mixed_network(), transport=t, stages=3, placement=placement), 2)


def test_more_ranks_than_stages_are_rejected():
    with pytest.raises(ValueError, match="there are 3 ranks but only 2 stages"):
        run_together(lambda t: make(mixed_network(), transport=t, stages=2), 3)


def test_one_sample_is_evaluated_as_in_one_process():
    """Batch norm needs several samples in training mode, so shapes must be inferred in evaluation mode."""

    def work(transport=None):
        torch.manual_seed(0)
        network = Network(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        trainer = make(network, method="backprop", stages=2, transport=transport)
        return trainer.evaluate([(torch.ones(1, 8), torch.zeros(1, dtype=torch.long))])

    assert run_together(work, 2) == [work()] * 2


def test_replicas_treat_missing_and_sparse_gradients_like_one_process():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 8, sparse=True)
            self.unused = nn.Parameter(torch.ones(3))
            self.zero = nn.Parameter(torch.ones(8))

        def forward(self, x):
            found = (x == 0).any(1, keepdim=True)  # sometimes only in the share of one replica
            y = self.table(x).mean(1)
            return y + found * self.zero if found.any() else y

    def work(transport=None):
        torch.manual_seed(0)
        network = Network(Words(), nn.Linear(8, 4))
        trainer = make(
            network,
            method="backprop",
            stages=2,
            transport=transport,
            optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.0),
        )
        position = trainer.transport.position
        for i in range(4):
            words, targets = torch.arange(12).view(4, 3).add(i) % 9, torch.tensor([0, 1, 2, 3])
            trainer.step(*(t.tensor_split(position.replicas)[position.replica] for t in (words, targets)))
        assert network[0].unused.grad is None
        return network.state_dict()

    expected = work()
    for found in run_together(work, 1, 2):
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_replicas_create_tensors_on_the_device_of_the_trainer():
    """Tensors that are created without a device would be on the default device, which is the meta device here."""

    def work(transport):
        torch.manual_seed(0)
        trainer = make(nn.Sequential(nn.Linear(8, 4)), transport=transport)
        x, y = torch.randn(2, 8), torch.tensor([0, 1])
        with torch.device("meta"):
            trainer.step(x, y)
        return trainer.stages[0].updates

    assert run_together(work, 1, 2) == [1, 1]


def sealed(tensors, sender, verify=True, apart=False):
    """A message that has arrived in host memory; its parts were sent apart, or it was sent as a whole."""
    layout = layout_of(tensors)
    if apart:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_layout, "LARGE", 0)
            layout = MessageLayout(layout.specs)
    message = HostMessage(layout, torch.full((layout.size,), 7, dtype=torch.uint8))
    if apart:
        sent = ScatteredMessage(layout, tuple(tensors))
        sent.seal(sender, verify)
        for to, piece in zip(message.pieces, sent.pieces, strict=True):
            to.copy_(piece)
    else:
        layout.fill(message.memory, tuple(tensors))
        message.seal(sender, verify)
    return message


class TestHeaders:
    SENDER = Action(3, Kind.BACKWARD, 17)

    @given(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 4), max_size=3),
                st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]),
            ),
            max_size=5,
        ),
        st.booleans(),
    )
    def test_an_intact_message_is_accepted(self, parts, apart):
        tensors = [torch.randn(shape).mul(9).to(dtype) for shape, dtype in parts]
        message = sealed(tensors, self.SENDER, apart=apart)
        copied = HostMessage(message.layout, message.memory.clone())
        copied.check(self.SENDER)
        for found, tensor in zip(copied.layout.views(copied.memory), tensors, strict=True):
            assert found.dtype == tensor.dtype
            assert found.equal(tensor)
        assert message.layout.payload == sum(t.numel() * t.element_size() for t in tensors)

    @pytest.mark.parametrize("apart", [False, True])
    def test_any_changed_byte_is_detected(self, apart):
        tensors = [torch.randn(5), torch.randn(3, 3), torch.randn(9)[1:]]  # also one that is not aligned
        message = sealed(tensors, self.SENDER, apart=apart)
        for number, tensor in enumerate(tensors):
            for i, change in product(range(4 * tensor.numel()), (1, 64, 128)):
                damaged = HostMessage(message.layout, message.memory.clone())
                damaged.layout.views(damaged.memory)[number].view(-1).view(torch.uint8)[i] += change
                with pytest.raises(BadMessage, match="stage 3, micro-batch 17, backward was corrupted in transit"):
                    damaged.check(self.SENDER)

    @pytest.mark.parametrize("apart", [False, True])
    def test_another_message_or_order_is_detected(self, apart):
        tensors = [torch.randn(2), torch.randn(2)]
        for verify in (False, True):
            message = sealed(tensors, Action(3, Kind.BACKWARD, 16), verify, apart)
            with pytest.raises(BadMessage, match="16, backward instead of that of stage 3, micro-batch 17"):
                message.check(self.SENDER, verify)
        message = sealed(tensors, self.SENDER, apart=apart)
        message.layout.fill(message.memory, tensors[::-1])
        with pytest.raises(BadMessage, match="corrupted"):
            message.check(self.SENDER)


def test_tensors_of_a_message_are_like_tensors_with_memory_of_their_own():
    template = (torch.randn(3), None, torch.randn(2, 0), torch.randn(200).double(), torch.tensor(True))
    layout = layout_of(template)
    assert layout_of(tuple(None if t is None else t.to("meta") for t in template)) is layout
    memory = layout.pack(template).memory
    tensors = layout.views(memory)
    assert [t is None for t in tensors] == [t is None for t in template]
    tensors[3].add_(1)
    assert [t._version for t in tensors if t is not None] == [0, 0, 1, 0]  # a write into one is not one into another
    for found, tensor in zip(tensors, template, strict=True):
        if tensor is not None and found is not tensors[3]:
            assert found.equal(tensor)
        if tensor is not None and tensor.numel():
            assert found.untyped_storage().nbytes() == tensor.nbytes
            assert (found.data_ptr() - memory.data_ptr()) % 512 == 0
    assert tensors[3].equal(template[3] + 1)
    assert layout.views(memory)[3].equal(tensors[3])


def test_message_buffers_are_reused_but_not_while_a_tensor_refers_to_them():
    buffers = MessageBuffers()
    layout = layout_of((torch.empty(3, 5), torch.empty(2)))
    first = buffers.empty(layout.size)
    position = first.data_ptr()
    part = layout.views(first)[1]  # a tensor keeps it alive
    del first
    second = buffers.empty(layout.size)
    assert second.data_ptr() != position
    del part
    third = buffers.empty(layout.size)
    assert third.data_ptr() == position
    kept = layout.views(third)[0].requires_grad_()  # as autograd would hold it
    product = kept * 2
    del third, kept
    assert buffers.empty(layout.size).data_ptr() != position
    del product
    assert buffers.empty(layout.size).data_ptr() == position


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8), st.integers(1, 12))
def test_buckets_have_every_tensor_once(sizes, limit):
    tensors = [torch.randn(n, dtype=torch.float64 if double else torch.float32) for n, double in sizes]
    groups = make_buckets(tensors, limit)
    assert sorted(id(t) for group in groups for t in group) == sorted(map(id, tensors))
    for group in groups:
        assert len({t.dtype for t in group}) == 1
        assert sum(t.numel() for t in group[:-1]) < limit
        before = [t.clone() for t in group]
        unflatten_into(flatten(group) * 2, group)
        assert all(torch.equal(t, b * 2) for t, b in zip(group, before, strict=True))


def test_messages_may_be_on_their_way_for_as_many_ticks_as_are_between_two_ranks():
    network = mixed_network()

    def ticks(transport):
        make(copy.deepcopy(network), transport=transport, stages=3, schedule=[9, 4, 0])
        return transport.max_unsent_ticks

    assert run_together(ticks, 3) == [5, 5, 5]
