"""Workers with the same path: the first process writes it, the others wait until they see it.

Mirrored variables are complete in every process, so one process can save them while the others
continue. The first one never waits for the others: it reports its writes, and their
outcomes, in a journal that all of them see. If values have to be gathered (`ON_READ` copies, the
rows of a sharded optimizer), all processes synchronize first. If the others do not arrive, as in
`if rank == 0: model.save(path)`, a process saves its own copies.

State that is not gathered is written in parts: into one folder, which the first process has made
and publishes when all have written into it.

The processes may share a file system, or have separate ones: a process that does not find the
first one's file writes it, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from unison import errors
from unison.cells import Cell, Layout, own_copies
from unison.errors import FailedPreconditionError, OpError, UnknownError
from unison.interrupts import is_of_a_signal_handler
from unison.runtime import process_group
from unison.runtime.coordination import CoordinationStore
from unison.runtime.elastic.lifecycle import happened
from unison.storage import atomic, files
from unison.storage.file_systems import is_remote, named_errors
from unison.thread_local import ThreadLocal
from unison.train.journal import Arrival, Journal

logger = logging.getLogger("unison")

#: Seconds after which a file of the first process is assumed to be on a separate disk.
_SEEN_WITHIN = 10.0

_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_BETWEEN_REQUESTS = 0.5

#: The multiple of the seconds that a process's own part took for which it waits for the others,
#: after the timeout.
_PATIENCE = 10.0

#: Whether the thread is writing what the processes have agreed on.
_is_writing = ThreadLocal(False)

#: Whether this process has warned that it saves alone.
_has_warned = False

#: Folders that differ from those of the first process, though their names are the same.
_own_folders: set[str] = set()


class Parts(Protocol):
    """The parts that processes write together.

    Attributes:
        last: The name of the file without which readers ignore the folder.
    """

    last: str

    def check(self, path: str) -> None:
        """Raises an error if the folder cannot be at `path`."""

    def remote_folder(self, path: str) -> str:
        """Returns the new folder for the parts, in the one at a path behind fsspec."""

    def write(self, folder: str) -> None:
        """Writes this process's part into a folder."""

    def complete(self, folder: str) -> None:
        """Writes what belongs to all parts, when all are written."""

    def published(self, path: str) -> None:
        """Removes what the folder, which is at `path` now, replaces."""


class Writing:
    """A write of this process, whatever the others do.

    Attributes:
        arrival: How the processes take part, if all should.
    """

    arrival: Arrival | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the others, which have their own copies, have not arrived."""
        return self.arrival is Arrival.ALONE

    @property
    def writers(self) -> Sequence[int]:
        """The processes that write parts; see `finish_in_parts`."""
        is_together = self.arrival is Arrival.TOGETHER
        return range(jax.process_count()) if is_together else [jax.process_index()]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager in which the values to be written are read; the others hear of errors."""
        with self.failing(), own_copies() if self.is_alone else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Notifies the others of an error of the block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def finish(self, write: Callable[[], None]) -> bool:
        """Calls `write`, or waits until another process has done so.

        Returns:
            Whether this process wrote, and manages the other files of the folder.
        """
        write()
        return True

    def finish_in_parts(self, path: str, parts: Parts) -> bool:
        """Writes this process's part into a folder that appears at `path` with all parts.

        Returns:
            Whether this process manages the other files of the parent folder.

        Raises:
            FailedPreconditionError: A process does not see the first process's folder.
            UnavailableError: A process is lost.
        """
        _write_alone(path, parts)
        return True

    def fail(self, error: BaseException) -> None:
        """Notifies the others that no file will appear."""


class _Passing(Writing):
    """The other workers' part in a write of an elastic job's first worker.

    They do not wait for it: if it is lost, the previous one still exists.
    """

    def finish(self, write: Callable[[], None]) -> bool:
        return False

    def finish_in_parts(self, path: str, parts: Parts) -> bool:
        return False


