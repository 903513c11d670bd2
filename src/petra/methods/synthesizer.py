"""Synthetic gradients (DNI): a small network that predicts the gradient of features from the features themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petra.reversible.randomness import derived_seed, forked, seed_generators
from petra.reversible.streams import Gradients, Streams

FUSED = ("cuda",)
"""Device types with a fused Adam that never synchronizes with the host, so that a CUDA graph can capture it."""


class Synthesizer:
    """A network M with M(h) ≈ ∂loss/∂h for the outputs h of a stage, and Adam, which minimizes ‖M(h) - δ‖².

    Feature maps get the network that the Features Replay paper compares with (Section 5.1): two hidden 5×5
    convolutions with batch norm and ReLU, and a third convolution. Tokens and vectors get linear layers and layer norm
    instead, applied to each token. The layers are as wide as the features; several streams are concatenated along
    their channels. The last layer is initialized with zeros, so that predictions start at zero. The network is created
    when the first features arrive.

    Args:
        layers: The layers of the stage. If they contain a layer norm, 4-dimensional features have their channels last.
        above: The index of the layer that takes the features. It identifies the synthesizer in checkpoints, whatever
            the partition.
        seed: The seed of the training run, from which initial weights are derived.
        learning_rate: The learning rate of Adam.
        next_layer: The layer that takes the features. Layer norms in it also indicate channels last.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        above: int,
        seed: int,
        learning_rate: float,
        next_layer: nn.Module | None = None,
    ) -> None:
        self.next_layer_index = above
        """The index of the layer that takes the features."""
        self.network: nn.Sequential | None = None
        """The network; None before the first prediction."""
        self.optimizer: torch.optim.Optimizer | None = None
        """The optimizer of the network."""
        self._seed, self._learning_rate = seed, learning_rate
        # Maps with channels last cannot be told from others by their shape. Layers that use them have layer norms.
        self._tokens = any(isinstance(m, nn.LayerNorm) for layer in layers for m in layer.modules())
        above_modules = next_layer.modules() if next_layer is not None else ()
        self._normalized_shapes = {m.normalized_shape for m in above_modules if isinstance(m, nn.LayerNorm)}
        self._predicted: Gradients = ()  # with their graph, until `learn`

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can capture `learn`; False before the first prediction."""
        return self.optimizer is not None and all(group["capturable"] for group in self.optimizer.param_groups)

    def predict(self, streams: Streams) -> Gradients:
        """Predict the gradients of features; the graph of the prediction is kept until `learn`.

        Args:
            streams: The outputs of the stage.

        Returns:
            A gradient for each floating-point stream, None for the others.

        Raises:
            ValueError: There is no synthesizer for features of these shapes.
        """
        floating = [x.detach() for x in streams if x.is_floating_point()]
        tokens = self._tokens or any(tuple(x.shape[-1:]) in self._normalized_shapes for x in floating)
        maps = not tokens and all(x.ndim == 4 for x in floating)
        if not floating or not _supported(floating, maps, tokens):
            shapes = ", ".join(str(tuple(x.shape)) for x in streams)
            raise ValueError(
                f"dni has no synthesizer for the inputs of layer {self.next_layer_index}, of shape {shapes}: "
                "it supports maps N×C×H×W, tokens N×T×C and vectors N×C; cut the network elsewhere, or choose "
                "features-replay"
            )
        features = torch.cat(floating, _channels(maps)) if len(floating) > 1 else floating[0]
        if maps and features.numel() == features.shape[1]:
            shape = tuple(features.shape)
            raise ValueError(
                f"dni cannot predict gradients for the inputs of layer {self.next_layer_index}, of shape {shape}: "
                "its synthesizer has batch norm, which cannot train on a batch of one: leave out such a last batch "
                "(drop_last)"
            )
        if self.network is None:
            self._create(features.shape[_channels(maps)], maps, features.device, features.dtype)
        assert self.network is not None
        with torch.enable_grad():
            joined: Tensor = self.network(features)
            parts = iter(torch.split(joined, [x.shape[_channels(maps)] for x in floating], _channels(maps)))
        self._predicted = tuple(next(parts) if x.is_floating_point() else None for x in streams)
        return tuple(None if part is None else part.detach() for part in self._predicted)

    def learn(self, gradients: Gradients, average: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """Make one optimizer step towards the true gradients of the last prediction.

        Args:
            gradients: The gradient of each stream; None stands for zero.
            average: Averages tensors over data-parallel replicas in place; None if there is only one replica.
        """
        assert self.network is not None
        assert self.optimizer is not None
        with torch.enable_grad():
            errors = [
                part if gradient is None else part - gradient
                for part, gradient in zip(self._predicted, gradients, strict=True)
                if part is not None
            ]
            loss = torch.stack([error.square().sum() for error in errors]).sum()
        self._predicted = ()
        loss.backward()  # type: ignore[no-untyped-call]
        if average is not None:
            statistics = [b for b in self.network.buffers() if b.is_floating_point()]
            average([*(p.grad for p in self.network.parameters() if p.grad is not None), *statistics])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Return all tensors that exist between micro-batches.

        Returns:
            Parameters, buffers and the optimizer's state.
        """
        if self.network is None or self.optimizer is None:
            return []
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*(p.detach() for p in self.network.parameters()), *self.network.buffers(), *states]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the network and its optimizer.

        Returns:
            A dictionary for `load_state_dict`. Its `network` is None before the first prediction.
        """
        if self.network is None or self.optimizer is None:
            return {"next_layer_index": self.next_layer_index, "network": None}
        return {
            "next_layer_index": self.next_layer_index,
            "network": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The dictionary, with its tensors on the device of the features.
        """
        self._predicted, self.network, self.optimizer = (), None, None
        if state["network"] is None:
            return
        first = state["network"]["0.weight"]
        self._create(len(first), first.ndim == 4, first.device, first.dtype)
        assert self.network is not None
        assert self.optimizer is not None
        self.network.load_state_dict(state["network"])
        states = {i: {**s, "step": s["step"].cpu()} for i, s in state["optimizer"]["state"].items()}
        # The checkpoint may come from another kind of device.
        implementation = {key: self.optimizer.defaults[key] for key in ("fused", "capturable")}
        groups = [{**group, **implementation} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def host_state(self) -> Any:
        """Return what the host remembers between ticks, to undo a failed CUDA graph capture.

        Returns:
            The predicted gradients that wait for `learn`. Tensors are referenced, not copied.
        """
        return self._predicted

    def load_host_state(self, state: Any) -> None:
        """Restore what `host_state` returned.

        Args:
            state: A return value of `host_state`.
        """
        self._predicted = state

    def _create(self, width: int, maps: bool, device: torch.device, dtype: torch.dtype) -> None:
        """Create the network and its optimizer, with the same initial weights on every device and replica."""
        host = device if device.type == "meta" else torch.device("cpu")
        with forked(host), host:
            seed_generators(host, derived_seed(self._seed, self.next_layer_index))
            layers: list[nn.Module] = []
            for _ in range(2):
                layers += [*((_conv(width), nn.BatchNorm2d(width)) if maps else _linear(width)), nn.ReLU()]
            last = _conv(width) if maps else nn.Linear(width, width)
            for parameter in last.parameters():
                nn.init.zeros_(parameter)
        self.network = nn.Sequential(*layers, last).to(device, dtype)
        fused, rate = device.type in FUSED, self._learning_rate
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=rate, fused=fused, capturable=fused)


def _supported(features: list[Tensor], maps: bool, tokens: bool) -> bool:
    """Return True if there is a network for the features: all of one shape except for their channels."""
    other_sizes = {(*x.shape[:1], *x.shape[2:]) if maps else tuple(x.shape[:-1]) for x in features}
    kinds = {(x.ndim, x.dtype) for x in features}
    return len(other_sizes) == len(kinds) == 1 and (maps or features[0].ndim in (2, 3, *((4,) if tokens else ())))


def _channels(maps: bool) -> int:
    """Return the dimension of the channels."""
    return 1 if maps else -1


def _conv(width: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 5, padding=2)


def _linear(width: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(width, width), nn.LayerNorm(width)
