"""What Unison has replaced in Keras, in the process that asks.

Unison adds to Keras when it is imported, when a scope is open, and when `tf.keras` is used. All of
it is found by looking through Keras' modules, and not listed: what is added later is found, too.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import unison

_PACKAGE = os.path.dirname(unison.__file__) + os.sep

#: For each name of a module or class of Keras, where its value is from, and what that wraps.
Origins = dict[str, list[str]]


def replacements() -> Origins:
    """Returns the names in Keras whose values are Unison's, or wrap Keras' own in Unison's."""
    found = {}
    for module in _modules("keras"):
        for name, value in [*vars(module).items()]:
            found[f"{module.__name__}.{name}"] = [*_origins(value)]
            if isinstance(value, type) and value.__module__.partition(".")[0] == "keras":
                for attribute, method in vars(value).items():
                    where = f"{value.__module__}.{value.__qualname__}.{attribute}"
                    found[where] = [*_origins(method)]
            elif isinstance(value, dict) and not name.startswith("__"):  # Keras' registries
                for key, entry in value.items():
                    found[f"{module.__name__}.{name}[{key!r}]"] = [*_origins(entry)]
    return {
        name: origins
        for name, origins in found.items()
        if any(origin.startswith("unison.") for origin in origins)
    }


def names_of_the_face() -> dict[str, str]:
    """Returns the public names below `unison.tf.keras`, each with where its value is from."""
    return {
        f"{module.__name__}.{name}": next(_origins(value))
        for module in _modules("unison.tf.keras")
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value)
    }


def _modules(top: str) -> list[types.ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name == top or name.startswith(f"{top}.")
    ]


def _origins(value: Any) -> Iterator[str]:
    """Where a value comes from, and what it wraps, from the outermost to the innermost."""
    while value is not None:
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, classmethod | staticmethod | types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            file, line = value.__code__.co_filename, value.__code__.co_firstlineno
            is_ours = file.startswith(_PACKAGE)
            yield f"unison.{file.removeprefix(_PACKAGE)}:{line}" if is_ours else f"{file}:{line}"
            value = vars(value).get("__wrapped__")
        else:
            kind = value if isinstance(value, type) else type(value)
            yield f"{kind.__module__}.{kind.__qualname__}"
            return
