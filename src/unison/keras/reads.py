"""Reads of Keras variables, for those who watch reads (`unison.observers`)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras

from unison.observers import note_read

#: Every read of a Keras variable hands its value, still in its own dtype, to this method.
_HOOK = "_maybe_autocast"

_lock = threading.Lock()
_watchers = 0


@contextlib.contextmanager
def noting_keras_reads() -> Iterator[None]:
    """Inside, reads of Keras variables are noted, as those of `unison.Variable` always are.

    Keras' class is changed while at least one thread is inside, and as it was afterwards.
    """
    global _watchers
    owner = next(base for base in keras.Variable.__mro__ if _HOOK in vars(base))
    with _lock:
        if not _watchers:
            setattr(owner, _HOOK, _noting(vars(owner)[_HOOK]))
        _watchers += 1
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if not _watchers:
                setattr(owner, _HOOK, vars(owner)[_HOOK].__wrapped__)


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def read(self: keras.Variable, value: Any) -> Any:
        return original(self, note_read(self, value))

    return read
