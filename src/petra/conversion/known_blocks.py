"""The blocks of PyTorch, timm and Hugging Face transformers that can be converted.

Each function is the part of the block's `forward` between one sum and the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.block_spec import BlockSpec
from petra.conversion.residual_views import attend

Kwargs = Mapping[str, Any]


def _sequence(width: Any) -> tuple[int, ...]:
    """Return the shape of a batch of two sequences of three tokens."""
    return 2, 3, int(width)


# PyTorch


def _torch_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    masks = kwargs.get("src_mask"), kwargs.get("src_key_padding_mask")
    x = block.norm1(x) if block.norm_first else x
    return block._sa_block(x, *masks, is_causal=kwargs.get("is_causal", False))  # type: ignore[no-any-return]


def _torch_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block._ff_block(block.norm2(x) if block.norm_first else x)  # type: ignore[no-any-return]


def _norm1(block: Any) -> nn.Module:
    return block.norm1  # type: ignore[no-any-return]


def _norm2(block: Any) -> nn.Module:
    return block.norm2  # type: ignore[no-any-return]


def _torch(norm_first: bool) -> BlockSpec:
    return BlockSpec(
        "torch",
        ("TransformerEncoderLayer",),
        ("norm1", "norm2", "self_attn.embed_dim", "_sa_block", "_ff_block", "norm_first"),
        _torch_f,
        _torch_g,
        lambda block: _sequence(block.self_attn.embed_dim),
        post_norms=None if norm_first else (_norm1, _norm2),
        applies=lambda block: block.norm_first is norm_first,
    )


# timm: pre-norm; "res-post" blocks normalise the residual before it is added


def _vit_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path1(block.ls1(attend(block.attn, block.norm1(x), kwargs)))  # type: ignore[no-any-return]


def _vit_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path2(block.ls2(block.mlp(block.norm2(x))))  # type: ignore[no-any-return]


def _res_post_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path1(block.norm1(attend(block.attn, x, kwargs)))  # type: ignore[no-any-return]


def _res_post_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path2(block.norm2(block.mlp(x)))  # type: ignore[no-any-return]


def _swin_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path1(block._attn(block.norm1(x)))  # type: ignore[no-any-return]


def _swin_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path2(block.mlp(block.norm2(x)))  # type: ignore[no-any-return]


def _swin_v2_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path1(block.norm1(block._attn(x)))  # type: ignore[no-any-return]


_TIMM = ("norm1", "norm2", "attn", "mlp", "drop_path1", "drop_path2")


def _image(block: Any) -> tuple[int, ...]:
    return 1, *block.input_resolution, int(block.dim)


# Hugging Face: up to version 5.9, a ViT layer has `intermediate` and `output`, later `mlp` and `dropout`.


def _hf_vit_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    x = attend(block.attention, block.layernorm_before(x), kwargs)
    return block.dropout(x) if hasattr(block, "dropout") else x


def _hf_vit_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    x = block.layernorm_after(x)
    if hasattr(block, "mlp"):
        return block.dropout(block.mlp(x))  # type: ignore[no-any-return]
    return block.output.dropout(block.output.dense(block.intermediate(x)))  # type: ignore[no-any-return]


def _bert_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    output = block.attention.output
    return output.dropout(output.dense(attend(block.attention.self, x, kwargs)))  # type: ignore[no-any-return]


def _bert_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.output.dropout(block.output.dense(block.intermediate(x)))  # type: ignore[no-any-return]


def _bert_norm1(block: Any) -> nn.Module:
    return block.attention.output.LayerNorm  # type: ignore[no-any-return]


def _bert_norm2(block: Any) -> nn.Module:
    return block.output.LayerNorm  # type: ignore[no-any-return]


def _gpt2_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return attend(block.attn, block.ln_1(x), kwargs)


def _gpt2_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.mlp(block.ln_2(x))  # type: ignore[no-any-return]


def _decoder_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return attend(block.self_attn, block.input_layernorm(x), kwargs)


def _decoder_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.mlp(block.post_attention_layernorm(x))  # type: ignore[no-any-return]


def _no_rotation(block: Any, x: Tensor) -> Kwargs:
    """Return the cosines and sines of rotary embeddings for positions that are all 0."""
    cosines = x.new_ones(1, x.shape[1], block.self_attn.head_dim)
    return {"position_embeddings": (cosines, torch.zeros_like(cosines)), "attention_mask": None}


def _dinov2_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path(block.layer_scale1(attend(block.attention, block.norm1(x), kwargs)))  # type: ignore[no-any-return]


def _dinov2_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path(block.layer_scale2(block.mlp(block.norm2(x))))  # type: ignore[no-any-return]


def _distilbert_f(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return attend(block.attention, x, kwargs)


def _distilbert_g(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.ffn(x)  # type: ignore[no-any-return]


def _distilbert_norm1(block: Any) -> nn.Module:
    return block.sa_layer_norm  # type: ignore[no-any-return]


def _distilbert_norm2(block: Any) -> nn.Module:
    return block.output_layer_norm  # type: ignore[no-any-return]


# Convolutional networks: blocks with one residual function


def _convnext(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    x = block.conv_dw(x)
    if block.use_conv_mlp:
        x = block.mlp(block.norm(x))
    else:
        x = block.mlp(block.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return block.drop_path(x if block.gamma is None else x * block.gamma.reshape(1, -1, 1, 1))  # type: ignore[no-any-return]


def _torchvision_convnext(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.stochastic_depth(block.layer_scale * block.block(x))  # type: ignore[no-any-return]


def _preact_basic(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    return block.drop_path(block.conv2(block.norm2(block.conv1(block.norm1(x)))))  # type: ignore[no-any-return]


def _preact_bottleneck(block: Any, x: Tensor, kwargs: Kwargs) -> Tensor:
    x = block.conv2(block.norm2(block.conv1(block.norm1(x))))
    return block.drop_path(block.conv3(block.norm3(x)))  # type: ignore[no-any-return]


def _pixels(width: Any) -> tuple[int, ...]:
    """Return the shape of two images of 4×4 pixels."""
    return 2, int(width), 4, 4


def _keeps_shape(block: Any) -> bool:
    return block.downsample is None


KNOWN_BLOCKS = (
    _torch(norm_first=True),
    _torch(norm_first=False),
    BlockSpec(
        "timm",
        ("Block",),
        (*_TIMM, "ls1", "ls2", "norm1.normalized_shape"),
        _vit_f,
        _vit_g,
        lambda block: _sequence(block.norm1.normalized_shape[-1]),
    ),
    BlockSpec(
        "timm",
        ("ResPostBlock",),
        (*_TIMM, "norm1.normalized_shape"),
        _res_post_f,
        _res_post_g,
        lambda block: _sequence(block.norm1.normalized_shape[-1]),
    ),
    BlockSpec(
        "timm", ("SwinTransformerBlock",), (*_TIMM, "_attn", "input_resolution", "dim"), _swin_f, _swin_g, _image
    ),
    BlockSpec(
        "timm",
        ("SwinTransformerV2Block",),
        (*_TIMM, "_attn", "input_resolution", "dim"),
        _swin_v2_f,
        _res_post_g,
        _image,
    ),
    BlockSpec(
        "transformers",
        ("ViTLayer", "DeiTLayer"),
        ("attention", "layernorm_before", "layernorm_after"),
        _hf_vit_f,
        _hf_vit_g,
        lambda block: _sequence(block.layernorm_before.normalized_shape[-1]),
    ),
    BlockSpec(
        "transformers",
        ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer"),
        ("attention.self", "attention.output.LayerNorm", "intermediate", "output.LayerNorm"),
        _bert_f,
        _bert_g,
        lambda block: _sequence(block.output.LayerNorm.normalized_shape[-1]),
        post_norms=(_bert_norm1, _bert_norm2),
        absent=("crossattention",),
    ),
    BlockSpec(
        "transformers",
        ("GPT2Block",),
        ("ln_1", "attn", "ln_2", "mlp"),
        _gpt2_f,
        _gpt2_g,
        lambda block: _sequence(block.ln_1.normalized_shape[-1]),
        absent=("crossattention",),
    ),
    BlockSpec(
        "transformers",
        ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
        ("self_attn.head_dim", "mlp", "input_layernorm", "post_attention_layernorm"),
        _decoder_f,
        _decoder_g,
        lambda block: _sequence(len(block.input_layernorm.weight)),
        arguments=_no_rotation,
    ),
    BlockSpec(
        "transformers",
        ("Dinov2Layer", "Dinov2WithRegistersLayer"),
        ("norm1", "attention", "layer_scale1", "drop_path", "norm2", "mlp", "layer_scale2"),
        _dinov2_f,
        _dinov2_g,
        lambda block: _sequence(block.norm1.normalized_shape[-1]),
    ),
    BlockSpec(
        "transformers",
        ("TransformerBlock",),
        ("attention.q_lin", "sa_layer_norm", "ffn", "output_layer_norm"),
        _distilbert_f,
        _distilbert_g,
        lambda block: _sequence(block.sa_layer_norm.normalized_shape[-1]),
        post_norms=(_distilbert_norm1, _distilbert_norm2),
    ),
    BlockSpec(
        "timm",
        ("ConvNeXtBlock",),
        ("conv_dw", "norm", "mlp", "gamma", "use_conv_mlp", "shortcut", "drop_path"),
        _convnext,
        None,
        lambda block: _pixels(block.conv_dw.in_channels),
        applies=lambda block: isinstance(block.shortcut, nn.Identity),
    ),
    BlockSpec(
        "torchvision",
        ("CNBlock",),
        ("block", "layer_scale", "stochastic_depth"),
        _torchvision_convnext,
        None,
        lambda block: _pixels(len(block.layer_scale)),
    ),
    BlockSpec(
        "timm",
        ("PreActBasic",),
        ("norm1", "conv1", "norm2", "conv2", "drop_path", "downsample"),
        _preact_basic,
        None,
        lambda block: _pixels(block.conv1.in_channels),
        applies=_keeps_shape,
    ),
    BlockSpec(
        "timm",
        ("PreActBottleneck",),
        ("norm1", "conv1", "norm2", "conv2", "norm3", "conv3", "drop_path", "downsample"),
        _preact_bottleneck,
        None,
        lambda block: _pixels(block.conv1.in_channels),
        applies=_keeps_shape,
    ),
)
