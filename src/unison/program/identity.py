"""By what a compiled program of a function is found again."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class ById:
    """Compares an object by identity, and keeps it alive so that its identity stays its own."""

    target: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)


def identity(function: Callable[..., Any]) -> Any:
    """Returns what a compiled program of `function` may be found by.

    Two functions made by the same code that see the same objects are the same function: a lambda
    written inside a loop is compiled once. What they see is what they close over, their defaults
    and the globals that they name.
    """
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
    """Returns what `value` is compared by: itself if it is constant, else its identity."""
    if isinstance(value, float):
        return float, value.hex()  # tells 0.0 from -0.0, and knows a NaN again
    if isinstance(value, bool | int | str | bytes | None):
        return type(value), value
    return ById(value)
