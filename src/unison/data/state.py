"""Where a stream is: values that can be kept, and from which another process goes on."""

from __future__ import annotations

import collections
from typing import Any, Protocol, runtime_checkable

import numpy as np

#: What can be kept: None, numbers, text, `bytes`, NumPy arrays, and lists, tuples and
#: dictionaries (of text keys) of these.
State = Any


@runtime_checkable
class HasState(Protocol):
    """What knows where it is."""

    def state(self) -> State:
        """Returns where it is; later reading does not change that."""
        ...

    def restore(self, state: State) -> None:
        """Goes to where another one was."""
        ...


def state_of(value: Any) -> State:
    """Returns what is to be kept of a value that reading changes."""
    if isinstance(value, HasState):
        return value.state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, collections.deque | list):
        return [state_of(item) for item in value]
    if isinstance(value, tuple):
        return tuple(state_of(item) for item in value)
    return value


def restored(value: Any, state: State) -> Any:
    """Returns a value as it was when `state` was taken of it.

    Args:
        value: What is there now: the same kind of value.
        state: What `state_of` returned.
    """
    if isinstance(value, HasState):
        value.restore(state)
        return value
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
        return value
    if isinstance(value, collections.deque):
        return collections.deque(state)
    if isinstance(value, list | tuple) and any(isinstance(item, HasState) for item in value):
        pairs = zip(value, state, strict=True)
        return type(value)(restored(item, kept) for item, kept in pairs)
    return state
