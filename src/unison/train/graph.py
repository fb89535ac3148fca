"""The graph of objects that a checkpoint follows: references, by name.

It is TensorFlow's object graph: an object is identified by the names on the path from the
root, not by its own name, so that parts of a checkpoint can be restored into another program.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from unison.cells import Cell, has_cell
from unison.module import WAITING, Tracked
from unison.runtime.launches import LAUNCH_LOCK
from unison.train.archive import Node
from unison.train.structures import encode_structure

#: Returns the parts of an object, by name.
Parts = Callable[[Any], dict[str, Any]]

_ATTRIBUTE = ".ATTRIBUTES"

#: Types of most attributes, which need no further look.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, FunctionType, MethodType})


def parts_of(owner: Any) -> dict[str, Any]:
    """Returns the objects with state that `owner` references, by name.

    Raises:
        ValueError: A dictionary has such an object under a key that is not text.
    """
    if isinstance(owner, dict):
        return _items(owner)
    if isinstance(owner, list | tuple):
        return {str(index): item for index, item in enumerate(owner) if is_tracked(item)}
    keras_parts = _keras_parts()
    if keras_parts is not None and keras_parts.is_keras_object(owner):
        return keras_parts.parts_of_keras_object(owner, is_tracked)
    if isinstance(owner, Tracked):
        attributes = vars(owner).items()
        return {name: value for name, value in attributes if name != WAITING and is_tracked(value)}
    return {}


def parts_as_tensorflow_names(parts: Parts) -> Parts:
    """Returns the part names of TensorFlow's checkpoints, which are also ours."""

    def named(owner: Any) -> dict[str, Any]:
        keras_parts = _keras_parts()
        if keras_parts is None:
            return parts(owner)
        if not keras_parts.is_keras_object(owner):
            return parts(owner)
        return keras_parts.parts_known_to_tensorflow(owner) | parts(owner)

    return named


def is_tracked(value: Any) -> bool:
    """Whether a checkpoint follows `value`: it has state, or references what may have it."""
    if type(value) in _PLAIN:
        return False
    if isinstance(value, dict):
        return any(map(is_tracked, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_tracked, value))
    if isinstance(value, Tracked) or is_variable(value) or has_state(value):
        return True
    keras_parts = _keras_parts()
    return keras_parts is not None and keras_parts.is_keras_object(value)


def is_variable(value: Any) -> bool:
    """Whether `value` is a variable, Unison's or Keras'."""
    return has_cell(value) or (
        "keras" in sys.modules and isinstance(value, sys.modules["keras"].Variable)
    )


def has_state(value: Any) -> bool:
    """Whether `value` has the methods `get_state` and `set_state`."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "get_state", None))
        and callable(getattr(value, "set_state", None))
    )


def reachable(root: Any, parts: Parts) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every object that is reachable from `root`, the nearest first, with its path."""
    for path, owner, _ in _walked(root, parts):
        yield path, owner


def _walked(root: Any, parts: Parts) -> Iterator[tuple[tuple[str, ...], Any, dict[str, Any]]]:
    """Yields these objects with their paths and parts."""
    queue: collections.deque[tuple[tuple[str, ...], Any]] = collections.deque([((), root)])
    seen = {id(root)}
    while queue:
        path, owner = queue.popleft()
        own = parts(owner)
        yield path, owner, own
        for name, part in own.items():
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(((*path, name), part))


def settle(root: Any, parts: Parts) -> None:
    """Stores the state of running training loops in the cells, to be read and assigned."""
    _settle_all([owner for _, owner in reachable(root, parts)])


def _settle_all(owners: Iterable[Any]) -> None:
    keras_parts = _keras_parts()
    if keras_parts is not None:
        for owner in owners:
            keras_parts.settle(owner)


def announce_new_parts(owner: Any) -> None:
    """Makes `owner` notify pending restorations when it may have new parts."""
    keras_parts = _keras_parts()
    if keras_parts is not None and keras_parts.is_keras_object(owner):
        keras_parts.announce_new_parts(owner)


