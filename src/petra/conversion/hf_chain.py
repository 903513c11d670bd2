"""Networks of Hugging Face transformers as chains of layers: embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.chain import block_layers
from petra.conversion.part import Part
from petra.conversion.segment_layers import Arguments, no_arguments
from petra.reversible.streams import Streams


@dataclass(frozen=True)
class Family:
    """How the networks of a family embed their inputs and finish."""

    blocks: tuple[str, ...]
    """Possible paths of the container of the blocks in the base network."""
    embed: Callable[..., Any]
    """Embeds the inputs of a base network; returns the input of the first block, and companions."""
    embeds_with: tuple[str, ...]
    """The parts of the base network that `embed` uses."""
    arguments: Arguments = no_arguments
    """Returns the arguments of a block from the companions."""
    norm: str | None = None
    """The norm after the last block."""


def _tokens_and_mask(inputs: Streams, name: str) -> Streams:
    """Return the attention mask as a companion, if there is one."""
    if len(inputs) > 2 or inputs[0].is_floating_point():
        raise ValueError(
            f"{name} takes input_ids, or (input_ids, attention_mask), as input: not "
            + ", ".join(f"{x.dtype} of shape {tuple(x.shape)}".removeprefix("torch.") for x in inputs)
        )
    if len(inputs) == 2 and inputs[1].shape != inputs[0].shape:
        raise ValueError(
            f"the attention mask has shape {tuple(inputs[1].shape)}, but the tokens have {tuple(inputs[0].shape)}: "
            "give a mask with one entry for each token"
        )
    return tuple(mask != 0 for mask in inputs[1:])


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def _embed_gpt2(base: Any, *inputs: Tensor) -> Streams:
    mask = _tokens_and_mask(inputs, "GPT-2")
    return base.drop(base.wte(inputs[0]) + base.wpe(_positions(inputs[0]))), *mask


def _embed_rotary(base: Any, *inputs: Tensor) -> Streams:
    mask = _tokens_and_mask(inputs, type(base).__name__)
    x = base.embed_tokens(inputs[0])
    return x, *base.rotary_emb(x, position_ids=_positions(inputs[0])), *mask


def _embed_text(base: Any, *inputs: Tensor) -> Streams:
    mask = _tokens_and_mask(inputs, type(base).__name__)
    return base.embeddings(inputs[0]), *mask


def _embed_image(base: Any, *inputs: Tensor) -> Tensor:
    (image,) = inputs
    return base.embeddings(image)  # type: ignore[no-any-return]


def _text_arguments(block: Any, x: Tensor, companions: Streams) -> Mapping[str, Any]:
    return {"attention_mask": _attention_mask(_attention(block), x, companions, causal=False)}


def _gpt2_arguments(block: Any, x: Tensor, companions: Streams) -> Mapping[str, Any]:
    return {"attention_mask": _attention_mask(block.attn, x, companions, causal=True)}


def _rotary_arguments(block: Any, x: Tensor, companions: Streams) -> Mapping[str, Any]:
    mask = _attention_mask(block.self_attn, x, companions[2:], causal=True)
    return {"attention_mask": mask, "position_embeddings": companions[:2]}


def _attention(block: Any) -> Any:
    return getattr(block.attention, "self", block.attention)


def _attention_mask(attention: Any, x: Tensor, keep: Streams, causal: bool) -> Tensor | None:
    """Return the mask that an attention module takes, from the mask of the tokens if there is one.

    `sdpa` takes booleans, and masks the future itself if there is no mask; `eager` adds the mask to its scores.
    """
    implementation = attention.config._attn_implementation
    # Mistral has no attribute, and all its layers have the window.
    window: Any = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    length = x.shape[1]
    windowed = window is not None and length > window
    if not keep and not windowed and (not causal or implementation == "sdpa"):
        return None
    positions = torch.arange(length, device=x.device)
    distance = positions[:, None] - positions
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if windowed:
        allowed = allowed & (distance < window)
    mask = allowed[None, None]
    if keep:
        mask = mask & keep[0][:, None, None, :]
        # Padding before the first token sees itself, because the softmax of nothing is NaN.
        mask = mask | (~mask.any(-1, keepdim=True) & (distance == 0))
    if implementation == "sdpa":
        return mask
    # The dtype under autocast is that of the scores, to which the mask is added.
    dtype = next(p.dtype for p in attention.parameters())
    return torch.zeros(mask.shape, dtype=dtype, device=x.device).masked_fill(~mask, torch.finfo(dtype).min)


_GPT2 = Family(("h",), _embed_gpt2, ("wte", "wpe", "drop"), _gpt2_arguments, "ln_f")
_DECODER = Family(("layers",), _embed_rotary, ("embed_tokens", "rotary_emb"), _rotary_arguments, "norm")
_ENCODER = Family(("encoder.layer", "transformer.layer"), _embed_text, ("embeddings",), _text_arguments)
_IMAGES = Family(("layers", "encoder.layer"), _embed_image, ("embeddings",), norm="layernorm")

FAMILIES = {
    "GPT2Model": _GPT2,
    **dict.fromkeys(("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"), _DECODER),
    **dict.fromkeys(("BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "DistilBertModel"), _ENCODER),
    **dict.fromkeys(("ViTModel", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel"), _IMAGES),
}
"""The families of networks, by the class of the base network."""


# Heads: called with a view on the network, the normalised output of the blocks, and the companions.


def _hidden(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    return x


def _lm_head(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    return network.lm_head(x)  # type: ignore[no-any-return]


def _masked_lm(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    return network.cls(x)  # type: ignore[no-any-return]


def _distilbert_lm(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    x = network.vocab_layer_norm(network.activation(network.vocab_transform(x)))
    return network.vocab_projector(x)  # type: ignore[no-any-return]


def _bert_classes(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    pooled = getattr(network, network.base_model_prefix).pooler(x)
    return network.classifier(network.dropout(pooled))  # type: ignore[no-any-return]


def _classifier(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    return network.classifier(x)  # type: ignore[no-any-return]


def _distilbert_classes(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    pooled = network.pre_classifier(x[:, 0]).relu()
    return network.classifier(network.dropout(pooled))  # type: ignore[no-any-return]


def _token_classes(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    classify = network.score if hasattr(network, "score") else network.classifier
    return classify(network.dropout(x))  # type: ignore[no-any-return]


def _last_token_classes(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    last = companions[-1]  # the index of the last token of each sequence
    return network.score(x)[torch.arange(len(x), device=x.device), last]  # type: ignore[no-any-return]


def _image_classes(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    return network.classifier(x[:, 0])  # type: ignore[no-any-return]


def _dinov2_classes(network: Any, x: Tensor, *companions: Tensor) -> Tensor:
    registers = getattr(network.config, "num_register_tokens", 0)
    pooled = torch.cat([x[:, 0], x[:, 1 + registers :].mean(1)], 1)
    return network.classifier(pooled)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Head:
    """The part of a network after its base network."""

    function: Callable[..., Tensor]
    uses: tuple[str, ...]
    last_token: bool = False
    """True if it needs the index of the last token of each sequence."""


def _head(network: Any, base: str) -> Head | None:
    kind, prefix = type(network).__name__, f"{base}." if base else ""
    if not base:
        return Head(_hidden, ())
    if kind.endswith(("LMHeadModel", "ForCausalLM")):
        return Head(_lm_head, ("lm_head",))
    if kind == "DistilBertForMaskedLM":
        return Head(_distilbert_lm, ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"))
    if kind.endswith("ForMaskedLM"):
        heads = {"cls": _masked_lm, "lm_head": _lm_head}
        return next((Head(f, (name,)) for name, f in heads.items() if hasattr(network, name)), None)
    if kind.endswith("ForTokenClassification"):
        return Head(_token_classes, ("dropout", "score" if hasattr(network, "score") else "classifier"))
    if kind == "BertForSequenceClassification":
        return Head(_bert_classes, (f"{prefix}pooler", "dropout", "classifier"))
    if kind == "DistilBertForSequenceClassification":
        return Head(_distilbert_classes, ("pre_classifier", "dropout", "classifier"))
    if kind.endswith("ForSequenceClassification"):
        decoder = hasattr(network, "score")
        return Head(_last_token_classes, ("score",), True) if decoder else Head(_classifier, ("classifier",))
    if kind.endswith("ForImageClassification"):
        pooled = _dinov2_classes if kind.startswith("Dinov2") else _image_classes
        return Head(pooled, ("classifier",))
    return None


def hf_chain(network: Any) -> list[nn.Module] | None:
    """Return a network of a known family as a chain; None for other networks.

    Args:
        network: A network of transformers, converted or not.

    Returns:
        Its layers.

    Raises:
        ValueError: If the family is known but the network is not.
    """
    if not any(cls.__module__.partition(".")[0] == "transformers" for cls in type(network).__mro__):
        return None
    base = "" if type(network).__name__ in FAMILIES else getattr(network, "base_model_prefix", "")
    root = network.get_submodule(base)
    family = FAMILIES.get(type(root).__name__)
    if family is None:
        return None
    head = _head(network, base)
    if head is None:
        known = "LMHeadModel, ForCausalLM, ForMaskedLM, ForSequenceClassification, ForTokenClassification, "
        raise ValueError(
            f"the head of {type(network).__name__} is not known: the known heads are {known}ForImageClassification, "
            "and none. Give it a method stages(), or train its base network"
        )
    _check(network, root)
    prefix = f"{base}." if base else ""

    def embed(view: Any, *inputs: Tensor) -> Tensor | Streams:
        found = family.embed(view.get_submodule(base), *inputs)
        return (*found, _last_tokens(network.config, inputs[0])) if head.last_token else found

    def arguments(block: Any, x: Tensor, companions: Streams) -> Mapping[str, Any]:
        return family.arguments(block, x, companions[:-1] if head.last_token else companions)

    def finish(view: Any, x: Tensor, *companions: Tensor) -> Tensor:
        if family.norm is not None:
            x = getattr(view.get_submodule(base), family.norm)(x)
        return head.function(view, x, *companions)

    blocks: Any = next(found for path in family.blocks if (found := _find(root, path)) is not None)
    norm = () if family.norm is None else (prefix + family.norm,)
    first = Part(network, embed, [prefix + name for name in family.embeds_with])
    last = Part(network, finish, [*norm, *head.uses])
    return [first, *block_layers(blocks, arguments), last]


def _find(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _check(network: Any, root: nn.Module) -> None:
    config, kind = network.config, type(network).__name__
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{kind} uses attn_implementation={implementation!r}, whose masks are not known here: load it with sdpa"
        )
    for name, wrong in (("is_decoder", type(root).__name__ in _BIDIRECTIONAL), ("add_cross_attention", True)):
        if wrong and getattr(config, name, False):
            raise ValueError(f"{kind} has config.{name}, which a chain of layers does not support: turn it off")


_BIDIRECTIONAL = [name for name, family in FAMILIES.items() if family is _ENCODER]


def _last_tokens(config: Any, tokens: Tensor) -> Tensor:
    """Return the index of the last token of each sequence that is not padding."""
    pad = config.pad_token_id
    if pad is None:
        return torch.full(tokens.shape[:1], tokens.shape[1] - 1, device=tokens.device)
    return (torch.arange(tokens.shape[1], device=tokens.device) * (tokens != pad)).argmax(-1)  # type: ignore[no-any-return]
