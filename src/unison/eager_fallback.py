"""Detects work that compiled functions cannot contain: only Python can do it between programs.

`unison.functions` compiles a function on trial. If the function runs a strategy, takes the next
batch of an iterator, or uses variables of several replicas, the trial ends, and the function runs
eagerly in Python instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from unison.thread_local import ThreadLocal

_is_on_trial = ThreadLocal(False)


class NeedsPythonError(RuntimeError):
    """Ends the trial; `unison.functions` catches it."""


@contextlib.contextmanager
def on_trial() -> Iterator[None]:
    """Context manager in which this thread compiles a function on trial."""
    with _is_on_trial.bound_to(True):
        yield


def is_on_trial() -> bool:
    """Whether this thread compiles a function on trial."""
    return _is_on_trial.value


def needs_python(what: str) -> None:
    """Ends the trial, if there is one, because `what` works only between compiled programs.

    Raises:
        NeedsPythonError: This thread compiles a function on trial.
    """
    if is_on_trial():
        raise NeedsPythonError(f"{what} runs between compiled programs, not inside one.")
