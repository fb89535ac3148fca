"""Workers that name one path: the first process writes it, the others wait until they see it.

Mirrored variables are whole in every process, so that one process can save them while the others
do something else. The first one never waits for the others: it says what it writes, and how that
ended, in a journal that all of them see. Where values have to be gathered (`ON_READ` copies, the
rows of a sharded optimizer), all processes come together before.

The processes may see one file system, or each its own: who does not find what the first one wrote
writes it, too.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from unison import errors
from unison.cells import Cell, Layout
from unison.errors import DeadlineExceededError, OpError, UnavailableError, UnknownError
from unison.runtime import liveness, process_group
from unison.runtime.coordination import CoordinationStore
from unison.storage import files
from unison.storage.file_systems import is_remote

logger = logging.getLogger("unison")

#: Seconds after which what the first process has written is taken to be on a disk of its own.
_SEEN_WITHIN = 10.0

_SECONDS_BETWEEN_LOOKS = 0.02

#: Seconds that another process waits for the first one to begin.
_PATIENCE = 60.0

#: How many paths are remembered that this process wrote before the first one came to them.
_MOST_AHEAD = 64

#: How many writes of the first process are remembered at least, and how many are forgotten at once.
_KEPT = 1024
_FORGOTTEN_AT_ONCE = 64

#: Where the writes are in the coordination service, and the number of the first one there.
_WRITES = "unison/writes"
_REMEMBERED = "unison/remembered writes"
_FIRST_REMEMBERED = f"{_REMEMBERED}/first"

#: Of the thread, `a_write`: whether it writes what the processes have agreed about.
_inside = threading.local()

#: Folders that are not those of the first process, though they have their names.
_own_folders: set[str] = set()


class Writing:
    """A write that this process does whatever the others do."""

    def finish(self, write: Callable[[], None]) -> bool:
        """Calls `write`, or waits until another process has done so.

        Returns:
            Whether this process wrote, and takes care of what else is in the folder.
        """
        write()
        return True

    def fail(self, error: BaseException) -> None:
        """Tells the others that there will be nothing to see."""


class _Passing(Writing):
    """What others do of a write that the first worker of an elastic job does.

    Nobody waits for it: should it be lost on the way, the write before is still there.
    """

    def finish(self, write: Callable[[], None]) -> bool:
        return False


def begin_writing(path: str, visible: str, cells: Sequence[Cell]) -> Writing:
    """Agrees with the other processes about who writes, as far as that is necessary.

    What is written inside another write (see `finish`) needs no agreement of its own.

    Args:
        path: What the caller of this process has named.
        visible: The file by which the others see that it is there.
        cells: The state that is to be written.

    Raises:
        DeadlineExceededError: The state has to be gathered, and a process has not come.
        UnavailableError: The same, and a process has ended.
    """
    if process_group.is_elastic():
        return Writing() if process_group.is_first() else _Passing()
    spread = [cell for cell in cells if cell.placement.spans_processes]
    if not spread or getattr(_inside, "a_write", False):
        return Writing()
    place = _absolute(path)
    journal = _journal(CoordinationStore().service)
    gathered = [cell.name for cell in spread if cell.layout in (Layout.LOCAL, Layout.SHARDED)]
    # Writes are announced, and looked for, in the order of the program, whichever thread does them.
    if jax.process_index() == 0:
        writing = _First(journal, place, visible)
        if gathered:
            try:
                _come_together([place, writing.number], place, gathered)
            except BaseException as error:
                writing.fail(error)
                raise
        return writing
    if not gathered:
        return _Later(journal, place, visible)
    first_place, number = _come_together([place, None], place, gathered)[0]
    journal.jump_behind(number)
    return _Later(journal, place, visible, number) if first_place == place else Writing()


def _come_together(own: list[Any], path: str, gathered: Sequence[str]) -> list[Any]:
    try:
        return process_group.all_gather_json(own, "Saving what all hold together")
    except (DeadlineExceededError, UnavailableError) as error:
        shown = ", ".join(gathered[:3]) + (", ..." if len(gathered) > 3 else "")
        raise type(error)(
            message=f"All workers must save, and not all have come to do so: {path} is to hold "
            f"{shown}, of which each worker has a part. Let every worker call save, with the same "
            f"path or each with its own. {error}"
        ) from error


class _First(Writing):
    """The first process's write, of which the others are told from now on.

    Attributes:
        number: Its number among the writes of the first process.
    """

    def __init__(self, journal: _Journal, path: str, visible: str):
        self._journal = journal
        self._visible = visible
        self.number = journal.announce(path)

    def finish(self, write: Callable[[], None]) -> bool:
        try:
            _write(write)
            outcome = {"identity": files.identity_of(self._visible)}
        except BaseException as error:
            self.fail(error)
            raise
        self._journal.tell(self.number, outcome)
        return True

    def fail(self, error: BaseException) -> None:
        self._journal.tell(self.number, {"error": [type(error).__name__, str(error)]})


class _Later(Writing):
    """The write of another process: of the first one's path, it waits for that.

    Args:
        number: The number of the first one's write, if that is known.
    """

    def __init__(self, journal: _Journal, path: str, visible: str, number: int | None = None):
        self._journal = journal
        self._path = path
        self._visible = visible
        self._number = number
        self._search = None if number is not None else journal.line_up()

    def finish(self, write: Callable[[], None]) -> bool:
        number = self._number
        if self._search is not None:
            number = self._journal.find(self._path, self._search)
        if number is not None:
            outcome = self._journal.outcome(number, self._path)
            if outcome is not None and "error" in outcome:
                name, message = outcome["error"]
                raise _raised_there(name, message, self._path)
            if outcome is not None and _appears(self._visible, outcome["identity"]):
                return False
        _write(write)
        return True

    def fail(self, error: BaseException) -> None:
        if self._search is not None:
            self._journal.leave(self._search)


class _Journal:
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

    def announce(self, path: str) -> int:
        """Says that the first process writes `path`; returns the number of the write."""
        with self._changed:
            self._store.put(f"{_key(self._next)}/path", json.dumps(path).encode())
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
        deadline = time.monotonic() + _PATIENCE
        while True:
            announced = self._announced()
            if path in announced:
                self._next += announced.index(path) + 1
                return self._next - 1
            if announced:
                self._next += 1
                self._ahead.append(path)
                return None
            if time.monotonic() > deadline:
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
        if self._path_of(self._next) is None:
            self._next = max(self._next, self._first_remembered())
        while (path := self._path_of(self._next + len(announced))) is not None:
            if not announced and path in self._ahead:
                self._ahead.remove(path)
                self._next += 1
            else:
                announced.append(path)
        return announced

    def jump_behind(self, number: int) -> None:
        """Passes over all writes up to one at which the processes have come together.

        Searches for earlier ones end first.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._searches, 2 * _PATIENCE)
            self._next = max(self._next, number + 1)
            self._ahead.clear()

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

    def _path_of(self, number: int) -> str | None:
        found = self._store.get(f"{_key(number)}/path", 0.05)
        return None if found is None else json.loads(found)

    def _first_remembered(self) -> int:
        """Returns the number of the first write that is not forgotten, as far as that is told."""
        return int(self._store.get(_FIRST_REMEMBERED, 0.05) or 0)


def _key(number: int) -> str:
    return f"{_WRITES}/{number // _FORGOTTEN_AT_ONCE}/{number}"


@functools.lru_cache(maxsize=1)
def _journal(service: int) -> _Journal:
    """Returns the journal of the job of which `service` is the connection."""
    del service
    return _Journal()


def _write(write: Callable[[], None]) -> None:
    _inside.a_write = True
    try:
        write()
    finally:
        _inside.a_write = False


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _appears(path: str, identity: str | None) -> bool:
    """Whether this process sees the file that the first one has written."""
    folder = os.path.dirname(path)
    deadline = time.monotonic() + (0 if folder in _own_folders else _SEEN_WITHIN)
    while files.identity_of(path) != identity:
        if time.monotonic() > deadline:
            if folder not in _own_folders:
                _own_folders.add(folder)
                logger.info(
                    "Folder %s is not that of the first worker: worker %d writes there, too.",
                    folder,
                    jax.process_index(),
                )
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True


def _raised_there(name: str, message: str, path: str) -> OpError:
    kind = getattr(errors, name, UnknownError)
    if not (isinstance(kind, type) and issubclass(kind, OpError)):
        kind = UnknownError
    return kind(message=f"The first worker could not write {path}: {name}: {message}")
