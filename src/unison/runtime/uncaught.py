"""The output for an uncaught error: the user's frames, or one line after Ctrl-C.

Strategies install the hook when they are created, and datasets when they are first read. It only
replaces Python's default hook: one that the program (or a notebook) has set is kept.
"""

from __future__ import annotations

import sys
from types import TracebackType

from unison.tracebacks import is_filtering, own_frames, shorten, user_frames


def install() -> None:
    """Makes `show` print uncaught errors, unless the program has set its own hook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an uncaught error: the `sys.excepthook`.

    The frames of libraries are left out, unless there are no others. For a KeyboardInterrupt, one
    line states where the program was.
    """
    is_typed = hasattr(sys, "ps1") or sys.flags.inspect
    if isinstance(error, KeyboardInterrupt) and is_filtering() and not is_typed:
        print(_interrupted(error), file=sys.stderr, flush=True)
        return
    if user_frames(error):
        shorten(error)
        trace = error.__traceback__
    sys.__excepthook__(kind, error, trace)


def _interrupted(error: BaseException) -> str:
    frames = own_frames(error)
    if not frames:
        return "KeyboardInterrupt"
    last = frames[-1]
    return f"KeyboardInterrupt: {last.filename}, line {last.lineno}, in {last.name}"
