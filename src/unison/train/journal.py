"""What the first process of a job writes, for the others that name the same paths.

The first process announces its writes in the coordination service, in order, and says how each has
ended. The others look there for theirs. A write of values of which each process has a part is one
to which all come: the first process waits for the others, unless they have passed it already, and
says whether they write together.
"""

from __future__ import annotations

import collections
import json
import logging
import threading
import time
from typing import Any, NamedTuple

import jax

from unison.errors import DeadlineExceededError
from unison.runtime import liveness, process_group
from unison.runtime.coordination import CoordinationStore

logger = logging.getLogger("unison")

#: Seconds that another process waits for the first one to begin.
_PATIENCE = 60.0

#: Seconds between two looks at whether the others come.
_SECONDS_BETWEEN_LOOKS = 0.1

#: How many paths are remembered that this process wrote before the first one came to them.
_MOST_AHEAD = 64

#: How many writes of the first process are remembered at least, and how many are forgotten at once.
_KEPT = 1024
_FORGOTTEN_AT_ONCE = 64

#: Where the writes are in the coordination service, and the number of the first one there.
_WRITES = "unison/writes"
_REMEMBERED = "unison/remembered writes"
_FIRST_REMEMBERED = f"{_REMEMBERED}/first"

_TOGETHER, _ALONE = b"together", b"alone"


class Announced(NamedTuple):
    """A write of the first process.

    Attributes:
        path: What it writes.
        gathers: Whether all processes are to come to it.
    """

    path: str
    gathers: bool


class Journal:
    """The latest writes of the first process, in order, and how they ended.

    Several threads may use it. Those that look for writes do so one after the other, in the order
    in which they lined up.
    """

    def __init__(self) -> None:
        self._store = CoordinationStore()
        #: The number of the next write that was not looked at yet, or is to be announced.
        self._next = 0
        self._ahead: collections.deque[str] = collections.deque(maxlen=_MOST_AHEAD)
        #: Guards all of these; told when a search has ended.
        self._changed = threading.Condition()
        self._searches: list[object] = []

    def announce(self, path: str, gathers: bool = False) -> int:
        """Says that the first process writes `path`; returns the number of the write.

        Args:
            path: The path.
            gathers: Whether all processes are to come to it; see `wait_for_all`.
        """
        with self._changed:
            self._store.put(f"{_key(self._next)}/path", json.dumps([path, gathers]).encode())
            self._next += 1
            self._forget()
            return self._next - 1

    def _forget(self) -> None:
        """Forgets the earliest writes of which no process is to know any more."""
        folder, rest = divmod(self._next - _KEPT, _FORGOTTEN_AT_ONCE)
        if folder > 0 and rest == 0:
            self._store.remove_all(_REMEMBERED)
            self._store.put(_FIRST_REMEMBERED, str(folder * _FORGOTTEN_AT_ONCE).encode())
            self._store.remove_all(f"{_WRITES}/{folder - 1}")

    def tell(self, number: int, outcome: dict[str, Any]) -> None:
        """Says how a write ended."""
        self._store.put(f"{_key(number)}/outcome", json.dumps(outcome).encode())

    def line_up(self) -> object:
        """Returns a search, to be passed to `find` or `leave`, which later ones wait for."""
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

        None if it writes something else instead. Then its next write, whatever it is, counts as
        what it does while this process writes `path`; should it come to `path` later, that is
        passed over.
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
            has_passed = 0 in liveness.passed(begun)  # before the look at what it has announced
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
        """Returns the paths from the next write on that this process was not ahead of."""
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

    def wait_for_all(self, number: int) -> bool:
        """Waits, in the first process, until all others have come to a write.

        Returns:
            Whether they have; not if one of them has passed it, or has not come in time.
        """
        missing = set(range(1, jax.process_count()))
        begun = time.monotonic()
        with liveness.waiting("a save to which all workers come"):
            while missing:
                other = min(missing)
                if self._store.get(f"{_key(number)}/came/{other}", _SECONDS_BETWEEN_LOOKS):
                    missing.remove(other)
                elif (
                    liveness.passed(begun) & missing
                    or time.monotonic() > begun + process_group.timeout()
                ):
                    break
        self._store.put(f"{_key(number)}/all", _ALONE if missing else _TOGETHER)
        return not missing

    def come(self, path: str) -> tuple[int | None, bool]:
        """Comes, in another process, to the first one's next write to which all come.

        Searches for earlier ones end first; all writes before it are passed over.

        Args:
            path: What this process writes there.

        Returns:
            The number of that write, if the first process writes the same path; and whether all
            have come.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._searches, 2 * _PATIENCE)
        begun = time.monotonic()
        with liveness.waiting("a save to which all workers come"):
            while True:
                has_passed = 0 in liveness.passed(begun)  # before the look at what is announced
                write = self._next_gathering()
                if write is not None:
                    number = self._next
                    self._next += 1
                    self._ahead.clear()
                    self._store.put(f"{_key(number)}/came/{jax.process_index()}", b"1")
                    is_together = self._is_together(number)
                    if is_together or write.path == path:
                        return number if write.path == path else None, is_together
                elif has_passed or time.monotonic() > begun + process_group.timeout():
                    return None, False

    def _next_gathering(self) -> Announced | None:
        """Goes to the first process's next write to which all come; returns it if it is there."""
        if self._announced_at(self._next) is None:
            self._next = max(self._next, self._first_remembered())
        while (write := self._announced_at(self._next)) is not None and not write.gathers:
            self._next += 1
        return write

    def _is_together(self, number: int) -> bool:
        """Waits until the first process has said whether all have come."""
        while (told := self._store.get(f"{_key(number)}/all", 0.5)) is None:
            liveness.check()
            if number < self._first_remembered():
                return False
        return told == _TOGETHER

    def outcome(self, number: int, path: str) -> dict[str, Any] | None:
        """Waits for the end of a write, and returns how it ended; None if that is forgotten.

        Raises:
            DeadlineExceededError: It does not end.
        """
        seconds = process_group.timeout()
        deadline = time.monotonic() + seconds
        with liveness.waiting(f"waiting for the first worker to write {path}"):
            while (told := self._store.get(f"{_key(number)}/outcome", 0.5)) is None:
                liveness.check()
                if number < self._first_remembered():
                    return None
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        message=f"The first worker has begun to write {path}, and has not ended "
                        f"within {seconds:g} s. It is stuck, or has ended."
                    )
        return json.loads(told)

    def _announced_at(self, number: int) -> Announced | None:
        found = self._store.get(f"{_key(number)}/path", 0.05)
        return None if found is None else Announced(*json.loads(found))

    def _first_remembered(self) -> int:
        """Returns the number of the first write that is not forgotten, as far as that is told."""
        return int(self._store.get(_FIRST_REMEMBERED, 0.05) or 0)


def _key(number: int) -> str:
    return f"{_WRITES}/{number // _FORGOTTEN_AT_ONCE}/{number}"
