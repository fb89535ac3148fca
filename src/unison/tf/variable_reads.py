"""Observers of a thread's reads of variables: tapes, and functions with their own gradients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from unison.observers import observing_reads
from unison.thread_local import ThreadLocal

# Told of a read, gives the value to use for it.
Observer = Callable[[Any, jax.Array], Any]
_observers: ThreadLocal[list[Observer]] = ThreadLocal(default_factory=list)
_observation: ThreadLocal[contextlib.ExitStack] = ThreadLocal(default_factory=contextlib.ExitStack)


def observe_reads(observer: Observer) -> None:
    """Calls `observer` for every variable that this thread reads, until the block ends.

    Tapes may end in any order, so that they are no stack of context managers.
    """
    if not _observers.value:
        _observation.value.enter_context(observing_all_reads(_tell_observers))
    _observers.value.append(observer)


def do_not_observe_reads(observer: Observer) -> None:
    """Calls `observer` no more."""
    _observers.value.remove(observer)
    if not _observers.value:
        _observation.value.close()


def _tell_observers(variable: Any, value: jax.Array) -> jax.Array:
    for observer in _observers.value:
        value = observer(variable, value)
    return value


@contextlib.contextmanager
def observing_all_reads(observer: Observer) -> Iterator[None]:
    """Inside, `observer` is called for every variable that this thread reads, Keras' included."""
    with contextlib.ExitStack() as stack:
        if "keras" in sys.modules:
            from unison.keras.reads import noting_keras_reads

            stack.enter_context(noting_keras_reads())
        stack.enter_context(observing_reads(observer))
        yield
