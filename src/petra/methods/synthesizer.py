"""Synthetic gradients: a small network that predicts the gradient of features from the features themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petra.reversible.randomness import derived_seed, forked, seed_generators
from petra.reversible.streams import Gradients, Streams

FUSED = ("cuda",)
"""Devices on which Adam is one kernel that needs nothing of the host, so that a step can be recorded."""


class Synthesizer:
    """M with M(h) ≈ ∂loss/∂h for the outputs h of a stage, and Adam, which makes ‖M(h) - δ‖² small.

    Maps of channels get the network that Features Replay compares with (Section 5.1): two hidden convolutions, 5×5,
    with batch norm and ReLU, and a third one. Tokens and vectors get the same of linear layers and layer norm,
    each token for itself. Both are as wide as the features; streams are joined along their channels. The last layer
    begins with zeros, as gradients then do. The network is made when the first features come.
    """

    def __init__(
        self, layers: Iterable[nn.Module], above: int, seed: int, learning_rate: float, taker: nn.Module | None = None
    ) -> None:
        self.above = above
        """The layer that takes the features, by which the synthesizer is known wherever else the network is cut."""
        self.network: nn.Sequential | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._seed, self._learning_rate = seed, learning_rate
        # With channels last, maps look like others. Those who have them normalise over channels, as who takes them may.
        self._tokens = any(isinstance(m, nn.LayerNorm) for layer in layers for m in layer.modules())
        above_it = taker.modules() if taker is not None else ()
        self._normalised = {m.normalized_shape for m in above_it if isinstance(m, nn.LayerNorm)}
        self._predicted: Gradients = ()

    @property
    def recordable(self) -> bool:
        """Whether it can learn without the host; not yet, before there is a network."""
        return self.optimizer is not None and all(group["capturable"] for group in self.optimizer.param_groups)

    def predict(self, streams: Streams) -> Gradients:
        """A gradient for each stream that can have one; the graph of the prediction is kept until `learn`."""
        floating = [x.detach() for x in streams if x.is_floating_point()]
        tokens = self._tokens or any(tuple(x.shape[-1:]) in self._normalised for x in floating)
        maps = not tokens and all(x.ndim == 4 for x in floating)
        if not floating or not _fit(floating, maps, tokens):
            shapes = ", ".join(str(tuple(x.shape)) for x in streams)
            raise ValueError(
                f"dni has no synthesizer for what layer {self.above} takes, of shape {shapes}: it knows maps N×C×H×W, "
                "tokens N×T×C and vectors N×C; cut the network elsewhere, or choose features-replay"
            )
        features = torch.cat(floating, _channels(maps)) if len(floating) > 1 else floating[0]
        if maps and features.numel() == features.shape[1]:
            raise ValueError(
                f"dni cannot predict for what layer {self.above} takes, of shape {tuple(features.shape)}: its "
                "synthesizer has batch norm, which cannot train on a batch of one: leave such a one out (drop_last)"
            )
        if self.network is None:
            self._make(features.shape[_channels(maps)], maps, features.device, features.dtype)
        assert self.network is not None
        with torch.enable_grad():
            joined: Tensor = self.network(features)
            parts = iter(torch.split(joined, [x.shape[_channels(maps)] for x in floating], _channels(maps)))
        self._predicted = tuple(next(parts) if x.is_floating_point() else None for x in streams)
        return tuple(None if part is None else part.detach() for part in self._predicted)

    def learn(self, gradients: Gradients, average: Callable[[Sequence[Tensor]], None] | None = None) -> None:
        """One step towards the gradients of the streams that were last predicted; ``average`` is over replicas."""
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
        """What lives between micro-batches."""
        if self.network is None or self.optimizer is None:
            return []
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*(p.detach() for p in self.network.parameters()), *self.network.buffers(), *states]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from exactly."""
        if self.network is None or self.optimizer is None:
            return {"above": self.above, "network": None}
        return {
            "above": self.above,
            "network": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave; tensors are on the device."""
        self._predicted, self.network, self.optimizer = (), None, None
        if state["network"] is None:
            return
        first = state["network"]["0.weight"]
        self._make(len(first), first.ndim == 4, first.device, first.dtype)
        assert self.network is not None
        assert self.optimizer is not None
        self.network.load_state_dict(state["network"])
        counted = {i: {**s, "step": s["step"].cpu()} for i, s in state["optimizer"]["state"].items()}
        ways = {way: self.optimizer.defaults[way] for way in ("fused", "capturable")}  # of this device
        groups = [{**group, **ways} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({"state": counted, "param_groups": groups})

    def _make(self, width: int, maps: bool, device: torch.device, dtype: torch.dtype) -> None:
        """The same on every device and in every replica."""
        maker = device if device.type == "meta" else torch.device("cpu")
        with forked(maker), maker:
            seed_generators(maker, derived_seed(self._seed, self.above))
            layers: list[nn.Module] = []
            for _ in range(2):
                layers += [*((_conv(width), nn.BatchNorm2d(width)) if maps else _linear(width)), nn.ReLU()]
            last = _conv(width) if maps else nn.Linear(width, width)
            for parameter in last.parameters():
                nn.init.zeros_(parameter)
        self.network = nn.Sequential(*layers, last).to(device, dtype)
        fused, rate = device.type in FUSED, self._learning_rate
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=rate, fused=fused, capturable=fused)


def _fit(features: list[Tensor], maps: bool, tokens: bool) -> bool:
    """Whether there is a network for them: all of one shape but for their channels."""
    around = {(*x.shape[:1], *x.shape[2:]) if maps else tuple(x.shape[:-1]) for x in features}
    kinds = {(x.ndim, x.dtype) for x in features}
    return len(around) == len(kinds) == 1 and (maps or features[0].ndim in (2, 3, *((4,) if tokens else ())))


def _channels(maps: bool) -> int:
    return 1 if maps else -1


def _conv(width: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 5, padding=2)


def _linear(width: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(width, width), nn.LayerNorm(width)
