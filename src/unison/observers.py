"""Observers of the variables that a thread reads, such as gradient tapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from unison.thread_local import ThreadLocal

#: Called with the variable and the value that was read; returns the value for the reader.
Observer = Callable[[Any, jax.Array], jax.Array]

_observers: ThreadLocal[tuple[Observer, ...]] = ThreadLocal(())


@contextlib.contextmanager
def observing_reads(observer: Observer) -> Iterator[None]:
    """Context manager in which `observer` sees, and may replace, every read of this thread."""
    with _observers.bound_to((*_observers.value, observer)):
        yield


def note_read(variable: Any, value: jax.Array) -> jax.Array:
    """Notifies the thread's observers of a read of `variable`; returns the reader's value."""
    for observer in _observers.value:
        value = observer(variable, value)
    return value