def begin_writing(
    path: str, visible: str | None, cells: Sequence[Cell], in_parts: bool = False
) -> Writing:
    """Agrees with the other processes on who writes, as far as necessary.

    A write inside another write (see `finish`) needs no agreement of its own.

    Args:
        path: The path that the caller of this process has given.
        visible: The file whose existence shows the others that it is written; None if only the
            first process writes what all of them name, whether the others see it or not.
        cells: The state to be written.
        in_parts: Whether all processes take part, since each writes a part of what they have in
            common. They do so `TOGETHER` if all of them see the folder of the first one.

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
    divided = [cell for cell in spread if cell.needs_all_processes]
    takes_all = in_parts or bool(divided)
    # Writes are announced, and looked up, in the order of the program, in any thread.
    if jax.process_index() == 0:
        with contextlib.ExitStack() as stack:
            mark, error = "", None
            try:
                mark = stack.enter_context(_mark_beside(path)) if in_parts else ""
            except Exception as raised:
                error = raised
            first = _First(journal, place, visible, takes_all, mark)
            with first.failing():
                if error is not None:
                    raise error
                if takes_all:
                    first.arrival = journal.wait_for_all(first.number)
                if first.is_alone:
                    _check_own_parts(path, divided)
            return first
    if not takes_all:
        return _Later(journal, place, visible)
    folder = os.path.dirname(place)
    misses = []

    def sees(mark: str) -> bool:
        if not _sees(folder, in_parts, mark):
            misses.append(mark)
        return not misses

    number, arrival = journal.come(place, sees)
    if arrival is Arrival.FAILED and number is not None:
        _raise_failure(journal.outcome(number, place) or {}, place)
    if misses and arrival is Arrival.APART:
        _own_folders.add(folder)
        logger.warning(
            "Worker %d does not see the folder of the first worker, %s, or lacks Orbax: what the "
            "workers have in parts is gathered in each of them. Let them share the folder.",
            jax.process_index(),
            folder,
        )
    writing: Writing = Writing() if number is None else _Later(journal, place, visible, number)
    writing.arrival = arrival
    if writing.is_alone:
        _check_own_parts(path, divided, is_writer=number is None)
    return writing


def _check_own_parts(path: str, cells: Sequence[Cell], is_writer: bool = True) -> None:
    """Warns, once, that the copies are this process's alone; raises if it only has shards.

    Raises:
        FailedPreconditionError: Each process only has a shard of a variable.
    """
    global _has_warned
    shards = [cell.name for cell in cells if cell.layout is not Layout.LOCAL]
    if shards:
        raise FailedPreconditionError(
            message=f"All workers must save, and not all do: {path} is to hold {_listed(shards)}, "
            "of which each worker has a shard. Let every worker call save, with the same path or "
            "each with its own."
        )
    if is_writer and cells and not _has_warned:
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
    """A write of the first process, which is announced to the others.

    Attributes:
        number: Its number among the writes of the first process.
    """

    def __init__(self, journal: Journal, path: str, visible: str | None, gathers: bool, mark: str):
        self._journal = journal
        self._visible = visible
        self.number = journal.announce(path, gathers, mark)

    def finish(self, write: Callable[[], None]) -> bool:
        try:
            _write(write)
            visible = self._visible
            outcome = {"identity": None if visible is None else files.identity_of(visible)}
        except BaseException as error:
            self.fail(error)
            raise
        self._journal.tell(self.number, outcome)
        return True

    def finish_in_parts(self, path: str, parts: Parts) -> bool:
        self._visible = os.path.join(path, parts.last)
        return self.finish(functools.partial(self._write_parts, path, parts))

    def _write_parts(self, path: str, parts: Parts) -> None:
        if self.arrival is not Arrival.TOGETHER:
            _write_alone(path, parts)
            return
        begun = time.monotonic()
        parts.check(path)
        with _new_folder(path, parts) as folder:
            self._journal.offer(self.number, _offered(path, folder))
            parts.write(folder)
            # The others may have more to write, or share a slower disk.
            own_seconds = time.monotonic() - begun
            told = self._journal.wait_for_parts(self.number, path, _PATIENCE * own_seconds)
            for process, outcome in told.items():
                _raise_failure(outcome, path, f"Worker {process}")
            parts.complete(folder)
            happened("checkpoint")
        parts.published(path)

    def fail(self, error: BaseException) -> None:
        self._journal.tell(self.number, _failure(error))


class _Later(Writing):
    """A write of another process: it waits for the first process's write of the path.

    Args:
        number: The number of the first process's write, if it is known.
    """

    def __init__(self, journal: Journal, path: str, visible: str | None, number: int | None = None):
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
            if outcome is not None:
                _raise_failure(outcome, self._path)
                if self._visible is None or _appears(self._visible, outcome["identity"]):
                    return False
        _write(write)
        return True

    def finish_in_parts(self, path: str, parts: Parts) -> bool:
        number = self._number
        assert number is not None  # since all take part
        if self.arrival is not Arrival.TOGETHER:
            self._visible = os.path.join(path, parts.last)
            return self.finish(functools.partial(_write_alone, path, parts))
        begun = time.monotonic()
        name = self._journal.offered(number, path)
        if name is not None:
            self._write_part(number, os.path.join(os.path.dirname(self._path), name), parts)
        own_seconds = time.monotonic() - begun
        outcome = self._journal.outcome(number, path, _PATIENCE * own_seconds)
        if outcome is not None:
            _raise_failure(outcome, path)
            _appears(os.path.join(path, parts.last), outcome["identity"])
        return False

    def _write_part(self, number: int, folder: str, parts: Parts) -> None:
        """Writes this process's part, and reports how that has ended."""
        outcome = {}
        try:
            _await_folder(folder)
            with _is_writing.bound_to(True):
                parts.write(folder)
        except BaseException as error:
            outcome = _failure(error)
            raise
        finally:
            self._journal.report_part(number, outcome)

    def fail(self, error: BaseException) -> None:
        if self._search is not None:
            self._journal.leave(self._search)
        if self.arrival is Arrival.TOGETHER and self._number is not None:
            self._journal.report_part(self._number, _failure(error))


