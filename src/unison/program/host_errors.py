"""Programs that call functions on the host, which may raise.

XLA converts the exception that a callback raises (of `jax.pure_callback`, `io_callback`,
`jax.debug.callback`, an assertion) to text, and JAX raises a JaxRuntimeError with that text. The
exception itself is available in this process: JAX logs it, with its traceback, before passing it to
XLA.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import core as jex

from unison.jaxprs import host_callbacks
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
        jaxprs: The traces of the program.
        replica_devices: The devices of all replicas.

    Attributes:
        number: The program's number, for its `ReplicaFunction`.
    """

    def __init__(self, jaxprs: Sequence[jex.Jaxpr], replica_devices: Sequence[jax.Device]) -> None:
        #: The callbacks; kept, so that no others have their ids.
        self._callbacks = [callback for jaxpr in jaxprs for callback in host_callbacks(jaxpr)]
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
        """Context manager in which the exceptions of the callbacks are raised.

        JAX's log records of them are logged at the end if they are not.
        """
        logged = _Logged(self._is_of_a_callback, self._end_waiting)
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

    def _is_of_a_callback(self, error: BaseException) -> bool:
        """Whether a callback of this program has raised; those of others may run meanwhile."""
        own = set(map(id, self._callbacks))
        return any(
            id(value) in own
            for frame, _ in traceback.walk_tb(error.__traceback__)
            for value in frame.f_locals.values()
        )

    def _end_waiting(self, error: BaseException) -> None:
        described = "".join(traceback.format_exception_only(error)).strip()  # whatever its text is
        reason = f"Another replica has failed: {described}"
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
        is_own: Whether an exception's record is withheld.
        on_error: Called with each that is.
    """

    def __init__(
        self,
        is_own: Callable[[BaseException], bool],
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self._is_own = is_own
        self._on_error = on_error
        self.records: list[logging.LogRecord] = []
        self.errors: list[BaseException] = []

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not self._is_own(error):
            return True
        self.records.append(record)
        self.errors.append(error)
        self._on_error(error)
        return False
