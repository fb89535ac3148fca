"""What a compiled function cannot contain: work that only Python can do between programs.

`unison.functions` compiles a function on trial. Where the function then runs a strategy, takes
the next batch of an iterator, or touches variables of several replicas, the trial ends here, and
the function runs step by step in Python instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()


class NeedsPythonError(RuntimeError):
    """What ends the trial; `unison.functions` catches it."""


@contextlib.contextmanager
def on_trial() -> Iterator[None]:
    """Inside, this thread compiles a function on trial."""
    outer = is_on_trial()
    _thread.on_trial = True
    try:
        yield
    finally:
        _thread.on_trial = outer


def is_on_trial() -> bool:
    """Whether this thread compiles a function on trial."""
    return getattr(_thread, "on_trial", False)


def needs_python(what: str) -> None:
    """Ends the trial, if this is one, because `what` works between compiled programs only.

    Raises:
        NeedsPythonError: This thread compiles a function on trial.
    """
    if is_on_trial():
        raise NeedsPythonError(f"{what} runs between compiled programs, not inside one.")