@contextlib.contextmanager
def _mark_beside(path: str) -> Iterator[str]:
    """Yields the name of a file beside a path, by which others see whether they share it."""
    with contextlib.ExitStack() as stack:
        with named_errors(path):
            mark = stack.enter_context(_mark_of(path))
        yield os.path.basename(mark)


@contextlib.contextmanager
def _mark_of(path: str) -> Iterator[str]:
    """Yields the path of a new file beside `path`."""
    if is_remote(path):
        mark = f"{path}.{secrets.token_hex(8)}.tmp"
        with atomic.replacing(mark) as file:
            file.write(b"Do the workers share this file system?\n")
        try:
            yield mark
        finally:
            files.remove(mark)
        return
    with atomic.aside(path) as new:
        with new.opened():
            pass
        yield new.path


def _sees(folder: str, in_parts: bool, mark: str) -> bool:
    """Whether this process can write a part beside the first one's mark in a folder, if any."""
    if bool(mark) != in_parts:
        return False  # the package for that is not installed in one of them
    if not mark:
        return True
    if not is_remote(folder):
        os.makedirs(folder, exist_ok=True)  # network file systems remember that it was not there
    try:
        return _comes_true(folder, lambda: files.exists(os.path.join(folder, mark)))
    except Exception as error:
        if is_of_a_signal_handler(error):
            raise
        logger.warning("Worker %d cannot look into %s: %s", jax.process_index(), folder, error)
        return False


def is_seen(path: str) -> bool:
    """Waits until this process sees a file or folder of the first one; returns whether it does."""
    return _comes_true(os.path.dirname(path), lambda: files.exists(path))


def _comes_true(folder: str, is_true: Callable[[], bool]) -> bool:
    """Waits until this process sees what the first one has done in a folder; returns whether."""
    seconds = 0 if folder in _own_folders else _SEEN_WITHIN
    pause = _SECONDS_BETWEEN_REQUESTS if is_remote(folder) else _SECONDS_BETWEEN_LOOKS
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _write_alone(path: str, parts: Parts) -> None:
    parts.check(path)
    with _new_folder(path, parts) as folder:
        parts.write(folder)
        parts.complete(folder)
        happened("checkpoint")
    parts.published(path)


def _new_folder(path: str, parts: Parts) -> contextlib.AbstractContextManager[str]:
    """Returns the context of the folder into which parts are written.

    A local one then is at `path`. Folders behind fsspec have no names that could be exchanged: in
    them, each write has a folder of its own, and the file `last` beside it says which one counts.
    """
    if is_remote(path):
        return contextlib.nullcontext(parts.remote_folder(path))
    return atomic.replacing_folder(path, parts.last)


def _offered(path: str, folder: str) -> str:
    """Returns the name of a new folder for the other processes, from beside `path`."""
    name = os.path.basename(folder)
    return f"{os.path.basename(path)}/{name}" if is_remote(path) else name


def _await_folder(folder: str) -> None:
    """Waits until this process sees the folder of the first process.

    Raises:
        FailedPreconditionError: It does not.
    """
    if is_remote(folder):
        return  # it is made by what is written into it
    if not _comes_true(folder, lambda: os.path.isdir(folder)):
        raise FailedPreconditionError(
            message=f"Worker {jax.process_index()} does not see {folder}, into which the first "
            "worker writes, though it saw another file beside it. Use a file system that shows "
            'new folders to all workers, or Checkpoint(format="archive", ...).'
        )


@functools.lru_cache(maxsize=1)
def _journal(service: int) -> Journal:
    """Returns the journal of the job that is connected to `service`."""
    del service
    return Journal()


def _write(write: Callable[[], None]) -> None:
    with _is_writing.bound_to(True):
        write()


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _appears(path: str, identity: str | None) -> bool:
    """Whether this process sees the file of the first process."""
    folder = os.path.dirname(path)
    if _comes_true(folder, lambda: files.identity_of(path) == identity):
        return True
    if folder not in _own_folders:
        _own_folders.add(folder)
        logger.info(
            "Folder %s is not that of the first worker: worker %d writes there, too.",
            folder,
            jax.process_index(),
        )
    return False


def _failure(error: BaseException) -> dict[str, Any]:
    """Returns the outcome of a write that failed, for `_raise_failure`."""
    return {"error": [type(error).__name__, str(error)]}


def _raise_failure(outcome: dict[str, Any], path: str, who: str = "The first worker") -> None:
    """Raises the error of another process's write, if it failed."""
    if "error" in outcome:
        name, message = outcome["error"]
        raise _raised_there(name, message, path, who)


def _raised_there(name: str, message: str, path: str, who: str = "The first worker") -> OpError:
    kind = getattr(errors, name, UnknownError)
    if not (isinstance(kind, type) and issubclass(kind, OpError)):
        kind = UnknownError
    return kind(message=f"{who} could not write {path}: {name}: {message}")
