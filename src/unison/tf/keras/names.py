"""The modules of `unison.tf.keras` over Keras' modules of the same names.

`unison.tf.keras.losses` has every public name of `keras.losses`, the names that TensorFlow
programs use and Keras 3 dropped, and advice for the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from unison.tf.keras.dropped import INSTEAD
from unison.tf.missing import names_missing_from

_PARENT = "unison.tf."


def stand_over(face: str, source: str | None = None) -> Callable[[str], Any]:
    """Gives the module named `face` the public names of Keras' module that it does not define.

    Args:
        face: The `__name__` of a module under `unison.tf.keras`.
        source: The name of Keras' module. Default: the one of the same name.

    Returns:
        The module's `__getattr__`, whose error names the missing name and its replacement.
    """
    theirs = importlib.import_module(source or face.removeprefix(_PARENT))
    ours = vars(sys.modules[face])
    for name, value in vars(theirs).items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            ours.setdefault(name, value)
    return _advice_of(face)


def make_module(face: str, names: Mapping[str, Any]) -> None:
    """Makes the module `face`, which Keras 3 does not have, of the given names."""
    _add_module(face).update({**names, "__getattr__": _advice_of(face)})


def stand_over_modules_below(face: str) -> None:
    """Makes a face of every public module below Keras' module of that name.

    A face that has a file of its own is imported; for the others a module is made.
    """
    top = face.removeprefix(_PARENT)
    for name in sorted(sys.modules):
        if not name.startswith(f"{top}.") or name.startswith((f"{top}.src", f"{top}._")):
            continue
        below = _PARENT + name
        if below not in sys.modules and not _has_file(below):
            names = _add_module(below)
            names["__getattr__"] = stand_over(below)
        importlib.import_module(below)


def _has_file(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def _add_module(face: str) -> dict[str, Any]:
    """Adds a module without a file where `import` looks, and returns its names."""
    module = types.ModuleType(face, f"`{face}`, as TensorFlow programs know it.")
    module.__path__ = []  # it is a package: modules may be below it
    parent, _, name = face.rpartition(".")
    sys.modules[face] = module
    setattr(sys.modules[parent], name, module)
    return vars(module)


def _advice_of(face: str) -> Callable[[str], Any]:
    path = face.removeprefix(f"{_PARENT}keras").removeprefix(".")
    return names_missing_from(face, INSTEAD.get(path))
