r"""A pair of slots in the host's memory that outlives the processes that write them.

Each slot is an anonymous file in memory (`memfd_create`), which exists as long as a process has it
open. The process that creates a pair lets another one open it as well, which writes
records: the older slot is overwritten while the newer one stays complete. So however the writer
ends, there is a complete record, and nothing is left when all processes have ended.

A slot begins with a page that describes the record; data and a line of JSON, the header, follow:

    UNISONMS  step  bytes of data  bytes of header  CRC-32 of these, and of the header
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from unison.errors import ResourceExhaustedError, UnimplementedError
from unison.storage.decoding import decoding, parsed_json
from unison.storage.memory_left import memory_in_words, memory_left

_MAGIC = b"UNISONMS"
_FIELDS = struct.Struct("<8sqqqI")
_BEFORE_CHECKSUM = _FIELDS.size - 4

#: The data's place in a slot.
_PAGE = 4096

#: In the first slot's page: the latest step that is known to be elsewhere, too, plus one.
_COPIED = struct.Struct("<q")
_COPIED_AT = 1024


class Record(NamedTuple):
    """A complete record.

    Attributes:
        step: Its number; a later record has a greater one.
        header: Its description, as parsed from JSON.
        data: Its data, in the slot's memory: the next records overwrite it.
    """

    step: int
    header: Any
    data: memoryview


class MemorySlots:
    """A pair of slots.

    Args:
        descriptors: The file descriptors of both.

    Examples:
        >>> slots = MemorySlots.create("example")
        >>> slots.begin(5)[:] = b"state"
        >>> slots.commit(step=7, header={"of": "worker 0"})
        >>> with slots.records() as records:
        ...     {record.step: bytes(record.data) for record in records}
        {7: b'state'}
        >>> slots.close()
    """

    def __init__(self, descriptors: tuple[int, int]):
        self.descriptors = descriptors
        #: The slot that is being written, its data's size, and its mapping.
        self._writing: tuple[int, int] | None = None
        self._mapped: dict[int, mmap.mmap] = {}

    @classmethod
    def create(cls, name: str) -> MemorySlots:
        """Returns new, empty slots.

        Args:
            name: What they are for, shown in `/proc/PID/fd`.

        Raises:
            UnimplementedError: The system has no anonymous files in memory.
        """
        if not hasattr(os, "memfd_create"):
            raise UnimplementedError(
                message="Records in memory that outlives a process need Linux (memfd_create)."
            )
        first, second = (os.memfd_create(f"unison {name}") for _ in range(2))
        return cls((first, second))

    def allocate(self, size: int) -> None:
        """Allocates memory for records of so many bytes of data, so that `begin` need not.

        Args:
            size: The bytes of the data.

        Raises:
            ResourceExhaustedError: The host has no more memory.
        """
        for descriptor in self.descriptors:
            _allocate(descriptor, _PAGE + size)

    @property
    def capacity(self) -> int:
        """The bytes of data for which both slots have memory."""
        sizes = [os.fstat(descriptor).st_size for descriptor in self.descriptors]
        return max(0, min(sizes) - _PAGE)

    def begin(self, size: int, keep: int | None = None) -> memoryview:
        """Returns the memory for the data of the next record, which replaces the older one.

        Args:
            size: The bytes of the data.
            keep: The step of a record that is not replaced, even if it is the older one.

        Raises:
            ResourceExhaustedError: The host has no more memory.
        """
        slot = self._replaced(keep)
        os.pwrite(self.descriptors[slot], bytes(_FIELDS.size), 0)
        return self._memory(slot, size)

    def extend(self, size: int) -> memoryview:
        """Returns the memory of the record that has begun, which gets more data after what it has.

        Args:
            size: The bytes of all of the data.

        Raises:
            ResourceExhaustedError: The host has no more memory.
        """
        assert self._writing is not None, "begin() comes first"
        return self._memory(self._writing[0], size)

    def _memory(self, slot: int, size: int) -> memoryview:
        mapped = self._mapped.get(slot)
        if mapped is None or len(mapped) < _PAGE + size:
            descriptor = self.descriptors[slot]
            _allocate(descriptor, _PAGE + size)
            mapped = self._mapped[slot] = mmap.mmap(descriptor, _PAGE + size)
        self._writing = slot, size
        return memoryview(mapped)[_PAGE : _PAGE + size]

    def commit(self, step: int, header: Any) -> None:
        """Completes the record whose data has been written.

        Args:
            step: Its number.
            header: Its description, which JSON can express.
        """
        assert self._writing is not None, "begin() comes first"
        slot, size = self._writing
        descriptor = self.descriptors[slot]
        line = json.dumps(header).encode()
        os.pwrite(descriptor, line, _PAGE + size)
        fields = _FIELDS.pack(_MAGIC, step, size, len(line), 0)[:_BEFORE_CHECKSUM]
        checksum = zlib.crc32(line, zlib.crc32(fields))
        os.pwrite(descriptor, fields + checksum.to_bytes(4, "little"), 0)
        self._writing = None

    @contextlib.contextmanager
    def records(self) -> Iterator[list[Record]]:
        """Yields the complete records, the newest first; their data is mapped inside only.

        Raises:
            DataLossError: The header of one is corrupt.
        """
        with contextlib.ExitStack() as mapped:
            found = [_record(descriptor, mapped) for descriptor in self.descriptors]
            yield sorted(
                (record for record in found if record is not None),
                key=lambda record: record.step,
                reverse=True,
            )

    def steps(self) -> list[int]:
        """Returns the steps of the complete records, the newest first."""
        found = map(_step, self.descriptors)
        return sorted((step for step in found if step is not None), reverse=True)

    @property
    def copied(self) -> int:
        """The latest step whose record is known to be elsewhere, too; -1: none is."""
        found = os.pread(self.descriptors[0], _COPIED.size, _COPIED_AT)
        return _COPIED.unpack(found)[0] - 1 if len(found) == _COPIED.size else -1

    def mark_copied(self, step: int) -> None:
        """Notes that the record of a step is elsewhere, too."""
        os.pwrite(self.descriptors[0], _COPIED.pack(step + 1), _COPIED_AT)

    def discard_after(self, step: int) -> None:
        """Discards the records of later steps; -1: all."""
        self.mark_copied(min(self.copied, step))
        for descriptor in self.descriptors:
            found = _step(descriptor)
            if found is not None and found > step:
                os.pwrite(descriptor, bytes(_FIELDS.size), 0)

    def close(self) -> None:
        """Closes the slots; the memory is freed when all processes have closed them."""
        for mapped in self._mapped.values():
            with contextlib.suppress(BufferError):  # arrays in it still exist
                mapped.close()
        self._mapped.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def _replaced(self, keep: int | None) -> int:
        steps = [-1 if found is None else found for found in map(_step, self.descriptors)]
        older = steps.index(min(steps))
        return 1 - older if keep is not None and steps[older] == keep else older


def _allocate(descriptor: int, size: int) -> None:
    """Makes the system provide the memory: a write to what it has not would end the process."""
    before = os.fstat(descriptor).st_size
    if size <= before:
        return
    left = memory_left()
    if left is not None and size - before > left[0]:
        # The system would end processes to provide it.
        raise ResourceExhaustedError(
            message=f"Expected {size - before:,} bytes of the host's memory. {memory_in_words()}"
        )
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise ResourceExhaustedError(
            message=f"Expected {size:,} bytes of the host's memory: {error}"
        ) from error


def _described(descriptor: int) -> tuple[int, int, bytes] | None:
    """Returns the step, the bytes of data and the header of a slot; None if it is incomplete."""
    page = os.pread(descriptor, _FIELDS.size, 0)
    if len(page) < _FIELDS.size:
        return None
    magic, step, size, length, checksum = _FIELDS.unpack(page)
    end = os.fstat(descriptor).st_size
    if magic != _MAGIC or size < 0 or length < 0 or _PAGE + size + length > end:
        return None
    line = os.pread(descriptor, length, _PAGE + size)
    if zlib.crc32(line, zlib.crc32(page[:_BEFORE_CHECKSUM])) != checksum:
        return None
    return step, size, line


def _release(release: Callable[[], None]) -> None:
    """Releases a view, unless an array in it still exists: in the frames of an error."""
    with contextlib.suppress(BufferError):
        release()


def _step(descriptor: int) -> int | None:
    described = _described(descriptor)
    return None if described is None else described[0]


def _record(descriptor: int, mapped: contextlib.ExitStack) -> Record | None:
    described = _described(descriptor)
    if described is None:
        return None
    step, size, line = described
    memory = mmap.mmap(descriptor, _PAGE + size, prot=mmap.PROT_READ)
    whole = memoryview(memory)
    data = whole[_PAGE:]
    for release in (memory.close, whole.release, data.release):
        mapped.callback(_release, release)
    with decoding("A record in the host's memory"):
        return Record(step, parsed_json(line), data)
