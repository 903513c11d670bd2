"""Cross-entropy in chunks: equal to F.cross_entropy, with one chunk of logits in memory."""

import weakref

import pytest
import torch
from helpers.operation_capture import Recording
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from petra import models
from petra.trainer import chunked_loss, cross_entropy
from petra.trainer.chunked_loss import chunked_cross_entropy, tokens_per_chunk
from petra.trainer.loss import count_answers, count_correct


def problem(tokens, width, classes, dtype=torch.float64, ignored=()):
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (tokens, classes))
    targets = torch.randint(classes, (tokens,), generator=generator)
    targets[list(ignored)] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def loss_and_gradients(function, hidden, weight):
    loss = function(hidden, weight)
    return loss, *torch.autograd.grad(2.5 * loss, [hidden, weight])


@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 5),
    classes=st.integers(1, 7),
    chunk=st.integers(1, 12),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignored=st.sets(st.integers(0, 8)),
)
def test_it_is_cross_entropy(tokens, width, classes, chunk, smoothing, ignored):
    ignored = {i for i in ignored if i < tokens - 1}  # at least one target counts
    hidden, weight, targets = problem(tokens, width, classes, ignored=ignored)
    found = loss_and_gradients(lambda h, w: chunked_cross_entropy(h, w, targets, smoothing, chunk), hidden, weight)
    expected = loss_and_gradients(
        lambda h, w: F.cross_entropy(h @ w.T, targets, label_smoothing=smoothing), hidden, weight
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_any_target_the_loss_is_nan_and_the_gradients_are_zero():
    hidden, weight, targets = problem(3, 2, 4, ignored=(0, 1, 2))
    for function in (
        lambda h, w: F.cross_entropy(h @ w.T, targets),
        lambda h, w: chunked_cross_entropy(h, w, targets, chunk=2),
    ):
        loss, *gradients = loss_and_gradients(function, hidden, weight)
        assert loss.isnan()
        assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype, tolerance):
    hidden, weight, targets = problem(50, 8, 30)
    low = hidden.detach().to(dtype).requires_grad_(), weight.detach().float().requires_grad_()
    found = loss_and_gradients(lambda h, w: chunked_cross_entropy(h, w, targets, chunk=16), *low)
    expected = loss_and_gradients(lambda h, w: F.cross_entropy(h @ w.T, targets), hidden, weight)
    assert [x.dtype for x in found] == [torch.float32, dtype, torch.float32]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_losses_of_a_long_text_are_summed_in_float32():
    """In bfloat16, a sum over 4096 tokens would stop growing."""
    hidden, weight, targets = problem(4096, 4, 5)
    expected = F.cross_entropy(hidden @ weight.T, targets)
    found = chunked_cross_entropy(hidden.detach().bfloat16(), weight.detach(), targets, chunk=64)
    torch.testing.assert_close(found.double(), expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradients_that_nobody_wants_are_not_computed(frozen):
    tensors = problem(5, 2, 3)
    pair = [x.detach().requires_grad_(i != frozen) for i, x in enumerate(tensors[:2])]
    chunked_cross_entropy(*pair, tensors[2], chunk=2).backward()
    assert [x.grad is None for x in pair] == [i == frozen for i in range(2)]
    with torch.no_grad():
        assert not chunked_cross_entropy(*pair, tensors[2], chunk=2).requires_grad


class Elements(TorchDispatchMode):
    """The largest tensor of logits that operations make, and the most elements of such tensors that exist at once."""

    def __init__(self, classes):
        super().__init__()
        self.classes, self.largest, self.peak, self.alive = classes, 0, 0, 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == self.classes and len(x) > 3:
                storage = x.untyped_storage()
                self.largest = max(self.largest, x.numel())
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.alive += x.numel()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self.freed, storage._cdata, x.numel())
        return outputs

    def freed(self, storage, elements):
        self.seen.discard(storage)
        self.alive -= elements


def test_one_chunk_of_logits_is_in_memory():
    hidden, weight, targets = problem(96, 3, 17)
    for chunk in (8, 32):
        with Elements(17) as elements:
            loss = chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
            inside = elements.alive
            loss.backward()
        assert elements.largest == chunk * 17
        assert elements.peak <= 4 * chunk * 17  # logits, their softmax, and the last ones of the chunk before
        assert inside == 0  # none is saved for the backward pass
    with Elements(17) as elements:
        F.cross_entropy(hidden @ weight.T, targets).backward()
    assert elements.largest == 96 * 17


def test_the_host_reads_nothing():
    hidden, weight, targets = problem(12, 3, 5)
    with Recording():
        chunked_cross_entropy(hidden, weight, targets, 0.1, chunk=5).backward()


@given(st.integers(1, 10**6), st.integers(1, 300_000), st.integers(1, 20_000))
def test_a_chunk_is_efficient_and_no_larger_than_the_hidden_states(tokens, classes, width):
    chunk = tokens_per_chunk(tokens, classes, width)
    assert chunk >= 1
    assert (chunk - 1) * classes <= max(tokens * width, 2**25)
    assert (chunk + 1) * classes > 2**25


# --- the head and the loss function ---


def chunked(**options):
    torch.manual_seed(0)
    network = models.gpt(width=8, heads=2, depth=1, vocab_size=11, seq_len=6, chunked_loss=True, **options)
    return network, torch.randint(11, (3, 6)), torch.randint(11, (3, 6))


@pytest.mark.parametrize("reversible", [True, False])
def test_a_network_with_a_chunked_loss_has_the_same_loss_and_gradients(reversible, monkeypatch):
    monkeypatch.setattr(chunked_loss, "_ENOUGH_LOGITS", 44)
    network, tokens, targets = chunked(reversible=reversible)
    plain = models.gpt(width=8, heads=2, depth=1, vocab_size=11, seq_len=6, reversible=reversible)
    plain.load_state_dict(network.state_dict())
    found = []
    for net in (network.double(), plain.double()):
        outputs = net(tokens)
        loss = cross_entropy(outputs, targets, 0.1)
        found.append((loss, *torch.autograd.grad(loss, list(net.parameters()))))
        assert isinstance(outputs, tuple) == (net is network)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.equal(network.eval()(tokens), plain.eval()(tokens))


def test_under_autocast_the_loss_multiplies_in_its_dtype():
    network, tokens, targets = chunked()
    with torch.autocast("cpu", torch.bfloat16):
        hidden, weight = network(tokens)
    assert (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.float32)
    loss = cross_entropy((hidden, weight), targets)
    assert loss.dtype == torch.float32
    loss.backward()
    found = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = network.head.fc(network.head.norm(sum(network[:-1](tokens)) * 0.5))
    expected = cross_entropy(logits.float(), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    for a, p in zip(found, network.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=0.1, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert network.eval()(tokens).dtype == torch.float32


def test_tokens_are_counted_but_not_correct_answers():
    hidden, weight, targets = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.tensor([[0, 1, -100], [2, 3, 4]])
    assert int(count_answers((hidden, weight), targets, 2)) == 5
    assert count_correct((hidden, weight), targets) is None
    assert count_answers((hidden, weight), targets.double(), 2) == 2  # not classes


@pytest.mark.parametrize("shapes", [[(2, 3, 4), (5, 3)], [(2, 2, 4), (5, 4)], [(2, 3, 4)], [(2, 3, 4), (5, 4), (1,)]])
def test_outputs_that_do_not_fit(shapes):
    with pytest.raises(ValueError, match=r"outputs of shapes .* for targets of shape \(2, 3\): the network must"):
        cross_entropy(tuple(torch.zeros(shape) for shape in shapes), torch.zeros(2, 3, dtype=torch.long))
