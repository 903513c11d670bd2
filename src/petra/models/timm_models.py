"""Networks of timm by name, made reversible where their blocks can be: `timm:vit_tiny_patch16_224`."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn

from petra.reversible import Network

if TYPE_CHECKING:
    from petra.models.registry import Entry

PREFIX = "timm:"


def timm_entry(name: str) -> Entry:
    """Return the entry of a network of timm.

    Args:
        name: The prefix and the name of timm.

    Returns:
        An entry like those of registered networks.

    Raises:
        ValueError: If timm is not installed, or has no such network.
    """
    from petra.models.registry import Entry

    try:
        import timm
    except ImportError as error:
        raise ValueError(f"{name} needs timm, which is not installed ({error}): pip install 'petra[timm]'") from error
    except RuntimeError as error:  # torchvision, which timm imports, was built for another PyTorch
        raise ValueError(
            f"{name} needs timm, which cannot be imported ({error}): install the versions of torch and torchvision "
            "that belong together"
        ) from error
    own = name.removeprefix(PREFIX)
    if not timm.is_model(own):
        close = get_close_matches(own, timm.list_models(), n=1)
        remedy = f"did you mean {PREFIX}{close[0]}?" if close else "timm.list_models() lists all names"
        raise ValueError(f"timm has no network named {own!r}: {remedy}")
    return Entry(name, f"{own} of timm", _builder(own), {})


def timm_has(name: str) -> bool:
    """Return whether timm is installed and has a network of this name."""
    try:
        import timm
    except (ImportError, RuntimeError):
        return False
    return bool(timm.is_model(name))


def _builder(name: str) -> Callable[..., Network]:
    def build(
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        image_size: int = 224,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        patch: int | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        reversible: bool = True,
        pretrained: bool = False,
    ) -> Network:
        """Build the network; what is None is left to timm.

        Args:
            num_classes: Number of classes.
            in_channels: Channels of the images.
            image_size: Height and width of the images.
            width: `embed_dim` of timm.
            depth: `depth` of timm.
            heads: `num_heads` of timm.
            patch: `patch_size` of timm.
            dropout: `drop_rate` of timm.
            drop_path: `drop_path_rate` of timm.
            reversible: Make the blocks reversible, where they are known.
            pretrained: Start from the weights of timm, which are downloaded.

        Returns:
            The network. Its weights have the names of timm.

        Raises:
            ValueError: If the network does not take an argument, or cannot be cut into layers.
        """
        import timm

        given = {"embed_dim": width, "depth": depth, "num_heads": heads, "patch_size": patch}
        chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        chosen |= {key: rate for key, rate in (("drop_rate", dropout), ("drop_path_rate", drop_path)) if rate}
        settings = timm.get_pretrained_cfg(name)
        if settings is not None and settings.fixed_input_size:
            chosen["img_size"] = image_size
        try:
            found: nn.Module = timm.create_model(
                name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **chosen
            )
        except TypeError as error:  # unexpected keyword argument
            raise ValueError(
                f"{PREFIX}{name} does not take all of {', '.join(chosen)} ({error}): leave it out"
            ) from error
        return _as_layers(found, reversible)

    return build


def _as_layers(module: nn.Module, reversible: bool) -> Network:
    from petra.conversion import as_network, make_reversible

    if reversible:
        try:
            module = make_reversible(module)
        except ValueError as error:
            if "no blocks that can be made reversible" not in str(error):
                raise
    return as_network(module)
