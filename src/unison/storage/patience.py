"""How long, and how often, a file system that does not answer is asked."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from unison.errors import DeadlineExceededError, PermissionDeniedError, UnavailableError

Result = TypeVar("Result")

#: What asking again does not change.
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

#: Answers of web servers that say "later", among those that say "no".
_LATER = {408, 425, 429}


@dataclasses.dataclass
class Patience:
    """How long, and how often, a file system that does not answer is asked.

    Attributes:
        tries: How many attempts are made at most.
        first_wait: Seconds between the first two; the next waits are each twice as long, a
            little more or less by chance.
        longest_wait: Seconds that no wait is longer than.
        seconds: After so many seconds, an attempt has failed.
    """

    tries: int = 5
    first_wait: float = 0.2
    longest_wait: float = 8.0
    seconds: float = 30.0

    def wait_after(self, attempt: int) -> float:
        """Returns how many seconds to wait after an attempt, the first being 0."""
        wait = min(self.first_wait * 2**attempt, self.longest_wait)
        return wait * random.uniform(0.75, 1.25)


#: What holds for all remote files; its attributes may be set.
PATIENCE = Patience()


def attempted(path: str, operation: Callable[[], Result]) -> Result:
    """Returns what `operation` returns, which is tried again when it fails for the moment.

    Args:
        path: What it reads, for messages.
        operation: Called in a thread of its own, once an attempt.

    Raises:
        UnavailableError: The last attempt failed.
        DeadlineExceededError: The last attempt did not end in time.
        PermissionDeniedError: A web server says that the caller may not read.
        Exception: What asking again does not change, as it was raised.
    """
    begin = time.monotonic()
    last: Exception
    for attempt in range(PATIENCE.tries):
        try:
            return _in_time(path, operation)
        except Exception as error:
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
        message=f"{path} cannot be read: {PATIENCE.tries} attempts in {spent:.1f} seconds failed, "
        f"the last one with {type(last).__name__}: {last}"
    ) from last


def _reason(error: Exception) -> Exception:
    """Returns what is behind an error: fsspec calls all that a web server fails at "not found"."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        is_webs = type(cause).__module__.partition(".")[0] == "aiohttp"
        if is_webs or isinstance(cause, TimeoutError | ConnectionError):
            return cause
    return error


def _in_time(path: str, operation: Callable[[], Result]) -> Result:
    """Returns what `operation` returns within `PATIENCE.seconds`.

    Raises:
        DeadlineExceededError: It is still running. Its thread ends when it does.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, operation()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="unison-data-file", daemon=True)
    thread.start()
    # The drivers' own limits are the same, and say more: they come first.
    thread.join(PATIENCE.seconds * 1.25)
    if not outcome:
        raise DeadlineExceededError(
            message=f"{path} did not answer within {PATIENCE.seconds * 1.25:g} seconds"
        )
    has_succeeded, value = outcome[0]
    if has_succeeded:
        return value
    raise value
