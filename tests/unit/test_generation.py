"""Text that is generated with cached keys and values is the text without a cache."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import FixedPointCoupling, Network, models
from petra.models.key_value_cache import KeyValueCache, use_cache
from petra.runs import generation
from petra.runs.generation import generate

MODERN = {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "qk_norm": True, "bias": False}
KINDS = [{}, {"positions": "rotary"}, {"kv_heads": 2}, {**MODERN, "kv_heads": 1}, {**MODERN, "embedding_norm": True}]
SEQ_LEN = 8


def decoder(reversible=True, **options):
    torch.manual_seed(0)
    shape = {"width": 16, "heads": 4, "depth": 2, "vocab_size": 13, "seq_len": SEQ_LEN}
    network = models.gpt(**shape, reversible=reversible, **options).double().eval()
    for p in network.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return network


def without_cache(network, prompt, count, context, entries=13):
    """The likeliest tokens, each from an evaluation of the whole window."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(network(torch.tensor([tokens[-context:]]))[0, -1, :entries].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("options", KINDS, ids=str)
@settings(max_examples=6, deadline=None)
@given(prompt=st.lists(st.integers(0, 12), min_size=1, max_size=11), context=st.integers(1, SEQ_LEN))
def test_the_tokens_are_those_without_a_cache(reversible, options, prompt, context):
    """Prompts shorter and longer than the context, and texts that outgrow it."""
    network = decoder(reversible, **options)
    found = generate(network, prompt, 12, context=context, entries=13, temperature=0)
    assert found == without_cache(network, prompt, 12, context)


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("options", KINDS, ids=str)
@given(first=st.integers(1, SEQ_LEN))
def test_logits_of_one_token_at_a_time_are_those_of_the_whole_text(reversible, options, first):
    network = decoder(reversible, **options)
    text = torch.randint(13, (3, SEQ_LEN), generator=torch.Generator().manual_seed(first))
    cache = KeyValueCache(SEQ_LEN)
    with torch.no_grad():
        expected = network(text)
        with use_cache(network.modules(), cache):
            parts = [network(text[:, :first])] + [network(text[:, i : i + 1]) for i in range(first, SEQ_LEN)]
        assert cache.length == SEQ_LEN
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(network(text), expected)  # no cache is left behind


def test_couplings_that_are_exact_and_networks_of_half_precision():
    network = decoder(**MODERN).use_coupling(FixedPointCoupling)
    assert generate(network, [1], 9, context=8, entries=13, temperature=0) == without_cache(network, [1], 9, 8)
    network = decoder(**MODERN).bfloat16()
    assert len(generate(network, [1], 9, context=8, entries=13)) == 9
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(network.float(), [1], 9, context=8, entries=13)) == 9


def test_each_token_is_read_once_until_the_context_is_full():
    network = decoder(**MODERN)
    lengths = []
    network.stem.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    generate(network, [1, 2, 3], 8, context=6, entries=13)
    assert lengths == [3, 1, 1, 1, 6, 6, 6, 6]


def test_networks_without_a_cache_read_everything():
    class Mean(nn.Module):
        """Tokens are connected without attention."""

        def __init__(self):
            super().__init__()
            self.f, self.g = copy.deepcopy(decoder().block0.f), nn.Identity()

        def forward(self, x):
            return x.cumsum(1)

    stem, head = decoder(False).stem, decoder(False).head
    network = Network(stem, Mean(), head)
    found = generate(network, [1, 2], 9, context=8, entries=13, temperature=0)
    assert found == without_cache(network, [1, 2], 9, 8)
    assert stem.cache is None


def test_a_cache_is_removed_after_an_error():
    network = decoder()
    with pytest.raises(ValueError, match="texts are 9 tokens long, but the network has only 8 positions"):
        generate(network, [1] * 9, 1, context=9, entries=13)
    assert all(getattr(module, "cache", None) is None for module in network.modules())


def test_misuse_of_a_cache():
    network, cache = decoder(), KeyValueCache(4)
    with use_cache(network.modules(), cache), torch.no_grad():
        network(torch.tensor([[1, 2]]))
        with pytest.raises(ValueError, match="the cache holds 2 tokens, and 2 follow: give one token at a time"):
            network(torch.tensor([[3, 4]]))
        network(torch.tensor([[3]]))
        network(torch.tensor([[3]]))
        with pytest.raises(ValueError, match="the text has 5 tokens, but the cache only has room for 4"):
            network(torch.tensor([[3]]))


# --- sampling ---

P = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.39, [1]),
        (0, 0.41, [1, 3]),
        (0, 0.71, [1, 3, 4]),
        (0, 1e-9, [1]),
        (2, 0.5, [1]),  # 4/7 of what the two likeliest have
        (2, 0.6, [1, 3]),
    ],
)
def test_only_the_likeliest_tokens_are_drawn(top_k, top_p, kept):
    expected = torch.tensor([p if i in kept else 0 for i, p in enumerate(P.tolist())], dtype=torch.float64)
    assert torch.equal(generation._likeliest(P.clone(), top_k, top_p), expected)


def test_one_likeliest_token_is_the_greedy_text():
    network = decoder(**MODERN)
    greedy = generate(network, [1], 12, context=8, entries=13, temperature=0)
    assert generate(network, [1], 12, context=8, entries=13, top_k=1) == greedy
    assert generate(network, [1], 12, context=8, entries=13, top_p=1e-9) == greedy
    assert generate(network, [1], 12, context=8, entries=13) != greedy
    assert max(generate(network, [1], 40, context=8, entries=5, temperature=5)) < 5
