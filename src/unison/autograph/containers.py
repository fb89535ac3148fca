"""Lists and dictionaries that the blocks of a statement change: `outputs.append(x)`.

A block is traced to be put into the program, perhaps several times. What it leaves in a list is
then a value of that trace, which means nothing outside. So the lists that a block can reach are
compared before and after it; those that have changed are variables of the statement like any other.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: The number of lists in lists that are followed.
_DEPTH = 3


class Watched:
    """The lists and dictionaries that blocks can reach, with what is in them.

    Args:
        blocks: The functions of the blocks.
        others: Lists and dictionaries that are not watched.
    """

    def __init__(self, blocks: Iterable[Callable[..., Any] | None], others: Iterable[Any]):
        found = {id(each): each for block in blocks if block for each in _reached_by(block)}
        left_out = set(map(id, others))
        self._before = [
            (each, contents(each)) for key, each in found.items() if key not in left_out
        ]

    def changed(self) -> list[Any]:
        """Returns those whose contents have been replaced since, and restores these."""
        changed = []
        for container, before in self._before:
            if not _are_same(contents(container), before):
                changed.append(container)
                put_back(container, before)
        return changed


def name_of(container: list | dict, blocks: Iterable[Callable[..., Any] | None]) -> str:
    """Returns the name by which blocks know a list or a dictionary."""
    for block in filter(None, blocks):
        for name, value in _closure(block):
            if value is container:
                return name
    return "a list"


def put_back(container: list | dict, content: Any) -> None:
    """Replaces what is in a list or a dictionary."""
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def contents(container: list | dict) -> Any:
    """Returns what is in a list or a dictionary, as a tree that does not change with it."""
    return tuple(container) if isinstance(container, list) else dict(container)


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _closure(block: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names and the values of what a block refers to outside of it."""
    names = block.__code__.co_freevars if isinstance(block, types.FunctionType) else ()
    for name, cell in zip(names, getattr(block, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def _reached_by(block: Callable[..., Any]) -> Iterator[list | dict]:
    for _, value in _closure(block):
        yield from _inside(value, _DEPTH)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, types.FunctionType):
            for attribute in attributes.values():
                if type(attribute) in (list, dict):
                    yield from _inside(attribute, _DEPTH)


def _inside(value: Any, depth: int) -> Iterator[list | dict]:
    if depth and type(value) in (list, dict, tuple):
        if not isinstance(value, tuple):
            yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(each, depth - 1)
