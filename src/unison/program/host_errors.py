"""The original errors of host callbacks in programs.

XLA converts the exception that a callback raises (of `jax.pure_callback`, `io_callback`,
`jax.debug.callback`, an assertion) to text, and JAX raises a JaxRuntimeError with that text. The
exception itself is available in this process: JAX logs it, with its traceback, before passing it to
XLA.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import jax

from unison.runtime.private_jax import CALLBACK_LOGGERS, finish_effects


@contextlib.contextmanager
def errors_of_callbacks() -> Iterator[None]:
    """Context manager in which a program raises the original exceptions of its host callbacks.

    The program must finish inside it. If callbacks fail on several replicas, the first exception is
    raised. JAX's log records of exceptions that are not raised here are logged at the end.
    """
    logged = _Logged()
    for logger in CALLBACK_LOGGERS:
        logger.addFilter(logged)
    failed: jax.errors.JaxRuntimeError | None = None
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not logged.records:
            raise
        failed = error
    finally:
        for logger in CALLBACK_LOGGERS:
            logger.removeFilter(logged)
        if failed is None:
            for record in logged.records:
                logging.getLogger(record.name).handle(record)
    if failed is not None:
        # Otherwise JAX would raise it again when the process ends.
        finish_effects()
        first = logged.errors[0]
        own = first.__context__
        try:
            raise first
        finally:
            first.__context__ = own  # rather than JAX's error for it


class _Logged(logging.Filter):
    """Withholds and keeps the log records of exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.errors: list[BaseException] = []

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        self.records.append(record)
        self.errors.append(error)
        return False
