"""Lists, dictionaries and objects that the blocks of a statement change: `outputs.append(x)`.

A block is traced to be put into the program, perhaps several times. What it leaves in a list is
then a value of that trace, which means nothing outside. So what a block can reach is compared
before and after it: by its variables, globals, the functions that it refers to, and the attributes
of the user's objects. Lists, dictionaries, attributes and the variables of other functions that
have changed are variables of the statement like any other; a set, a queue or an array of NumPy that
has changed is an error.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from unison.autograph.symbols import not_staged
from unison.cells import has_cell
from unison.conversion import is_of_a_library

#: The classes whose contents are replaced as a whole, and those that have to stay as they are.
_REPLACED = (list, dict)
_KEPT = (set, collections.deque, bytearray, np.ndarray)

#: The bytes of the largest array of NumPy that is compared.
_MOST_BYTES = 1 << 16

#: The number of steps that are followed from a block, and of objects that are looked at.
_DEPTH = 8
_MOST = 10_000

#: The modules of libraries with classes that the user's only build on.
_BASES = ("abc", "types", "typing", "unison.module")

_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, types.ModuleType)


class Globals:
    """The global variables that a function names.

    Args:
        function: The function.
    """

    def __init__(self, function: types.FunctionType):
        self._namespace = function.__globals__
        self._names = [n for n in function.__code__.co_names if n in self._namespace]

    def values(self) -> tuple:
        return tuple(self._namespace.get(name) for name in self._names)

    def set(self, values: tuple) -> None:
        self._namespace.update(zip(self._names, values, strict=True))


class Watched:
    """The lists, dictionaries and attributes that blocks can reach, with what is in them.

    Args:
        blocks: The functions of the blocks.
        others: Lists and dictionaries that are not watched.
    """

    def __init__(self, blocks: Iterable[Callable[..., Any] | None], others: Iterable[Any]):
        found: dict[int, Any] = {}
        seen: dict[int, Any] = {}
        for block in blocks:
            seen[id(block)] = block
            for _, value in _referred_to(block):
                _reach(value, _DEPTH, found, seen)
        left_out = set(map(id, others))
        self._before = {
            key: (each, contents(each)) for key, each in found.items() if key not in left_out
        }

    def has(self, value: Any) -> bool:
        """Whether `value` is one of the lists and dictionaries."""
        return id(value) in self._before and type(value) in _REPLACED

    def changed(self) -> list[Any]:
        """Returns those whose contents have been replaced since, and restores these.

        Raises:
            StagingError: One of another kind has changed.
        """
        changed = []
        for container, before in self._before.values():
            if not _are_same(contents(container), before):
                changed.append(container)
                put_back(container, before)
        for container in changed:
            if isinstance(container, _KEPT):
                raise not_staged(
                    f"changes a {type(container).__name__} in a branch or a loop, where only "
                    "lists, dictionaries and attributes may change."
                )
        return changed


def name_of(container: Any, blocks: Iterable[Callable[..., Any] | None]) -> str:
    """Returns the name by which blocks know what they can reach."""
    for block in filter(None, blocks):
        for name, value in _referred_to(block):
            if value is container:
                return name
            if getattr(value, "__dict__", None) is container:
                return f"the attributes of {name}"
    return "what other functions refer to"


def contents(container: Any) -> Any:
    """Returns what is in a container, as a tree that does not change with it."""
    if isinstance(container, Globals):
        return container.values()
    if isinstance(container, np.ndarray):
        return container.tobytes()
    if isinstance(container, types.CellType):
        try:
            return (container.cell_contents,)
        except ValueError:  # it has no value yet
            return ()
    return dict(container) if isinstance(container, dict) else tuple(container)


def put_back(container: Any, content: Any) -> None:
    """Replaces what is in a container."""
    if isinstance(container, Globals):
        container.set(content)
        return
    if isinstance(container, np.ndarray):
        container[...] = np.frombuffer(content, container.dtype).reshape(container.shape)
        return
    if isinstance(container, types.CellType):
        if content:
            container.cell_contents = content[0]
        return
    if isinstance(container, list | bytearray):
        container[:] = content
        return
    container.clear()
    if isinstance(container, collections.deque):
        container.extend(content)
    else:
        container.update(content)


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, bytes):
        return one == other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _referred_to(function: Callable[..., Any] | None) -> Iterator[tuple[str, Any]]:
    """Yields the names and the values of what a function refers to outside of it."""
    if not isinstance(function, types.FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if name == "ag__":  # the operators
            continue
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _reach(value: Any, depth: int, found: dict[int, Any], seen: dict[int, Any]) -> None:
    """Adds what `value` leads to to `found`, by identity."""
    if not depth or isinstance(value, _ATOMS) or id(value) in seen or len(seen) > _MOST:
        return
    seen[id(value)] = value
    inside: Iterable[Any] = ()
    if isinstance(value, types.FunctionType):
        if not is_of_a_library(value.__globals__.get("__name__")):
            inside = [each for _, each in _referred_to(value)]
            for variables in (Globals(value), *(value.__closure__ or ())):
                found[id(variables)] = variables
                seen[id(variables)] = variables  # so that it lives, and its identity is its own
    elif isinstance(value, types.MethodType):
        inside = (value.__self__, value.__func__)
    elif isinstance(value, np.ndarray):
        if value.nbytes <= _MOST_BYTES and value.dtype.kind != "O" and value.flags.writeable:
            found[id(value)] = value
    elif isinstance(value, (*_REPLACED, *_KEPT)):
        found[id(value)] = value
        inside = value.values() if isinstance(value, dict) else value
    elif isinstance(value, tuple):
        inside = value
    elif not _is_opaque(value):
        attributes = vars(value)
        found[id(attributes)] = attributes
        methods = [
            each
            for kind in type(value).__mro__[:-1]
            for each in vars(kind).values()
            if isinstance(each, types.FunctionType)
        ]
        inside = [*attributes.values(), *methods]
    for each in inside if isinstance(inside, tuple) else list(inside):
        _reach(each, depth - 1, found, seen)


def _is_opaque(value: Any) -> bool:
    """Whether an object's attributes are its own affair: a library's, or a subclass of one."""
    if has_cell(value) or not isinstance(getattr(value, "__dict__", None), dict):
        return True
    kinds = [each.__module__ for each in type(value).__mro__[:-1]]
    return any(is_of_a_library(module) for module in kinds if module not in _BASES)
