"""Takes back what a tick has done on the host, where it has done nothing on the device."""

from __future__ import annotations

from typing import Any

from petra.execution.local import LocalExecutor


class Remembered:
    """What an executor and its stages know between two ticks, to go back to when a tick could not be recorded.

    A recording launches nothing, so the values of all tensors are as before; only who holds which of them is not.
    """

    def __init__(self, executor: LocalExecutor) -> None:
        self._found: list[tuple[Any, dict[str, Any]]] = []
        self._remember(executor, "ups", "downs", "targets", "_shapes", "_fed", "_tick")
        for stage in executor.stages:
            self._remember(stage, "kept", "_above", "accumulated", "updates")
            if stage.stash is not None:
                self._remember(stage.stash, "copies", "_needed", "_version")
            if stage.corrected is not None:
                self._remember(stage.corrected, "_began", "_blank")
                self._remember(stage.corrected.site, "updates", "rate", "state")
            if stage.synthesizer is not None:
                self._remember(stage.synthesizer, "_predicted")
            for parameter in stage.parameters:
                self._remember(parameter, "grad")

    def _remember(self, owner: Any, *names: str) -> None:
        self._found.append((owner, {name: _own(getattr(owner, name)) for name in names}))

    def restore(self) -> None:
        """Put everything back."""
        for owner, values in self._found:
            for name, value in values.items():
                setattr(owner, name, value)


def _own(value: Any) -> Any:
    """The same in containers of its own."""
    if isinstance(value, dict):
        return {key: _own(inner) for key, inner in value.items()}
    return [_own(inner) for inner in value] if isinstance(value, list) else value
