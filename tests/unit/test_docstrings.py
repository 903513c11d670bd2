"""Public objects have Google-style docstrings that name every argument and the return value.

Public means: in the ``__all__`` of a package of Petra. `python tests/unit/test_docstrings.py [PACKAGE ...]` lists what
is missing.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys

import petra

PACKAGES = ["petra", *(f"petra.{m.name}" for m in pkgutil.iter_modules(petra.__path__) if m.ispkg)]


def public_objects(package):
    """Every function and class in ``__all__``, and the public methods that a class defines itself."""
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", []):
        found = getattr(module, name)
        if not getattr(found, "__module__", "").startswith("petra"):
            continue
        if inspect.isfunction(found) or inspect.isclass(found):
            yield f"{package}.{name}", found
        if inspect.isclass(found):
            for attribute, value in vars(found).items():
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if not attribute.startswith("_") and inspect.isfunction(function):
                    yield f"{package}.{name}.{attribute}", function


def arguments_of(found):
    """Names of the arguments that a caller gives."""
    if inspect.isclass(found):
        if getattr(found, "_is_protocol", False):
            return []  # typing adds an __init__ that raises
        if dataclasses.is_dataclass(found) or issubclass(found, BaseException) or "__init__" not in vars(found):
            return []  # fields have docstrings of their own
        found = vars(found)["__init__"]
    names = [p.name for p in inspect.signature(found).parameters.values()]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def inherited_docstring(method):
    """Whether a base class documents the method."""
    owner, _, name = method.__qualname__.rpartition(".")
    class_ = getattr(importlib.import_module(method.__module__), owner, None)
    return class_ is not None and any(getattr(vars(base).get(name), "__doc__", None) for base in class_.__mro__[1:])


def problems(name, found):
    """Return what the docstring lacks."""
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    if not text:
        if inspect.isfunction(found) and inherited_docstring(found):
            return []
        return [f"{name} has no docstring"]
    text = inspect.cleandoc(text)
    missing = []
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.M)
    documented = re.findall(r"^    \*{0,2}(\w+)(?: \(.*?\))?:", section.group(1), re.M) if section else []
    missing += [f"{name}: argument {a} is not documented" for a in arguments_of(found) if a not in documented]
    if inspect.isfunction(found):
        returns = inspect.signature(found).return_annotation
        generator = "contextmanager" in inspect.getsource(found).split("def ")[0]
        returns_something = returns not in (None, "None", inspect.Signature.empty) and "NoReturn" not in str(returns)
        if returns_something and not generator and not re.search(r"^(Returns|Yields):$", text, re.M):
            missing.append(f"{name}: the return value is not documented")
    return missing


def test_public_docstrings_are_complete():
    found = [p for package in PACKAGES for name, thing in public_objects(package) for p in problems(name, thing)]
    assert not found, "\n".join(found)


if __name__ == "__main__":
    wanted = sys.argv[1:] or PACKAGES
    listed = sorted({p for package in wanted for name, thing in public_objects(package) for p in problems(name, thing)})
    print("\n".join(listed))
    print(f"{len(listed)} problems")
