"""Options as dataclass fields: a field carries its default, help text and limits.

The command line, its errors, `petra recipes`, `config.json` and the reference page are derived from these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from petra.formatting import suggestion

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """The metadata of a field that is an option."""

    help: str
    """One phrase; the default is added to it."""
    group: str | None = None
    """The heading under which `--help` lists the option."""
    flag: str = ""
    """The flag, if it does not follow from the name of the field."""
    metavar: str | None = None
    """The placeholder for the value in `--help`."""
    parse: Callable[[str], Any] | None = None
    """Converts text to the value, if the type of the field does not say how; raises ValueError with the remedy."""
    choices: tuple[str, ...] = ()
    """All values there are, if these are names."""
    minimum: float | None = None
    """The smallest value."""
    above: float | None = None
    """An exclusive lower bound."""
    maximum: float | None = None
    """The largest value."""
    below: float | None = None
    """An exclusive upper bound."""
    default_text: str = ""
    """The default in words, where the value of the field does not say it."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `add_argument`, such as `nargs`."""
    positional: bool = False
    """An argument without a flag."""
    exclusive: str = ""
    """Options with the same text here exclude each other."""

    def limits(self) -> str:
        """Return the range of the value in words, or an empty string."""
        if self.minimum is not None and self.maximum is not None:
            return f"between {_number(self.minimum)} and {_number(self.maximum)}"
        parts = [
            f"{_number(self.minimum)} or more" if self.minimum is not None else "",
            f"more than {_number(self.above)}" if self.above is not None else "",
            f"at most {_number(self.maximum)}" if self.maximum is not None else "",
            f"less than {_number(self.below)}" if self.below is not None else "",
        ]
        return " and ".join(part for part in parts if part)

    def check(self, flag: str, value: Any) -> None:
        """Raise ValueError with value and remedy if the value, or a number in it, is not allowed.

        Args:
            flag: The name of the option in the message.
            value: The value; None is always allowed.
        """
        if value is None:
            return
        for one in value if self.choices and isinstance(value, list | tuple) else [value]:
            if self.choices and one not in self.choices:
                raise ValueError(f"{flag} is {one!r}: {suggestion(str(one), self.choices)}")
        if self.limits() and not all(self._allows(number) for number in _numbers(value)):
            shown = list(value) if isinstance(value, tuple) else value
            several = "numbers " if isinstance(value, list | tuple) else ""
            raise ValueError(f"{flag} is {shown}: give {several}{self.limits()}")

    def _allows(self, number: float) -> bool:
        return (
            isfinite(number)
            and (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


def option(default: Any = MISSING, **metadata: Any) -> Any:
    """Define a dataclass field that is an option.

    Args:
        default: The default of the field; without one the option is required.
        **metadata: The fields of `Option`.

    Returns:
        The dataclass field.
    """
    return field(default=default, metadata={_KEY: Option(**metadata)})


def options_of(config: type) -> dict[str, tuple[Field[Any], Option]]:
    """Return the fields of a dataclass that are options, by name.

    Args:
        config: The dataclass.

    Returns:
        Each field and its metadata, in the order of the fields.
    """
    return {f.name: (f, f.metadata[_KEY]) for f in fields(config) if _KEY in f.metadata}


def like(config: type, name: str, **changes: Any) -> Any:
    """Define a dataclass field that is the same option as a field of another dataclass.

    Args:
        config: The other dataclass.
        name: The field there, whose default and metadata are used.
        **changes: What differs: `default`, or fields of `Option`.

    Returns:
        The dataclass field.
    """
    original, described = options_of(config)[name]
    default = changes.pop("default", original.default)
    return field(default=default, metadata={_KEY: replace(described, **changes)})


def flag_of(name: str, described: Option | None = None) -> str:
    """Return the flag of a field: `--batch-size` of `batch_size`, or the metavar of a positional argument."""
    if described is not None and described.positional:
        return described.metavar or name.upper()
    return described.flag if described is not None and described.flag else f"--{name.replace('_', '-')}"


def check_values(config: type, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that is outside the limits of its field.

    Args:
        config: The dataclass whose fields describe the values.
        values: Values by field name; names that are no options are ignored.
    """
    for name, (_, described) in options_of(config).items():
        if name in values:
            described.check(flag_of(name, described), values[name])


def value_type(config: type, name: str) -> type | None:
    """Return the type of a field without None, or None if that is not a single plain type."""
    hint = _type_hints(config)[name]
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        hint = kinds[0] if len(kinds) == 1 else None
    return hint if isinstance(hint, type) else None


@cache
def _type_hints(config: type) -> dict[str, Any]:
    """Return the types of all fields. Cached, because evaluating the annotations, which are strings, takes long."""
    return get_type_hints(config)


def parser_of(config: type, name: str) -> Callable[[str], Any]:
    """Return the function that converts the text of an option to its value.

    Args:
        config: The dataclass.
        name: The field.

    Returns:
        A function that raises ValueError with the remedy, such as `give a whole number`.
    """
    described = options_of(config)[name][1]
    if described.parse is not None:
        return described.parse
    kind = value_type(config, name)
    assert kind in _PARSERS, f"{config.__name__}.{name} needs `parse`"
    return _PARSERS[kind]


def spell(value: Any) -> str:
    """Return a value as the command line takes it: `0.5,0.75` for a list."""
    if isinstance(value, list | tuple):
        return ",".join(spell(part) for part in value)
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def whole_numbers(text: str) -> int | list[int]:
    """Parse `4` or `3,3,2,2`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("give a whole number, or several separated by commas") from None
    return numbers if "," in text else numbers[0]


def schedule_option(text: str) -> str | list[int]:
    """Parse the name of a schedule, or numbers in flight."""
    if set(text) <= set("0123456789,-"):
        numbers = whole_numbers(text)
        return numbers if isinstance(numbers, list) else [numbers]
    return text


def fractions(text: str) -> tuple[float, ...]:
    """Parse `0.5,0.75`."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise ValueError("give fractions separated by commas, like 0.5,0.75") from None


def setting(text: str) -> tuple[str, Any]:
    """Parse `drop_path=0.1`: a name and a number, a list of numbers, true, false or a string."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier() and value):
        raise ValueError("give NAME=VALUE, like window=4")
    return name, _plain_value(value)


def _plain_value(text: str) -> Any:
    if "," in text:
        return [_plain_value(part) for part in text.split(",") if part]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _number(bound: float) -> str:
    return "2^63" if bound == 2**63 else f"{bound:g}"


def _numbers(value: Any) -> Sequence[float]:
    return value if isinstance(value, list | tuple) else [value]


def _numeric(kind: type, what: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"give {what}") from None

    return parse


def _path(text: str) -> Path:
    if not text:  # an unset shell variable; Path("") would be the current folder
        raise ValueError("give a path")
    return Path(text)


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _numeric(int, "a whole number"),
    float: _numeric(float, "a number"),
    str: str,
    Path: _path,
}
