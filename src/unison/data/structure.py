"""The structure of an element: the tuples, named tuples and dictionaries that contain its leaves.

Plans pass elements on as flat tuples of leaves; they are packed into the structure for users'
functions, and for the user.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

#: The leaves of an element, in order: arrays, NumPy scalars, `bytes`, plans of nested datasets.
Leaves = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of an element.

    Args:
        kind: `tuple`, a class of named tuples, `dict` or `OrderedDict`; `type(None)` for an
            empty structure; None for a leaf.
        children: The structures inside; those of a dictionary by sorted key.
        keys: The sorted keys of a dictionary.
        order: The keys in the dictionary's own order, which is ignored in comparisons.

    Examples:
        >>> leaves, structure = flatten({"label": 3, "image": (1, 2)})
        >>> leaves, structure.pack(["a", "b", "c"])
        ((1, 2, 3), {'label': 'c', 'image': ('a', 'b')})
    """

    kind: type | None = None
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    order: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @functools.cached_property
    def num_leaves(self) -> int:
        return 1 if self.kind is None else sum(child.num_leaves for child in self.children)

    @functools.cached_property
    def _slices(self) -> list[slice] | None:
        """The positions of every child's leaves; None if every child is a leaf."""
        if all(child.kind is None for child in self.children):
            return None
        slices = []
        start = 0
        for child in self.children:
            slices.append(slice(start, start + child.num_leaves))
            start += child.num_leaves
        return slices

    @functools.cached_property
    def is_flat_tuple(self) -> bool:
        """Whether it is a tuple of leaves."""
        return self.kind is tuple and self._slices is None

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Returns the leaves packed into the structure."""
        if self.kind is None:
            return leaves[0]
        parts: Sequence[Any] = leaves
        if self._slices is not None:
            children = zip(self.children, self._slices, strict=True)
            parts = [child.pack(leaves[part]) for child, part in children]
        if self.kind is tuple:
            return tuple(parts)
        if self.kind is type(None):
            return None
        if issubclass(self.kind, tuple):
            return self.kind(*parts)
        values = dict(zip(self.keys, parts, strict=True))
        ordered = [(key, values[key]) for key in self.order]
        return dict(ordered) if self.kind is dict else collections.OrderedDict(ordered)

    def flatten(self, value: Any) -> Leaves:
        """Returns the parts of `value` at the positions of this structure's leaves.

        Raises:
            ValueError: `value` has another structure.
        """
        if self.is_flat_tuple and type(value) is tuple and len(value) == len(self.children):
            return value
        leaves: list[Any] = []
        if not self._collect(value, leaves):
            raise ValueError(f"Expected an element of structure {self}. Received: {value!r}")
        return tuple(leaves)

    def _collect(self, value: Any, leaves: list[Any]) -> bool:
        """Adds the leaves of `value`, and returns whether it has this structure."""
        if self.kind is None:
            leaves.append(value)
            return True
        parts = self._parts(value)
        if parts is None:
            return False
        pairs = zip(self.children, parts, strict=True)
        return all(child._collect(part, leaves) for child, part in pairs)

    def _parts(self, value: Any) -> Sequence[Any] | None:
        """Returns the parts of `value` at the positions of the children; None if it differs."""
        if self.kind is type(None):
            return () if value is None else None
        if self.kind is tuple:
            fits = isinstance(value, tuple | list) and len(value) == len(self.children)
            return value if fits else None
        if self.kind is not None and issubclass(self.kind, tuple):
            return value if type(value) is self.kind else None
        if isinstance(value, Mapping) and len(value) == len(self.keys):
            return [value[key] for key in self.keys] if value.keys() >= {*self.keys} else None
        return None

    def __str__(self) -> str:
        return str(self.pack([_Dot()] * self.num_leaves))


#: The structure of a single leaf.
LEAF = Structure()


def tuple_of(*children: Structure) -> Structure:
    """Returns the structure of a tuple of these."""
    return Structure(tuple, children)


def flatten(value: Any, lists_are_tuples: bool = False) -> tuple[Leaves, Structure]:
    """Returns the leaves of `value` and its structure.

    Args:
        value: Tuples, named tuples, dictionaries and None that contain leaves.
        lists_are_tuples: Whether a list is a part of the structure, and not a leaf.
    """
    leaves: list[Any] = []
    structure = _structure_of(value, leaves, lists_are_tuples)
    return tuple(leaves), structure


def _structure_of(value: Any, leaves: list[Any], lists_are_tuples: bool) -> Structure:
    def child(part: Any) -> Structure:
        return _structure_of(part, leaves, lists_are_tuples)

    if value is None:
        return Structure(type(None))
    if isinstance(value, tuple):
        kind = type(value) if hasattr(value, "_fields") else tuple
        return Structure(kind, tuple(map(child, value)))
    if isinstance(value, list) and lists_are_tuples:
        return Structure(tuple, tuple(map(child, value)))
    if isinstance(value, Mapping):
        is_ordered = isinstance(value, collections.OrderedDict)
        keys = tuple(sorted(value))
        children = tuple(child(value[key]) for key in keys)
        return Structure(collections.OrderedDict if is_ordered else dict, children, keys, (*value,))
    leaves.append(value)
    return LEAF


class _Dot:
    """A leaf, when a structure is printed."""

    def __repr__(self) -> str:
        return "."
