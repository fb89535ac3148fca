"""Python's garbage collection is paused while functions are traced and lowered.

A trace makes many objects that live until it has ended, so that Python looks through all objects of
the process again and again, those of Keras and JAX included, and finds next to nothing: 40 % of the
time that the trace of a network takes, and of its lowering to StableHLO.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def without_collection(call: Callable[[], T]) -> T:
    """Returns what `call` returns; no garbage collection begins meanwhile, unless it asks for one.

    The collection is that of the whole process. It goes on in the other threads, too, when any
    thread's call has ended; if the program has turned it off, it stays off.
    """
    if not gc.isenabled():
        return call()
    try:
        gc.disable()  # in the block, which a signal handler may end at any instruction
        return call()
    finally:
        gc.enable()
