"""Errors of functions that a program calls on the host, as they were raised.

XLA makes text of what such a function raises (of `jax.pure_callback`, `io_callback`,
`jax.debug.callback`, an assertion), and JAX raises a JaxRuntimeError with that text. The error
itself is known in this process: JAX logs it, with its traceback, before it hands it to XLA.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import jax

from unison.runtime.private_jax import CALLBACK_LOGGERS, finish_effects


@contextlib.contextmanager
def errors_of_callbacks() -> Iterator[None]:
    """Inside, what a function of the host raises is raised by the program that calls it.

    The program must end inside. Of functions that fail on several replicas, the first counts. What
    JAX logs of errors that are not raised here is logged at the end.
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
        # Else JAX would raise it again when the process ends.
        finish_effects()
        first = logged.errors[0]
        own = first.__context__
        try:
            raise first
        finally:
            first.__context__ = own  # rather than JAX's account of it


class _Logged(logging.Filter):
    """Keeps what is logged of errors, instead of letting it through."""

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
