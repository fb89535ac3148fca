"""What Python prints of an error that nobody has caught: the user's frames, or one line of Ctrl-C.

Strategies and datasets install the hook when they are made or read first. It takes the place of
Python's own only: a hook of the program's (or of a notebook's) stays.
"""

from __future__ import annotations

import sys
from types import TracebackType

from unison.tracebacks import is_filtering, own_frames, shorten, user_frames


def install() -> None:
    """Has uncaught errors shown by `show`, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error that nobody has caught: `sys.excepthook`.

    The frames of libraries are left out, unless there are no others. Of a KeyboardInterrupt, one
    line says where the program was.
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
