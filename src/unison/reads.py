"""Who sees which variables a thread reads: gradient tapes watch what they see."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

#: Called with the variable and the value that was read; returns what the reader gets.
Observer = Callable[[Any, jax.Array], jax.Array]

_thread = threading.local()


@contextlib.contextmanager
def observing_reads(observer: Observer) -> Iterator[None]:
    """Lets `observer(variable, value)` see, and replace, all that this thread reads inside."""
    outer = _observers()
    _thread.observers = (*outer, observer)
    try:
        yield
    finally:
        _thread.observers = outer


def note_read(variable: Any, value: jax.Array) -> jax.Array:
    """Tells the thread's observers that `variable` was read; returns what the reader gets."""
    for observer in _observers():
        value = observer(variable, value)
    return value


def _observers() -> tuple[Observer, ...]:
    return getattr(_thread, "observers", ())
