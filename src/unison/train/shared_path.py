"""Workers that name one path: the first process writes it, the others wait until they see it.

Mirrored variables are whole in every process, so that one process can save them while the others
do something else. The first one never waits for the others: it says what it writes, and how that
ended, in a journal that all of them see. Where values have to be gathered (`ON_READ` copies, the
rows of a sharded optimizer), all processes come together before. If the others do not come, as in
`if rank == 0: model.save(path)`, a process saves its own copies.

The processes may see one file system, or each its own: who does not find what the first one wrote
writes it, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence

import jax

from unison import errors
from unison.cells import Cell, Layout, own_copies
from unison.errors import FailedPreconditionError, OpError, UnknownError
from unison.runtime import process_group
from unison.runtime.coordination import CoordinationStore
from unison.storage import files
from unison.storage.file_systems import is_remote
from unison.thread_local import ThreadLocal
from unison.train.journal import Journal

logger = logging.getLogger("unison")

#: Seconds after which what the first process has written is taken to be on a disk of its own.
_SEEN_WITHIN = 10.0

_SECONDS_BETWEEN_LOOKS = 0.02

#: Whether the thread writes what the processes have agreed about.
_is_writing = ThreadLocal(False)

#: Whether this process has warned that it saves alone.
_has_warned = False

#: Folders that are not those of the first process, though they have their names.
_own_folders: set[str] = set()


class Writing:
    """A write that this process does whatever the others do.

    Attributes:
        is_alone: Whether the others do not come, who have copies of their own.
    """

    is_alone = False

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the values that are to be written are read."""
        return own_copies() if self.is_alone else contextlib.nullcontext()

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
        FailedPreconditionError: The others do not save, and each has a shard of the state.
        UnavailableError: A process is lost.
    """
    if process_group.is_elastic():
        return Writing() if process_group.is_first() else _Passing()
    spread = [cell for cell in cells if cell.placement.spans_processes]
    if not spread or _is_writing.value:
        return Writing()
    place = _absolute(path)
    journal = _journal(CoordinationStore().service)
    gathered = [cell for cell in spread if cell.layout in (Layout.LOCAL, Layout.SHARDED)]
    # Writes are announced, and looked for, in the order of the program, whichever thread does them.
    writing: Writing
    if jax.process_index() == 0:
        writing = first = _First(journal, place, visible, bool(gathered))
        try:
            if gathered and not journal.wait_for_all(first.number):
                writing.is_alone = True
                _check_own_parts(path, gathered)
        except BaseException as error:
            writing.fail(error)
            raise
        return writing
    if not gathered:
        return _Later(journal, place, visible)
    number, is_together = journal.come(place)
    writing = Writing() if number is None else _Later(journal, place, visible, number)
    if not is_together:
        writing.is_alone = True
        _check_own_parts(path, gathered, is_writer=number is None)
    return writing


def _check_own_parts(path: str, cells: Sequence[Cell], is_writer: bool = True) -> None:
    """Warns, once, that the copies are those of this process alone; raises if it has only shards.

    Raises:
        FailedPreconditionError: Each process has a shard of a variable only.
    """
    global _has_warned
    shards = [cell.name for cell in cells if cell.layout is Layout.SHARDED]
    if shards:
        raise FailedPreconditionError(
            message=f"All workers must save, and not all do: {path} is to hold {_listed(shards)}, "
            "of which each worker has a shard. Let every worker call save, with the same path or "
            "each with its own."
        )
    if is_writer and not _has_warned:
        _has_warned = True
        logger.warning(
            "Worker %d saves %s alone, since the other workers do not save. It holds this worker's "
            "copies of %s, of which each worker has its own. Let all workers save, with the same "
            "path or each with its own, to have the copies combined.",
            jax.process_index(),
            path,
            _listed([cell.name for cell in cells]),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class _First(Writing):
    """The first process's write, of which the others are told from now on.

    Attributes:
        number: Its number among the writes of the first process.
    """

    def __init__(self, journal: Journal, path: str, visible: str, gathers: bool):
        self._journal = journal
        self._visible = visible
        self.number = journal.announce(path, gathers)

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

    def __init__(self, journal: Journal, path: str, visible: str, number: int | None = None):
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


@functools.lru_cache(maxsize=1)
def _journal(service: int) -> Journal:
    """Returns the journal of the job of which `service` is the connection."""
    del service
    return Journal()


def _write(write: Callable[[], None]) -> None:
    with _is_writing.bound_to(True):
        write()


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
