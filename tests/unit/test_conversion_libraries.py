"""Conversion of small networks of the libraries that are installed; nothing is downloaded."""

import warnings

import pytest
import torch
from helpers.libraries import library
from torch import nn

from petra import conversion_report, make_reversible, plain_autograd


def randomised(network):
    """Move parameters away from zero and one, the initial values of several."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network.double()


def check(network, blocks, inputs):
    """Check names and weights, the blocks that are found, and reversible gradients in both modes."""
    randomised(network)
    converted = make_reversible(network)
    assert list(converted.state_dict()) == list(network.state_dict())
    assert all(a is b for a, b in zip(converted.parameters(), network.parameters(), strict=True))
    assert [len(segment.names) for segment in conversion_report(converted).segments] == blocks
    for training in (True, False):
        converted.train(training)
        found = gradients(converted, inputs)
        with plain_autograd():
            expected = gradients(converted, inputs)
        assert sum(g is not None and bool(g.abs().max() > 1e-6) for g in expected) > 10
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return converted


def gradients(network, inputs):
    torch.manual_seed(1)
    y = network(**inputs)
    y = y if isinstance(y, torch.Tensor) else y[0]
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 3, "num_heads": 2, "num_classes": 5}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 3), "num_heads": (2, 2), "num_classes": 5}
NETWORKS = {
    "ViT": (
        "vit_tiny_patch16_224",
        VIT | {"drop_path_rate": 0.2, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1},
        [3],
    ),
    "layer scale": ("vit_tiny_patch16_224", VIT | {"init_values": 0.1}, [3]),
    "Swin": ("swin_tiny_patch4_window7_224", SWIN | {"drop_path_rate": 0.2}, [2, 3]),
    "Swin v2": ("swinv2_tiny_window8_256", SWIN | {"drop_path_rate": 0.2}, [2, 3]),
}


class TestTimm:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_gradients(self, name):
        timm = library("timm")
        model, settings, blocks = NETWORKS[name]
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        check(timm.create_model(model, **settings), blocks, {"x": x})

    def test_norm_at_the_end_of_the_branch(self):
        timm = library("timm")
        block = timm.models.vision_transformer.ResPostBlock
        network = timm.create_model("vit_tiny_patch16_224", **VIT, block_fn=block, init_values=0.1)
        check(network, [3], {"x": torch.randn(2, 3, 32, 32, dtype=torch.float64)})

    def test_masks(self):
        timm = library("timm")
        converted = make_reversible(randomised(timm.create_model("vit_tiny_patch16_224", **VIT))).eval()
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        mask = torch.ones(1, 1, 17, 17, dtype=torch.bool).tril()
        open_, masked = converted.forward_features(x), converted.forward_features(x, attn_mask=mask)
        assert not torch.allclose(open_, masked)
        x[..., 24:, 24:] = 0  # the last patch, which the mask hides from the first tokens
        again = converted.forward_features(x, attn_mask=mask)
        torch.testing.assert_close(again[:, :-1], masked[:, :-1])

    def test_other_blocks_are_not_converted(self):
        timm = library("timm")
        network = timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=8, depth=2, num_heads=2)
        with pytest.raises(ValueError, match=r"Beit has no blocks .* Block,"):
            make_reversible(network)


IDS = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(0))
KEEP = torch.ones(3, 9, dtype=torch.long)
KEEP[0, 5:] = KEEP[1, 7:] = 0
SIZE = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = SIZE | {"vocab_size": 50, "max_position_embeddings": 20}


class TestTransformers:
    @pytest.mark.parametrize(
        ("name", "attention"),
        [
            ("Bert", "sdpa"),
            ("Bert", "eager"),
            ("Roberta", "sdpa"),
            ("Roberta", "eager"),
            ("XLMRoberta", "sdpa"),
            ("Camembert", "sdpa"),
            ("Electra", "eager"),  # version 4 supports no other
        ],
    )
    def test_post_norm(self, name, attention):
        transformers = library("transformers")
        more = {"embedding_size": 8} if name == "Electra" else {}
        config = getattr(transformers, f"{name}Config")(**TEXT, **more, attn_implementation=attention)
        network = getattr(transformers, f"{name}Model")(config)
        converted = check(network, [3], {"input_ids": IDS, "attention_mask": KEEP})
        assert conversion_report(converted).segments[0].post_norm
        # masked tokens have no effect
        other = IDS.clone()
        other[0, 5:] = 41
        outputs = [converted(input_ids=ids, attention_mask=KEEP)[0] for ids in (IDS, other)]
        torch.testing.assert_close(outputs[0][0, :5], outputs[1][0, :5])
        assert not torch.allclose(converted(input_ids=other)[0][0, :5], converted(input_ids=IDS)[0][0, :5])

    @pytest.mark.parametrize("name", ["ViT", "DeiT"])
    def test_images(self, name):
        transformers = library("transformers")
        config = getattr(transformers, f"{name}Config")(
            **SIZE, image_size=32, patch_size=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
        )
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        check(getattr(transformers, f"{name}Model")(config), [3], {"pixel_values": x})

    def gpt2(self, **settings):
        transformers = library("transformers")
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=20, n_embd=8, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2, **settings
        )
        return transformers.GPT2LMHeadModel(config)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_gpt2(self, attention):
        network = self.gpt2(attn_implementation=attention)
        converted = check(network, [3], {"input_ids": IDS, "attention_mask": KEEP, "use_cache": False})
        assert converted.lm_head.weight is converted.transformer.wte.weight  # still tied
        other = IDS.clone()
        other[:, -1] = 41
        with torch.no_grad():
            a, b = (converted(input_ids=ids, use_cache=False)[0] for ids in (IDS, other))
        torch.testing.assert_close(a[:, :-1], b[:, :-1])  # causal

    def test_generation_with_a_cache(self):
        converted = make_reversible(randomised(self.gpt2())).eval()
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cached, uncached = (converted.generate(IDS[:, :4], use_cache=c, **settings) for c in (True, False))
        assert cached.shape == (3, 10)
        assert torch.equal(cached, uncached)
        with pytest.raises(ValueError, match=r"past_key_values was given .* with gradients enabled"):
            converted(input_ids=IDS, use_cache=True)

    @pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
    def test_outputs_of_single_blocks(self, output):
        converted = make_reversible(self.gpt2(attn_implementation="eager"))
        converted(input_ids=IDS, use_cache=False, **{output: False})
        for network in (converted, converted.transformer):
            with pytest.raises(ValueError, match=rf"{output} is on, but the blocks of GPT2\w+ are reversible"):
                network(input_ids=IDS, use_cache=False, **{output: True})
        setattr(converted.config, output, True)
        with pytest.raises(ValueError, match=f"{output} is on"):
            converted(input_ids=IDS, use_cache=False)

    def test_a_single_block_computes_the_same(self):
        network = randomised(self.gpt2(num_hidden_layers=3)).eval()
        network.transformer.h = nn.ModuleList(network.transformer.h[:1])
        with torch.no_grad():
            a, b = (n(input_ids=IDS, use_cache=False)[0] for n in (network, make_reversible(network)))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
