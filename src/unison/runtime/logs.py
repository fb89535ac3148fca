"""`UNISON_LOG`: the level of log messages that a program shows.

The package logs to the logger "unison" of Python's `logging`: warnings; at INFO, one line for each
important event (a worker joins, leaves or is late, a group is re-formed, a checkpoint is written or
restored); at DEBUG, decisions (what runs step by step, which transport collectives use), and all
frames of tracebacks (`unison.tracebacks`). A program may configure that logger like any other. If
it does not, Python shows the warnings.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import jax

#: The environment variable that sets the lowest level of the messages shown.
VARIABLE = "UNISON_LOG"

#: JAX's environment variable for filtering tracebacks; its option is the name in lower case.
_FILTERING_OF_JAX = "JAX_TRACEBACK_FILTERING"

_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("unison")


def show_what_is_asked_for() -> None:
    """Shows the messages from the level `UNISON_LOG` on, each with the time and the worker.

    Called by `import unison`, and again when a strategy is created, since the program may have set
    the variable in the meantime. It changes only the logger "unison"; at `debug`, JAX's filtering
    of tracebacks is switched off, too. Without the variable nothing is changed.

    Raises:
        ValueError: There is no such level.
    """
    level = os.environ.get(VARIABLE, "").lower()
    if not level:
        return
    if level not in _LEVELS:
        raise ValueError(
            f"{VARIABLE} must be one of {', '.join(_LEVELS)}. Received: {os.environ[VARIABLE]!r}"
        )
    logger.setLevel(level.upper())
    if level == "debug" and _FILTERING_OF_JAX not in os.environ:
        jax.config.update(_FILTERING_OF_JAX.lower(), "off")
    if not any(isinstance(handler, _ToStandardError) for handler in logger.handlers):
        logger.addHandler(_ToStandardError())
        logger.propagate = False  # else a program with a root handler would show them twice


def say_who(name: str) -> None:
    """Prefixes the messages of this process with its name from now on, if they are shown.

    Args:
        name: The worker's name, which does not change when groups do; followed by its index in the
            present group, where that may change.
    """
    global _name
    _name = name
    show_what_is_asked_for()


class _ToStandardError(logging.StreamHandler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # which the program may have replaced since
        super().emit(record)


class _Formatter(logging.Formatter):
    """Formats the time to a millisecond, the level unless it is INFO, the worker, and the text."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        who = f"{_name}: " if _name else ""
        said = super().format(record)
        return f"{at}.{int(record.msecs):03} unison {who}{level}{said}"


_name = ""
