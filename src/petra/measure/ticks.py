"""Axes: their range, round ticks, and how numbers are written on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

KINDS = ("number", "integer", "percent", "bytes", "seconds")
_UNITS = {
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "seconds": ((3600.0, "h"), (60.0, "min"), (1.0, "s")),
}


_MOST_TICKS = 7


@dataclass(frozen=True)
class Axis:
    """An axis with ticks at round numbers."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        kind: str = "number",
        count: int = 5,
        *,
        zero: bool = False,
        log: bool = False,
        tight: bool = False,
    ) -> Axis:
        """Choose the range and the ticks.

        Args:
            values: The values to show.
            kind: What they are, one of `KINDS`.
            count: About how many ticks there are.
            zero: The axis begins at 0.
            log: The axis is logarithmic, if all values are above 0.
            tight: The axis ends at the last value instead of the next tick.

        Returns:
            The axis.
        """
        low, high = min(values, default=0.0), max(values, default=1.0)
        unit, name = _unit(kind, high)
        if log and low > 0:
            ticks = log_ticks(low / unit, high / unit)
            if not tight:
                low, high = min(low, ticks[0] * unit), max(high, ticks[-1] * unit)
        else:
            low = min(low, 0.0) if zero else low
            if high - low <= 1e-9 * max(abs(low), abs(high)):
                low, high = (low - abs(low) / 2 - 0.5 * (low == 0), high + abs(high) / 2 + 0.5 * (high == 0))
                low = max(low, 0.0) if min(values, default=0.0) >= 0 else low
            ticks = linear_ticks(low / unit, high / unit, count, kind == "integer")
            if not tight and kind != "integer" and kind != "seconds":
                low, high = min(low, ticks[0] * unit), max(high, ticks[-1] * unit)
            log = False
        inside = [t for t in ticks if low - 1e-9 * (high - low) <= t * unit <= high + 1e-9 * (high - low)]
        return cls(low, high, tuple(t * unit for t in inside), tuple(_label(t, kind, name) for t in inside), log)

    def position(self, value: float) -> float:
        """Return where a value is: 0 at the low end, 1 at the high end."""
        if self.log:
            return (log10(value) - log10(self.low)) / max(log10(self.high) - log10(self.low), 1e-12)
        return (value - self.low) / max(self.high - self.low, 1e-300)


def linear_ticks(low: float, high: float, count: int = 5, integer: bool = False) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten that enclose a range.

    Args:
        low: The low end of the range.
        high: The high end.
        count: About how many ticks.
        integer: Only whole numbers, and none outside the range.

    Returns:
        The ticks, in order.
    """
    rough = max((high - low) / max(count, 1), 1e-300)
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    if integer:
        step = max(1.0, step)
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    else:
        first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis that enclose a range: 1, 2 and 5 times powers of ten, or of many some.

    Args:
        low: The low end of the range, above 0.
        high: The high end.

    Returns:
        The ticks, in order; the first and the last enclose the range.
    """
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    found = [float(f"{m * 10.0**i:.12g}") for i in powers for m in (1, 2, 5)]
    begin = max((i for i, t in enumerate(found) if t <= low), default=0)
    end = min((i for i, t in enumerate(found) if t >= high), default=len(found) - 1)
    found = found[begin : max(end, begin + 1) + 1]
    if len(found) <= _MOST_TICKS:
        return found
    every = ceil(len(powers) / _MOST_TICKS)
    return [found[0], *(t for t in (10.0**i for i in powers[::every]) if found[0] < t < found[-1]), found[-1]]


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether some values are so much higher that the others would look like a flat line."""
    return bool(values) and min(values) > 0 and max(values) > 50 * min(values)


def _unit(kind: str, high: float) -> tuple[float, str]:
    """Return the largest unit that the highest value has at least two of."""
    units = _UNITS.get(kind, ((1.0, ""),))
    return next((unit for unit in units if high >= 2 * unit[0]), units[-1])


def _label(tick: float, kind: str, unit: str) -> str:
    if kind == "percent":
        return f"{100 * tick:g} %"
    whole = f"{tick:g}" if abs(tick) < 1e5 and (tick == 0 or abs(tick) >= 1e-3) else _scientific(tick)
    return f"{whole} {unit}" if unit and tick != 0 else whole


def _scientific(tick: float) -> str:
    mantissa, exponent = f"{tick:.3e}".split("e")
    superscript = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    digits = f"{float(mantissa):g}"
    return f"10{superscript}" if digits == "1" else f"{digits}·10{superscript}"


def format_bytes(count: float) -> str:
    """Return a number of bytes like `1.50 MiB`."""
    unit, name = next((unit for unit in _UNITS["bytes"] if count >= unit[0]), (1.0, "B"))
    return f"{count / unit:.0f} {name}" if unit == 1 else f"{count / unit:.2f} {name}"


def format_seconds(seconds: float) -> str:
    """Return a duration like `42 s`, `3 min 20 s` or `5 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"
