"""The writes of the first process of a job, for the others that use the same paths.

The first process announces its writes in the coordination service, in order, and reports how each
has ended. The others look up theirs there. In a write of values that are distributed over the
processes, all of them take part: the first process waits for the others, unless they have already
passed it, and reports whether they write together.
"""

from __future__ import annotations

import collections
import enum
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from unison.errors import DeadlineExceededError
from unison.runtime import liveness, process_group
from unison.runtime.coordination import CoordinationStore

logger = logging.getLogger("unison")

#: The timeout in seconds of another process for the first one to begin.
_PATIENCE = 60.0

#: Seconds between two checks whether the others have arrived.
_SECONDS_BETWEEN_LOOKS = 0.1

#: The maximum number of paths that are remembered which this process wrote before the first
#: process.
_MOST_AHEAD = 64

#: The minimum number of writes of the first process that are remembered, and the number that are
_KEPT = 1024
_FORGOTTEN_AT_ONCE = 64

#: The location of the writes in the coordination service, and of the number of the first one.
_WRITES = "unison/writes"
_REMEMBERED = "unison/remembered writes"
_FIRST_REMEMBERED = f"{_REMEMBERED}/first"

_SAME_PATH, _OTHER_PATH = b"same path", b"other path"


class Arrival(enum.Enum):
    """The participation of the processes in a write in which all should take part.

    Attributes:
        TOGETHER: All do, and name the same path.
        APART: All do, and some name a path of their own, or do not see the first one's folder.
        ALONE: Some do not.
        FAILED: The first process has failed before it knew.
    """

    TOGETHER = "together"
    APART = "apart"
    ALONE = "alone"
    FAILED = "failed"


class Announced(NamedTuple):
    """A write of the first process.

    Attributes:
        path: Its path.
        gathers: Whether all processes take part.
        mark: The name of a file beside the path, if each is to write a part of one folder.
    """

    path: str
    gathers: bool
    mark: str


