"""Small networks of timm, torchvision and Hugging Face transformers, with random weights in float64."""

import torch

from helpers.libraries import library

IDS = torch.randint(5, 40, (3, 9), generator=torch.Generator().manual_seed(0))
KEEP = torch.ones(3, 9, dtype=torch.long)
KEEP[0, 5:] = KEEP[1, 7:] = 0
IMAGES = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

_SIZE = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT = {**_SIZE, "vocab_size": 50, "max_position_embeddings": 20}
_GPT2 = {"vocab_size": 50, "n_positions": 20, "n_embd": 8, "n_layer": 3, "n_head": 2, "use_cache": False}
_ROTARY = {**_TEXT, "num_key_value_heads": 1, "head_dim": 4, "use_cache": False}
_IMAGE = {**_SIZE, "image_size": 32, "patch_size": 8, "num_labels": 5}
_DINOV2 = {name: value for name, value in _IMAGE.items() if name != "intermediate_size"}
_DISTILBERT = {"vocab_size": 50, "dim": 8, "n_layers": 3, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 20}
_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 3, "num_heads": 2, "num_classes": 5}
_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 3), "num_heads": (2, 2), "num_classes": 5}
_CONVNEXT = {"depths": (2, 3, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 5}
_RESNET = {"layers": (2, 1, 2, 1), "channels": (8, 8, 16, 16), "stem_chs": 8, "num_classes": 5}

TRANSFORMERS = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT2),
    "GPT2ForSequenceClassification": ("GPT2Config", {**_GPT2, "pad_token_id": 0}),
    "LlamaForCausalLM": ("LlamaConfig", _ROTARY),
    "LlamaModel": ("LlamaConfig", _ROTARY),
    "LlamaForSequenceClassification": ("LlamaConfig", {**_ROTARY, "pad_token_id": 0}),
    "MistralForCausalLM": ("MistralConfig", {**_ROTARY, "sliding_window": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", _ROTARY),
    "Qwen3ForCausalLM": ("Qwen3Config", _ROTARY),
    "BertForSequenceClassification": ("BertConfig", {**_TEXT, "num_labels": 5}),
    "BertForMaskedLM": ("BertConfig", _TEXT),
    "BertModel": ("BertConfig", _TEXT),
    "RobertaForSequenceClassification": ("RobertaConfig", _TEXT),
    "RobertaForTokenClassification": ("RobertaConfig", _TEXT),
    "DistilBertForSequenceClassification": ("DistilBertConfig", _DISTILBERT),
    "DistilBertForMaskedLM": ("DistilBertConfig", _DISTILBERT),
    "ViTForImageClassification": ("ViTConfig", _IMAGE),
    "Dinov2ForImageClassification": ("Dinov2Config", _DINOV2),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", _DINOV2),
}
TIMM = {
    "vit_tiny_patch16_224": {**_VIT, "drop_path_rate": 0.2},
    "vit_small_patch14_reg4_dinov2": {**_VIT, "init_values": 0.1},
    "swin_tiny_patch4_window7_224": _SWIN,
    "swinv2_tiny_window8_256": _SWIN,
    "convnext_tiny": {**_CONVNEXT, "drop_path_rate": 0.2},
    "convnextv2_tiny": {**_CONVNEXT, "conv_mlp": True},
    "resnetv2_18": _RESNET,
    "resnetv2_50": _RESNET,
}


def randomised(network, scale=0.2):
    """Move parameters away from zero and one, the initial values of several; float64."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return network.double()


def transformer(name, **settings):
    """Return a small network of transformers."""
    transformers = library("transformers")
    config, own = TRANSFORMERS[name]
    torch.manual_seed(0)
    return randomised(getattr(transformers, name)(getattr(transformers, config)(**{**own, **settings})))


def timm_network(name, **settings):
    """Return a small network of timm."""
    timm = library("timm")
    torch.manual_seed(0)
    return randomised(timm.create_model(name, **{**TIMM[name], **settings}), 0.05)


def without_dropout(network):
    """Return the network with all dropout rates 0."""
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attn_pdrop", "attention_dropout", "dropout_prob", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return network


def outputs_of(network, *inputs):
    """Return the logits or the last hidden state."""
    found = (
        network(**dict(zip(("input_ids", "attention_mask"), inputs, strict=False)))
        if _text(inputs)
        else (network(*inputs))
    )
    return next((getattr(found, n) for n in ("logits", "last_hidden_state") if hasattr(found, n)), found)


def _text(inputs):
    return not inputs[0].is_floating_point()
