"""Retries and timeouts of remote file systems."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from unison.errors import DeadlineExceededError, PermissionDeniedError, UnavailableError
from unison.interrupts import is_of_a_signal_handler

Result = TypeVar("Result")

#: Errors that are not transient.
_PERMANENT = (
    AttributeError,
    FileExistsError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    MemoryError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)

#: HTTP status codes of transient errors, among those of permanent ones.
_LATER = {408, 425, 429}


@dataclasses.dataclass
class Patience:
    """The retries and timeouts of a file system.

    Attributes:
        tries: The maximum number of attempts.
        first_wait: Seconds between the first two; each wait is twice as long as the previous one,
            with random jitter.
        longest_wait: The maximum seconds of a wait.
        seconds: The timeout of an attempt.
    """

    tries: int = 5
    first_wait: float = 0.2
    longest_wait: float = 8.0
    seconds: float = 30.0

    def wait_after(self, attempt: int) -> float:
        """Returns the seconds to wait after an attempt, the first being 0."""
        wait = min(self.first_wait * 2**attempt, self.longest_wait)
        return wait * random.uniform(0.75, 1.25)


#: The settings for all remote files; its attributes may be set.
PATIENCE = Patience()


def attempted(path: str, operation: Callable[[], Result], done: str = "read") -> Result:
    """Returns the result of `operation`, which is retried after transient errors.

    Args:
        path: What it reads or writes, for messages.
        operation: Called in its own thread, once per attempt.
        done: In messages: "read" or "written".

    Raises:
        UnavailableError: The last attempt failed.
        DeadlineExceededError: The last attempt timed out.
        PermissionDeniedError: A web server has denied access.
        Exception: An error that is not transient, unchanged.
    """
    begin = time.monotonic()
    last: Exception
    for attempt in range(PATIENCE.tries):
        try:
            return _in_time(path, operation)
        except Exception as error:
            if is_of_a_signal_handler(error):
                raise
            last = _reason(error)
            status = getattr(last, "status", None)
            if status in (401, 403):
                raise PermissionDeniedError(message=f"{path}; {last}") from error
            is_refusal = status is not None and 400 <= status < 500 and status not in _LATER
            if is_refusal or isinstance(last, _PERMANENT):
                raise
        if attempt + 1 < PATIENCE.tries:
            time.sleep(PATIENCE.wait_after(attempt))
    spent = time.monotonic() - begin
    what = DeadlineExceededError if isinstance(last, TimeoutError) else UnavailableError
    raise what(
        message=f"{path} cannot be {done}: {PATIENCE.tries} attempts in {spent:.1f} seconds "
        f"failed, the last one with {type(last).__name__}: {last}"
    ) from last


def _reason(error: Exception) -> Exception:
    """Returns the cause of an error: fsspec reports all errors of a web server as "not found"."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        is_webs = type(cause).__module__.partition(".")[0] == "aiohttp"
        if is_webs or isinstance(cause, TimeoutError | ConnectionError):
            return cause
    return error


def _in_time(path: str, operation: Callable[[], Result]) -> Result:
    """Returns the result of `operation` within `PATIENCE.seconds`.

    Raises:
        DeadlineExceededError: It is still running. Its thread ends with it.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, operation()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="unison-data-file", daemon=True)
    thread.start()
    # The drivers' own timeouts are the same, and have better messages: they come first.
    thread.join(PATIENCE.seconds * 1.25)
    if not outcome:
        raise DeadlineExceededError(
            message=f"{path} did not answer within {PATIENCE.seconds * 1.25:g} seconds"
        )
    has_succeeded, value = outcome[0]
    if has_succeeded:
        return value
    raise value
