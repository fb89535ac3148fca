"""Programs that call functions on the host, which may raise.

XLA converts the exception that a callback raises (of `jax.pure_callback`, `io_callback`,
`jax.debug.callback`, an assertion) to text, and JAX raises a JaxRuntimeError with that text. The
exception itself is available in this process: JAX logs it, with its traceback, before passing it to
XLA.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from unison.runtime.private_jax import CALLBACK_LOGGERS, finish_effects
from unison.runtime.shared_memory import (
    fail_program,
    new_program,
    recover_program,
    shared_memory_of,
)

T = TypeVar("T")


class HostCalls:
    """The host callbacks of a program, any of which may raise, on any replica.

    Args:
        replica_devices: The devices of all replicas.

    Attributes:
        number: The program's number, for its `ReplicaFunction`.
    """

    def __init__(self, replica_devices: Sequence[jax.Device]) -> None:
        self.number = new_program()
        self._memory = shared_memory_of(tuple(replica_devices))

    def run(self, program: Callable[[], T]) -> T:
        """Runs the program to its end; raises the original exception of a callback.

        If callbacks fail on several replicas, the first exception is raised. Other replicas that
        wait for one that has failed do not wait any longer; those of other processes exchange
        nothing any more.
        """
        recover_program(self.number)
        with self._errors():
            results = program()
            try:
                return jax.block_until_ready(results)
            except jax.errors.JaxRuntimeError:
                _wait_for_each(results)
                raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Context manager in which the exceptions of callbacks are raised.

        JAX's log records of exceptions that are not raised here are logged at the end.
        """
        logged = _Logged(self._end_waiting)
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

    def _end_waiting(self, error: BaseException) -> None:
        reason = f"Another replica has failed: {type(error).__name__}: {error}"
        fail_program(self.number, reason)
        if self._memory is not None:
            self._memory.abort(reason)


def _wait_for_each(results: Any) -> None:
    """Waits until no replica computes any longer; some may have failed."""
    for array in jax.tree.leaves(results):
        for shard in array.addressable_shards:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                shard.data.block_until_ready()


class _Logged(logging.Filter):
    """Withholds and keeps the log records of exceptions.

    Args:
        on_error: Called with each exception.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_error = on_error
        self.records: list[logging.LogRecord] = []
        self.errors: list[BaseException] = []

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        self.records.append(record)
        self.errors.append(error)
        self._on_error(error)
        return False