class Journal:
    """The latest writes of the first process, in order, and their outcomes.

    Several threads may use it. Those that look for writes do so one after another, in the order
    in which they were queued.
    """

    def __init__(self) -> None:
        self._store = CoordinationStore()
        #: The number of the next write that has not been read yet, or will be announced.
        self._next = 0
        self._ahead: collections.deque[str] = collections.deque(maxlen=_MOST_AHEAD)
        #: Guards all of these; notified when a search has ended.
        self._changed = threading.Condition()
        self._searches: list[object] = []

    def announce(self, path: str, gathers: bool = False, mark: str = "") -> int:
        """Announces that the first process writes `path`; returns the number of the write.

        Args:
            path: The path.
            gathers: Whether all processes take part; see `wait_for_all`.
            mark: The name of a file that the others have to see, if any.
        """
        with self._changed:
            self._store.put(f"{_key(self._next)}/path", json.dumps([path, gathers, mark]).encode())
            self._next += 1
            self._forget()
            return self._next - 1

    def _forget(self) -> None:
        """Forgets the earliest writes, which no process needs any longer."""
        folder, rest = divmod(self._next - _KEPT, _FORGOTTEN_AT_ONCE)
        if folder > 0 and rest == 0:
            self._store.remove_all(_REMEMBERED)
            self._store.put(_FIRST_REMEMBERED, str(folder * _FORGOTTEN_AT_ONCE).encode())
            self._store.remove_all(f"{_WRITES}/{folder - 1}")

    def tell(self, number: int, outcome: dict[str, Any]) -> None:
        """Reports the outcome of a write."""
        self._store.put(f"{_key(number)}/outcome", json.dumps(outcome).encode())

    def line_up(self) -> object:
        """Returns a search, to be passed to `find` or `leave`, for which later ones wait."""
        search = object()
        with self._changed:
            self._searches.append(search)
        return search

    def leave(self, search: object) -> None:
        """Ends a search."""
        with self._changed:
            if search in self._searches:
                self._searches.remove(search)
                self._changed.notify_all()

    def find(self, path: str, search: object) -> int | None:
        """Returns the number of the first process's write of `path`, and ends the search.

        None if it writes something else. Then its next write, whatever its path, is considered the
        one that it runs while this process writes `path`; if it writes `path` later, that is
        skipped.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._searches[0] is search, 2 * _PATIENCE)
            return self._found(path)
        finally:
            self.leave(search)

    def _found(self, path: str) -> int | None:
        begun = time.monotonic()
        while True:
            has_passed = 0 in liveness.passed(begun)  # before reading what it has announced
            announced = self._announced()
            if path in announced:
                self._next += announced.index(path) + 1
                return self._next - 1
            if announced:
                self._next += 1
                self._ahead.append(path)
                return None
            if has_passed:
                return None
            if time.monotonic() > begun + _PATIENCE:
                logger.warning(
                    "Worker %d writes %s by itself: the first worker has saved nothing within "
                    "%g s. Let all workers save, or only the first one.",
                    jax.process_index(),
                    path,
                    _PATIENCE,
                )
                return None

    def _announced(self) -> list[str]:
        """Returns the paths, from the next write on, before which this process did not write."""
        announced: list[str] = []
        if self._announced_at(self._next) is None:
            self._next = max(self._next, self._first_remembered())
        while (write := self._announced_at(self._next + len(announced))) is not None:
            if not announced and write.path in self._ahead:
                self._ahead.remove(write.path)
                self._next += 1
            else:
                announced.append(write.path)
        return announced

    def wait_for_all(self, number: int) -> Arrival:
        """Waits, in the first process, until all others take part in a write.

        Returns:
            How they do; `ALONE` if one of them has passed it, or has not arrived in time.
        """
        missing = set(range(1, jax.process_count()))
        arrival = Arrival.TOGETHER
        begun = time.monotonic()
        with liveness.waiting("a save to which all workers come"):
            while missing:
                other = min(missing)
                came = self._store.get(f"{_key(number)}/came/{other}", _SECONDS_BETWEEN_LOOKS)
                if came is not None:
                    missing.remove(other)
                    arrival = Arrival.APART if came == _OTHER_PATH else arrival
                elif (
                    liveness.passed(begun) & missing
                    or time.monotonic() > begun + process_group.timeout()
                ):
                    arrival = Arrival.ALONE
                    break
        self._store.put(f"{_key(number)}/all", arrival.value.encode())
        return arrival

    def come(self, path: str, sees: Callable[[str], bool]) -> tuple[int | None, Arrival]:
        """Takes part, in another process, in the first one's next write in which all take part.

        Earlier searches end first; all writes before it are skipped.

        Args:
            path: The path that this process writes.
            sees: Returns whether this process sees the mark of a write of the first one.

        Returns:
            The number of that write, if the first process writes the same path; and how all take
            part. `FAILED` if the first process reports an error as the outcome.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._searches, 2 * _PATIENCE)
        begun = time.monotonic()
        with liveness.waiting("a save to which all workers come"):
            while True:
                has_passed = 0 in liveness.passed(begun)  # before reading what is announced
                write = self._next_gathering()
                if write is not None:
                    number = self._next
                    self._next += 1
                    self._ahead.clear()
                    is_same = write.path == path
                    came = _SAME_PATH if is_same and sees(write.mark) else _OTHER_PATH
                    self._store.put(f"{_key(number)}/came/{jax.process_index()}", came)
                    arrival = self._arrival(number)
                    if is_same or arrival in (Arrival.TOGETHER, Arrival.APART):
                        return number if is_same else None, arrival
                elif has_passed or time.monotonic() > begun + process_group.timeout():
                    return None, Arrival.ALONE

    def _next_gathering(self) -> Announced | None:
        """Advances to the first process's next write with all processes; returns it, if any."""
        if self._announced_at(self._next) is None:
            self._next = max(self._next, self._first_remembered())
        while (write := self._announced_at(self._next)) is not None and not write.gathers:
            self._next += 1
        return write

    def _arrival(self, number: int) -> Arrival:
        """Waits until the first process has reported how all take part."""
        while (told := self._store.get(f"{_key(number)}/all", 0.5)) is None:
            liveness.check()
            if self._store.get(f"{_key(number)}/outcome", 0.05):
                return Arrival.FAILED
            if number < self._first_remembered():
                return Arrival.ALONE
        return Arrival(told.decode())

    def outcome(self, number: int, path: str, more_seconds: float = 0.0) -> dict[str, Any] | None:
        """Waits for the end of a write, and returns its outcome; None if it is forgotten.

        Args:
            number: The write.
            path: Its path, for messages.
            more_seconds: Seconds to wait in addition to the timeout.

        Raises:
            DeadlineExceededError: The timeout has expired.
        """
        return self._told(number, "outcome", 0, path, more_seconds)

    def offer(self, number: int, folder: str) -> None:
        """Tells the others, from the first process, into which folder they write their parts."""
        self._store.put(f"{_key(number)}/folder", json.dumps({"folder": folder}).encode())

    def offered(self, number: int, path: str) -> str | None:
        """Waits for that folder, and returns it; None if the write has failed before, or ended.

        Raises:
            DeadlineExceededError: The timeout has expired.
        """
        told = self._told(number, "folder", 0, path)
        return None if told is None else told["folder"]

    def report_part(self, number: int, outcome: dict[str, Any]) -> None:
        """Tells the first process how this one's part of a write has ended."""
        key = f"{_key(number)}/part/{jax.process_index()}"
        self._store.put(key, json.dumps(outcome).encode())

    def wait_for_parts(
        self, number: int, path: str, more_seconds: float
    ) -> dict[int, dict[str, Any]]:
        """Waits, in the first process, until all others have written their parts.

        Args:
            number: The write.
            path: Its path, for messages.
            more_seconds: Seconds to wait in addition to the timeout.

        Returns:
            How each has ended, by process.

        Raises:
            DeadlineExceededError: The timeout has expired.
            UnavailableError: A process is lost.
        """
        return {
            process: self._told(number, f"part/{process}", process, path, more_seconds) or {}
            for process in range(1, jax.process_count())
        }

    def _told(
        self, number: int, what: str, process: int, path: str, more_seconds: float = 0.0
    ) -> dict[str, Any] | None:
        """Waits for what a process tells of a write; None if the write is forgotten, or, of what
        comes before the outcome, has ended.

        Raises:
            DeadlineExceededError: The timeout has expired.
        """
        seconds = process_group.timeout() + more_seconds
        deadline = time.monotonic() + seconds
        who = f"worker {process}" if process else "the first worker"
        with liveness.waiting(f"waiting for {who} to write {path}"):
            while (told := self._store.get(f"{_key(number)}/{what}", 0.5)) is None:
                liveness.check()
                if number < self._first_remembered():
                    return None
                if what == "folder" and self._store.get(f"{_key(number)}/outcome", 0.05):
                    return None
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        message=f"{who[0].upper()}{who[1:]} has begun to write {path}, and has not "
                        f"ended within {seconds:g} s. It is stuck, or has ended."
                    )
        found: dict[str, Any] = json.loads(told)
        return found

    def _announced_at(self, number: int) -> Announced | None:
        found = self._store.get(f"{_key(number)}/path", 0.05)
        return None if found is None else Announced(*json.loads(found))

    def _first_remembered(self) -> int:
        """Returns the number of the first write that is remembered, as far as it is known."""
        return int(self._store.get(_FIRST_REMEMBERED, 0.05) or 0)


def _key(number: int) -> str:
    return f"{_WRITES}/{number // _FORGOTTEN_AT_ONCE}/{number}"
