"""`UNISON_LOG`: lets a program show what happens in it.

Everything that the package has to say goes to the logger "unison" of Python's `logging`: warnings;
at INFO one line for each event that matters (somebody joins, leaves or is late, groups form again,
checkpoints are written and restored); at DEBUG decisions (what runs step by step, how collectives
travel), and all frames of tracebacks (`unison.tracebacks`). A program may configure that logger as
any other. Where it does not, Python shows the warnings.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import jax

#: The environment variable that names the level from which on messages are shown.
VARIABLE = "UNISON_LOG"

#: By which JAX is told whether to filter tracebacks; its option has the name in small letters.
_FILTERING_OF_JAX = "JAX_TRACEBACK_FILTERING"

_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("unison")


def show_what_is_asked_for() -> None:
    """Shows the messages of the level that `UNISON_LOG` names, each with time and worker.

    `import unison` calls it; strategies do when they are made, since a program may have set the
    variable meanwhile. It changes nothing but the logger "unison"; at `debug`, JAX's filtering of
    tracebacks is switched off, too. Without the variable nothing is changed.

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
        logger.propagate = False  # else a program that shows everything would show these twice


def say_who(name: str) -> None:
    """Has the messages of this process begin with its name from now on, if they are shown.

    Args:
        name: The worker, by what stays as it is while groups change; with its index in the present
            group, where that may change.
    """
    global _name
    _name = name
    show_what_is_asked_for()


class _ToStandardError(logging.StreamHandler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # which a program may have changed since
        super().emit(record)


class _Formatter(logging.Formatter):
    """The time to a millisecond, the level unless it is INFO, who says it, and what."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        who = f"{_name}: " if _name else ""
        said = super().format(record)
        return f"{at}.{int(record.msecs):03} unison {who}{level}{said}"


_name = ""
