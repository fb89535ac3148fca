"""Records from files: the common part of all file formats.

A dataset of lines, TFRecords, or fixed-length records reads one file after another, in chunks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from unison.data.leaves import as_leaf, is_text
from unison.data.plan import AUTOTUNE, UNKNOWN, Plan, Stream, Transformation
from unison.data.sources.in_memory import Slices
from unison.data.specs import ArraySpec, Signature
from unison.data.state import State
from unison.data.structure import LEAF, Leaves
from unison.errors import InvalidArgumentError
from unison.thread_pool import ThreadPool

#: The number of bytes of a file that are read at a time.
CHUNK = 1 << 18


class Chunk(NamedTuple):
    """Consecutive records of a file.

    Attributes:
        offset: The position of the first record, in decompressed bytes.
        records: The records.
    """

    offset: int
    records: list[bytes]


class Reader(Protocol):
    """Splits a file into records."""

    def next(self) -> Chunk | None:
        """Returns the next records; None at the end."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


#: Opens a file, by its path, at the beginning of a record.
OpenReader = Callable[[str, int], Reader]


def names_of_files(filenames: Any) -> Plan:
    """Returns the plan of the names that a user has given.

    Args:
        filenames: A name, several, or a dataset of names.

    Raises:
        TypeError: They are not text.
    """
    given = os.fspath(filenames) if isinstance(filenames, os.PathLike) else filenames
    plan = getattr(given, "plan", None)
    if isinstance(plan, Plan):
        signature = plan.known_signature
        if signature is not None and [spec.dtype.kind for spec in signature.specs] != ["O"]:
            raise TypeError(
                f"Expected the names of files, as text. Received: {signature.element_spec}"
            )
        return plan
    leaf = as_leaf(given)
    if isinstance(leaf, np.ndarray) and not leaf.size:
        leaf = leaf.astype(object)
    if not is_text(leaf):
        raise TypeError(f"Expected the names of files, as text. Received: {filenames!r}")
    return Slices((np.atleast_1d(np.array(leaf, object)).ravel(),), LEAF)


class FileRecords(Transformation):
    """The records of files, as `bytes`.

    Args:
        source: The plan of the files' names.
        open_reader: Opens the reader that splits a file into records.
        cycle_length: The number of files that are read at a time, in turn, each ahead in a thread
            of its own; one record is taken from each. 1: one file after another, without threads.

    Raises:
        InvalidArgumentError: `cycle_length` is not positive.
    """

    def __init__(self, source: Plan, open_reader: OpenReader, cycle_length: int = 1):
        super().__init__(source)
        if cycle_length < 1:
            raise InvalidArgumentError(
                message="Expected num_parallel_reads to be a positive number, AUTOTUNE or None. "
                f"Received: {cycle_length}"
            )
        self._open_reader = open_reader
        self._cycle_length = cycle_length

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return Signature(LEAF, (ArraySpec((), np.dtype(object)),))

    @property
    def structure(self) -> Any:
        return LEAF

    def cardinality(self) -> int:
        return UNKNOWN

    def sample(self) -> Leaves | None:
        name = self._input.sample()
        if name is None:
            return None
        record = _OpenFile(name[0].decode(), self._open_reader).next()
        return None if record is None else (record,)

    def _stream(self) -> Stream:
        names = self._input.stream()
        if self._cycle_length == 1:
            return _FilesStream(names, self._open_reader)
        return _CycleStream(names, self._open_reader, self._cycle_length)


def cycle_length_of(num_parallel_reads: int | None) -> int:
    """Returns the number of files that are read at a time, given a user's `num_parallel_reads`."""
    if num_parallel_reads == AUTOTUNE:
        return os.cpu_count() or 1
    return 1 if num_parallel_reads is None else int(num_parallel_reads)


class _OpenFile:
    """A file that is being read.

    Args:
        name: Its path.
        open_reader: Opens the reader that splits it into records.
        offset: The position at which to begin, in decompressed bytes.
        position: The number of records to skip from there.
        pool: Threads in which a chunk is read ahead; None to read it when it is requested.
    """

    def __init__(
        self,
        name: str,
        open_reader: OpenReader,
        offset: int = 0,
        position: int = 0,
        pool: ThreadPool | None = None,
    ):
        self.name = name
        self._reading = _Reading(name, open_reader, offset)
        self._pool = pool
        self._ahead = None if pool is None else pool.submit(self._reading.next)
        self._chunk = Chunk(offset, [])
        self._position = 0
        while position and (passed := len(self.take(position))):
            position -= passed

    @property
    def ready(self) -> int:
        """The number of records that are buffered."""
        return len(self._chunk.records) - self._position

    def next(self) -> bytes | None:
        """Returns the next record; None at the end."""
        if self._position >= len(self._chunk.records) and not self._has_next_chunk():
            return None
        self._position += 1
        return self._chunk.records[self._position - 1]

    def take(self, count: int) -> list[bytes]:
        """Returns at most `count` of the next records of one chunk; an empty list at the end."""
        if self._position >= len(self._chunk.records) and not self._has_next_chunk():
            return []
        records = self._chunk.records[self._position : self._position + count]
        self._position += len(records)
        return records

    def state(self) -> State:
        return {"name": self.name, "offset": self._chunk.offset, "position": self._position}

    def _has_next_chunk(self) -> bool:
        if self._pool is None or self._ahead is None:
            chunk = self._reading.next()
        else:
            chunk = self._ahead.result()
            self._ahead = self._pool.submit(self._reading.next)
        if chunk is None:
            return False
        self._chunk = chunk
        self._position = 0
        return True


