"""Options of a training from a YAML, TOML or JSON file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from petra.formatting import first_line, suggestion
from petra.runs.config import RunConfig
from petra.runs.option_fields import options_of, parser_of, value_type

_TABLES = ("model_options", "optimizer_options")


def read_config_file(file: Path, network: set[str], command: set[str]) -> tuple[str | None, dict[str, Any]]:
    """Read options from a file.

    Args:
        file: The file. Its keys are the options of `petra train`, with `-` or `_`, as in the `config.json` of a run.
        network: The names of options that are arguments of the network.
        command: The names of all options of the command.

    Returns:
        The recipe, if the file names one, and the options for `RunConfig.from_options`.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key or a value of the wrong kind.
    """
    found: dict[str, Any] = {}
    recipe = None
    arguments: dict[str, Any] = {}
    known = {f.name for f in fields(RunConfig)}
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        if value is None:  # an option that was not given, in a config.json
            continue
        if name == "recipe":
            recipe = str(value)
        elif name in _TABLES:
            if not isinstance(value, dict):
                raise ValueError(f"{file}: {key} is {value!r}: give a table of names and values")
            found[name] = value
        elif name in known:
            found[name] = _value(file, name, value)
        elif name in network:
            arguments[name] = value
        elif name in command:
            raise ValueError(
                f"{file}: {key} is not read from a file: give --{name.replace('_', '-')} on the command line"
            )
        else:
            raise ValueError(f"{file}: there is no option {key}: {suggestion(name, sorted(known | network))}")
    if arguments:
        found["model_options"] = {**found.get("model_options", {}), **arguments}
    return recipe, found


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"--config is {file}, which does not exist: give a .yaml, .toml or .json file")
    try:
        text = file.read_text()
        match file.suffix.lower():
            case ".toml":
                found: Any = tomllib.loads(text)
            case ".json":
                found = json.loads(text)
            case ".yaml" | ".yml":
                found = _yaml().safe_load(text)
            case other:
                raise ValueError(f"--config is {file}: give a .yaml, .toml or .json file, not {other or 'no suffix'}")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise ValueError(f"{file} is damaged: {' '.join(str(error).split())}") from error
        raise
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a table of options: give lines like method: petra")
    return found


def _yaml() -> Any:
    try:
        return import_module("yaml")
    except ImportError as error:
        raise ValueError("a YAML file needs a package that is not installed: pip install 'petra[yaml]'") from error


def _value(file: Path, name: str, value: Any) -> Any:
    """Return the value as the field takes it: text is parsed as on the command line."""
    kind, default = value_type(RunConfig, name), options_of(RunConfig)[name][0].default
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{file}: {name} is {value!r}: give true or false")
        return value
    if isinstance(value, str):
        try:
            return parser_of(RunConfig, name)(value)
        except ValueError as error:
            raise ValueError(f"{file}: {name} is {value!r}: {error}") from None
    if isinstance(value, list):
        if isinstance(default, tuple):
            return tuple(value)
        if kind is not None:
            raise ValueError(f"{file}: {name} is {value}: give one value")
        return value
    if isinstance(default, tuple):
        return (value,)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        wanted = {int: "a whole number", float: "a number", str: "a text"}.get(kind, kind.__name__)
        raise ValueError(f"{file}: {name} is {value!r}: give {wanted}")
    return value
