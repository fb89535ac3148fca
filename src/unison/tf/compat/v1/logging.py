"""`tf.compat.v1.logging`: Unison's logger under TensorFlow 1's names."""

from __future__ import annotations

import logging
from typing import Any

from unison.tf.missing import names_missing_from

__all__ = [
    "DEBUG",
    "ERROR",
    "FATAL",
    "INFO",
    "WARN",
    "debug",
    "error",
    "fatal",
    "flush",
    "get_verbosity",
    "info",
    "log",
    "set_verbosity",
    "warn",
    "warning",
]

DEBUG, INFO, WARN, ERROR, FATAL = 10, 20, 30, 40, 50

_logger = logging.getLogger("unison")

debug = _logger.debug
info = _logger.info
warning = warn = _logger.warning
error = _logger.error
fatal = _logger.critical
log = _logger.log


def set_verbosity(verbosity: int | str) -> None:
    """Sets the least level that is logged: a number or a name.

    TF: `tf.compat.v1.logging.set_verbosity`.
    """
    _logger.setLevel(verbosity)


def get_verbosity() -> int:
    """Returns the least level that is logged. TF: `tf.compat.v1.logging.get_verbosity`."""
    return _logger.getEffectiveLevel()


def flush() -> None:
    """Flushes the logger's handlers. TF: `tf.compat.v1.logging.flush`."""
    handlers: list[Any] = _logger.handlers
    for handler in handlers:
        handler.flush()


__getattr__ = names_missing_from(__name__)
