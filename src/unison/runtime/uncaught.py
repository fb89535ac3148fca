"""The output for an uncaught error: the user's frames, or one line after Ctrl-C.

The hook is installed where strategies are created, datasets are first read and functions are
launched, and by the import of `unison.tf`. It only replaces Python's default hook, and that of
notebooks (IPython): one that the program has set is kept.

A notebook keeps the error that it has shown. Contexts that a signal handler has left open in it are
ended first (see `end_contexts`), those of the program's own `with` statements, too.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from unison.tracebacks import end_contexts, is_filtering, own_frames, shorten, user_frames


def install() -> None:
    """Makes `show` print uncaught errors, unless the program has set its own hook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show
    notebooks = sys.modules.get("IPython")
    shell = None if notebooks is None else notebooks.get_ipython()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((BaseException,), _show_in_notebook)


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an uncaught error: the `sys.excepthook`.

    The frames of libraries are left out, unless there are no others. For a KeyboardInterrupt, one
    line states where the program was.
    """
    end_contexts(error)
    is_typed = hasattr(sys, "ps1") or sys.flags.inspect
    if isinstance(error, KeyboardInterrupt) and is_filtering() and not is_typed:
        print(_interrupted(error), file=sys.stderr, flush=True)
        return
    sys.__excepthook__(kind, error, _shown(error, trace))


def _show_in_notebook(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Prints an error that ends a cell; IPython calls it."""
    end_contexts(error)
    shell.showtraceback((kind, error, _shown(error, trace)), tb_offset=tb_offset)


def _shown(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of libraries, unless there are no others."""
    if not user_frames(error):
        return trace
    shorten(error)
    return error.__traceback__


def _interrupted(error: BaseException) -> str:
    frames = own_frames(error)
    if not frames:
        return "KeyboardInterrupt"
    last = frames[-1]
    return f"KeyboardInterrupt: {last.filename}, line {last.lineno}, in {last.name}"