class _Reading:
    """The chunks of a file, which is opened when the first one is requested, and closed at the
    end.
    """

    def __init__(self, name: str, open_reader: OpenReader, offset: int):
        self._open: Callable[[], Reader] | None = lambda: open_reader(name, offset)
        self._reader: Reader | None = None

    def next(self) -> Chunk | None:
        """Returns the next chunk; None at the end or after an error, also in further calls."""
        if self._open is not None:
            open_reader, self._open = self._open, None
            self._reader = open_reader()
        reader, self._reader = self._reader, None
        if reader is None:
            return None
        chunk = None
        try:
            chunk = reader.next()
        finally:
            if chunk is None:
                reader.close()
            else:
                self._reader = reader
        return chunk


class _FilesStream(Stream):
    """One file after another. After an error, it continues with the next file."""

    def __init__(self, names: Stream, open_reader: OpenReader):
        self._names = names
        self._open_reader = open_reader
        self._file: _OpenFile | None = None

    def state(self) -> State:
        file = None if self._file is None else self._file.state()
        return {"names": self._names.state(), "file": file}

    def restore(self, state: State) -> None:
        self._names.restore(state["names"])
        file = state["file"]
        self._file = None if file is None else _OpenFile(open_reader=self._open_reader, **file)

    def next(self) -> Leaves | None:
        while (file := self._current()) is not None:
            record = file.next()
            if record is not None:
                return (record,)
            self._file = None
        return None

    def next_block(self, count: int) -> Leaves | None:
        records: list[bytes] = []
        while len(records) < count and (file := self._current()) is not None:
            taken = file.take(count - len(records))
            records += taken
            if not taken:
                self._file = None
        return (as_column(records),) if records else None

    def skip(self, count: int) -> int:
        missing = count
        while missing and (file := self._current()) is not None:
            taken = len(file.take(missing))
            missing -= taken
            if not taken:
                self._file = None
        return count - missing

    def _current(self) -> _OpenFile | None:
        """Returns the file being read, or the next one; None after the last one."""
        if self._file is None:
            name = self._names.next()
            if name is not None:
                self._file = _OpenFile(name[0].decode(), self._open_reader)
        return self._file


class _CycleStream(Stream):
    """A record of each of several files in turn; when a file ends, the next file replaces it.

    The order is that of `Interleave`; here, files are opened and read ahead before their turn.
    """

    def __init__(self, names: Stream, open_reader: OpenReader, cycle_length: int):
        self._names = names
        self._open_reader = open_reader
        self._pool = ThreadPool(cycle_length, "unison-data-files")
        self._cycle: list[_OpenFile | None] = [None] * cycle_length
        self._place = 0
        self._has_begun = False
        self._has_ended = False

    def state(self) -> State:
        return {
            "names": self._names.state(),
            "cycle": [file and file.state() for file in self._cycle],
            "place": self._place,
            "has_begun": self._has_begun,
            "has_ended": self._has_ended,
        }

    def restore(self, state: State) -> None:
        self._names.restore(state["names"])
        self._cycle = [
            file and _OpenFile(open_reader=self._open_reader, pool=self._pool, **file)
            for file in state["cycle"]
        ]
        self._place = state["place"]
        self._has_begun = state["has_begun"]
        self._has_ended = state["has_ended"]

    def next(self) -> Leaves | None:
        record = self._next()
        return None if record is None else (record,)

    def next_block(self, count: int) -> Leaves | None:
        records: list[bytes] = []
        while len(records) < count:
            rounds = self._rounds(count - len(records))
            if rounds:
                of_files = [file.take(rounds) for file in self._cycle if file is not None]
                records += itertools.chain.from_iterable(zip(*of_files, strict=True))
            elif (record := self._next()) is not None:
                records.append(record)
            else:
                break
        return (as_column(records),) if records else None

    def _rounds(self, count: int) -> int:
        """Returns the number of records, up to `count`, that every file has without reading."""
        if self._place:
            return 0
        ready = min(0 if file is None else file.ready for file in self._cycle)
        return min(ready, count // len(self._cycle))

    def _next(self) -> bytes | None:
        if not self._has_begun:
            self._has_begun = True
            self._cycle = [self._next_file() for _ in self._cycle]
        while not self._has_ended or any(self._cycle):
            file = self._cycle[self._place]
            if file is None and not self._has_ended:
                file = self._cycle[self._place] = self._next_file()
            try:
                record = None if file is None else file.next()
            except BaseException:
                self._cycle[self._place] = None
                raise
            if record is None:
                self._cycle[self._place] = None
            self._place = (self._place + 1) % len(self._cycle)
            if record is not None:
                return record
        return None

    def _next_file(self) -> _OpenFile | None:
        name = None if self._has_ended else self._names.next()
        if name is None:
            self._has_ended = True
            return None
        return _OpenFile(name[0].decode(), self._open_reader, pool=self._pool)


def as_column(records: list[bytes]) -> np.ndarray:
    """Returns an array of records."""
    column = np.empty(len(records), object)
    column[:] = records
    return column