def cells_of(root: Any, parts: Parts) -> list[Cell]:
    """Returns the cells of the variables that are reachable from `root`."""
    return [owner.cell for _, owner in reachable(root, parts) if has_cell(owner)]


def describe(
    root: Any, parts: Parts, value_of: Callable[[Cell], np.ndarray] = Cell.numpy
) -> tuple[list[Node], dict[str, np.ndarray]]:
    """Returns the nodes of the graph, and the arrays of its state.

    A variable with several copies is one array: the copies combined.

    Args:
        root: The object of the first node.
        parts: Returns an object's parts, by name.
        value_of: Returns the value of a cell.

    Raises:
        ValueError: A variable's copies have no common value.
    """
    found = list(_walked(root, parts))
    # Before the lock: an iterator may wait for its own thread, which may need to launch a program.
    states = {
        id(owner): owner.get_state()
        for _, owner, _ in found
        if has_state(owner) and not is_variable(owner)
    }
    number = {id(owner): index for index, (_, owner, _) in enumerate(found)}
    arrays: dict[str, np.ndarray] = {}
    nodes = []
    with LAUNCH_LOCK:  # no step changes one variable while another one is read
        _settle_all([owner for _, owner, _ in found])
        for path, owner, own in found:
            node = Node({name: number[id(part)] for name, part in own.items()})
            if is_variable(owner):
                node.variable = key_of(path, "VARIABLE_VALUE")
                arrays[node.variable] = (
                    value_of(owner.cell) if has_cell(owner) else np.asarray(owner)
                )
            elif id(owner) in states:
                node.state = {"value": _encoded(states[id(owner)], owner, path, arrays)}
            nodes.append(node)
    return nodes, arrays


def values_of(root: Any, parts: Parts) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the values of the variables that are reachable from `root`, by their paths.

    Raises:
        ValueError: A variable's copies have no common value.
    """
    found = list(reachable(root, parts))
    with LAUNCH_LOCK:  # as in `describe`
        _settle_all([owner for _, owner in found])
        return {
            path: owner.cell.numpy() if has_cell(owner) else np.asarray(owner)
            for path, owner in found
            if is_variable(owner)
        }


def key_of(path: Iterable[str], attribute: str) -> str:
    """Returns the key of an array of the object at `path`.

    Examples:
        >>> key_of(["net", "layers/a", "kernel"], "VARIABLE_VALUE")
        'net/layers.Sa/kernel/.ATTRIBUTES/VARIABLE_VALUE'
    """
    escaped = (name.replace(".", "..").replace("/", ".S") for name in path)
    return "/".join([*escaped, _ATTRIBUTE, attribute])


def _encoded(state: Any, owner: Any, path: tuple[str, ...], arrays: dict[str, np.ndarray]) -> Any:
    numbers = itertools.count()

    def store(leaf: Any) -> str:
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
            raise TypeError(
                f"What get_state of {owner!r} returns must be made of dictionaries with text as "
                "keys, lists, tuples, numbers, text, bytes, arrays and None. Received: "
                f"{leaf!r} of type {type(leaf).__name__}"
            )
        key = key_of(path, f"STATE_{next(numbers)}")
        arrays[key] = np.asarray(leaf)
        return key

    return encode_structure(state, store)


def _items(owner: dict[Any, Any]) -> dict[str, Any]:
    tracked = {key: value for key, value in owner.items() if is_tracked(value)}
    for key, value in tracked.items():
        if not isinstance(key, str):
            raise ValueError(
                "A dictionary that a checkpoint follows must have text as keys. Received: the key "
                f"{key!r} of {value!r}"
            )
    return tracked


def _keras_parts() -> Any:
    """Returns the module for Keras' objects, if the program uses Keras."""
    if "keras" not in sys.modules:
        return None
    from unison.train import keras_parts

    return keras_parts
