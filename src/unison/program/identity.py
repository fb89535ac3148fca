"""Cache keys for the compiled programs of functions."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class ById:
    """Compares an object by identity, and keeps it alive so that its id is not reused."""

    target: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)


class Calling:
    """A callable object that calls a function; it has the function's programs, for each `key`.

    Attributes:
        function: The function.
        key: What else its programs depend on.
    """

    def __init__(self, function: Callable[..., Any], key: Hashable):
        self.__name__ = getattr(function, "__name__", repr(function))
        self.function = function
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def identity(function: Callable[..., Any]) -> Any:
    """Returns the cache key for compiled programs of `function`.

    Two functions with the same code that refer to the same objects have equal keys: a lambda
    written inside a loop is compiled once. The objects are those in their closures and defaults,
    and the globals that they name.
    """
    if isinstance(function, Calling):
        return identity(function.function), function.key
    if hasattr(function, "__func__") and hasattr(function, "__self__"):  # a method
        return identity(function.__func__), ById(function.__self__)
    if isinstance(function, functools.partial):
        keywords = tuple((name, key_of(value)) for name, value in function.keywords.items())
        return identity(function.func), tuple(map(key_of, function.args)), keywords
    if not isinstance(function, types.FunctionType):
        return ById(function)
    code = function.__code__
    namespace = function.__globals__
    seen = [key_of(namespace.get(name, _MISSING)) for name in _names_of_globals(code)]
    if function.__closure__:
        seen += [key_of(_contents(cell)) for cell in function.__closure__]
    if function.__defaults__:
        seen += map(key_of, function.__defaults__)
    if function.__kwdefaults__:
        seen += [key_of(value) for value in function.__kwdefaults__.values()]
    return code, ById(namespace), tuple(seen)


_MISSING = object()


@functools.lru_cache(maxsize=4096)
def _names_of_globals(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and builtins that `code`, or a function inside it, reads."""
    names = {
        instruction.argval: None
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_names_of_globals(constant))
    return tuple(names)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return cell


def key_of(value: Any) -> Any:
    """Returns the key of `value`: itself if it is a constant, otherwise its identity."""
    if isinstance(value, float):
        return float, value.hex()  # distinguishes 0.0 from -0.0, and a NaN equals itself
    if isinstance(value, bool | int | str | bytes | None):
        return type(value), value
    return ById(value)
