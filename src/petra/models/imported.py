"""Networks of the user's own modules, named `package.module:function`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

from petra.formatting import first_line

_FORM = "give package.module:function, a function of that module that returns a network"


def is_import_path(name: str) -> bool:
    """Return whether the name of a network has the form `package.module:function`."""
    return ":" in name


def import_function(name: str) -> Callable[..., Any]:
    """Import the function that `package.module:function` names.

    The working directory is on the import path, as with `python -m`. Names can come from a file, so only functions that
    the module itself defines are accepted, and none of Python's standard library.

    Args:
        name: The name.

    Returns:
        The function.

    Raises:
        ValueError: If there is no such module or function.
    """
    path, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), function)):
        raise ValueError(f"model is {name!r}: {_FORM}")
    if path.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"model is {name!r}, which is a module of Python's standard library: {_FORM}")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(path)
    except ImportError as error:
        raise ValueError(
            f"model is {name!r}, but {path} cannot be imported ({first_line(error)}): start from the folder that "
            "contains it, or install it"
        ) from error
    found = getattr(module, function, None)
    if not isinstance(found, FunctionType) or found.__module__ != path:
        defined = [key for key, value in vars(module).items() if isinstance(value, FunctionType)]
        own = ", ".join(key for key in defined if vars(module)[key].__module__ == path) or "none"
        raise ValueError(f"model is {name!r}, but {path} defines no function {function}; it defines {own}: {_FORM}")
    return found
