"""Copies of variables' current values, made while the program continues.

A thread copies one variable after another. Before a program overwrites a variable that
the thread has not copied yet, it copies the variable itself (`Cell.copy_later`); so it waits
for what it overwrites and for nothing else, and the values are those of one instant.

Accelerators copy all values to pinned host memory themselves, beside the programs that follow: no
program waits. The thread copies them from there. For as long as the snapshot takes, it needs as
much pinned memory as the values have bytes.

The copies can reuse the memory of the last snapshot: writing into memory that the process does
not have yet takes several times as long (measured for 1 GB: 0.35 s, and 0.05 s).
"""

from __future__ import annotations

import functools
import logging
import math
import mmap
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from unison.cells import Cell, Layout, own_parts
from unison.runtime.transfers import shards_of
from unison.train.chunk_plan import Region, own_regions

logger = logging.getLogger("unison")

#: The layouts of which each process has all data.
WHOLE = (Layout.MIRRORED, Layout.STREAM)

_PINNED = "pinned_host"

#: The number of bytes from which on NumPy requests huge pages.
_LARGE = 1 << 22


class _Copies:
    """The copies of cells' values that are still to be made."""

    def __init__(self) -> None:
        self._pending: list[_Copy] = []

    def _copy_later(
        self,
        cell: Cell,
        source: jax.Array,
        copy: Callable[[jax.Array], None],
        is_sent: bool = True,
    ) -> None:
        """Has `copy` called with `source`; if `is_sent`, an accelerator sends it to the host."""
        sent = _sent_to_host(source) if is_sent and not cell.placement.is_host else None
        source = source if sent is None else sent
        pending = _Copy(source, functools.partial(copy, source))
        if sent is None:
            cell.copy_later(pending)
        self._pending.append(pending)

    def finish(self) -> float:
        """Copies what has not been copied yet.

        Returns:
            The seconds that copies have taken in other threads, before programs overwrote their
            source.

        Raises:
            jax.errors.JaxRuntimeError: The program that computes a value has failed.
        """
        pending, self._pending = self._pending, []
        for copy in pending:
            copy()
        for copy in pending:
            copy.check()
        own = threading.get_ident()
        return sum(copy.seconds for copy in pending if copy.thread != own)

    def forget(self) -> None:
        """Drops the values that have not been copied, and are no longer needed."""
        for copy in self._pending:
            copy.forget()
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drops them if the block has raised an error."""
        if kind is not None:
            self.forget()


class Snapshot(_Copies):
    """The values of cells at one instant, as seen outside the replicas.

    Args:
        copies: The copies of the last snapshot, by cell. They are overwritten, and those of
            cells that are not in this snapshot are removed.
    """

    def __init__(self, copies: MutableMapping[Cell, list[np.ndarray]]):
        super().__init__()
        self._last = dict(copies)
        self._copies = copies
        self._copies.clear()

    def value_of(self, cell: Cell) -> np.ndarray:
        """Returns the array that holds the value of a cell once `finish` has returned.

        Raises:
            ValueError: The copies are `ON_READ` and have no aggregation.
            RuntimeError: A program that failed, or is still running, took the value.
        """
        if cell.needs_all_processes or type(cell) is not Cell:
            return cell.numpy()  # which needs the other processes, which all take part now
        cell.require_common_value()
        stored, aval = cell.stored(), cell.aval
        (value,) = self._memory_for(cell, [aval.shape], aval.dtype)
        is_local = cell.layout is Layout.LOCAL
        source = stored if is_local or cell.is_divided else stored.addressable_data(0)
        copy = functools.partial(_copy_whole, cell, value)
        self._copy_later(cell, source, copy, is_sent=not is_local)
        return value

    def regions_of(self, cell: Cell, regions: Sequence[Region]) -> list[np.ndarray]:
        """Returns arrays that hold regions of a cell's array once `finish` has returned.

        Args:
            cell: A cell of equal copies, or of one that is divided over the devices.
            regions: The regions; each is inside the part of one of this process's devices.

        Raises:
            RuntimeError: A program that failed, or is still running, took the value.
        """
        stored = cell.stored()
        shapes = [tuple(end - begin for begin, end in region) for region in regions]
        copies = self._memory_for(cell, shapes, np.dtype(stored.dtype))
        parts = own_regions(stored)
        wanted: dict[Region, list[tuple[Region, np.ndarray]]] = {}
        for region, copy in zip(regions, copies, strict=True):
            around = next(part for part in parts if _is_inside(region, part))
            wanted.setdefault(around, []).append((region, copy))
        if wanted and cell.placement.is_host:
            self._copy_later(cell, stored, functools.partial(_copy_regions, wanted))
        elif wanted:
            # Each alone: other processes send other parts, and no copy of the same part is sent.
            for around, pairs in wanted.items():
                copy_pairs = functools.partial(_copy_from, around, pairs)
                self._copy_later(cell, parts[around], copy_pairs)
        return copies

    def _memory_for(
        self, cell: Cell, shapes: Sequence[tuple[int, ...]], dtype: np.dtype
    ) -> list[np.ndarray]:
        """Returns arrays for the copies of a cell: those of the last snapshot, if they fit."""
        copies = self._last.get(cell, [])
        if [(copy.shape, copy.dtype) for copy in copies] != [(shape, dtype) for shape in shapes]:
            copies = [_new_array(shape, dtype) for shape in shapes]
        self._copies[cell] = copies
        return copies


class PartsSnapshot(_Copies):
    """The stored arrays of cells at one instant, as they lie on this process's devices."""

    def add(self, cell: Cell, parts: Sequence[np.ndarray]) -> None:
        """Copies the parts of a cell's array into `parts` until `finish` has returned.

        Args:
            cell: The cell.
            parts: An array for each of its `own_parts`.
        """
        self._copy_later(cell, cell.stored(), functools.partial(_copy_parts, parts))


class _Copy:
    """The copy of one value, made once, by the first thread that needs it; others wait for it."""

    def __init__(self, source: jax.Array, work: Callable[[], None]):
        self._pending: tuple[jax.Array, Callable[[], None]] | None = (source, work)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        #: Its duration, and the thread in which it was made.
        self.seconds = 0.0
        self.thread = 0

    def __call__(self) -> None:
        with self._lock:
            if self._pending is None:
                return
            source, work = self._pending
            begun = time.perf_counter()
            try:
                source.block_until_ready()
                begun = time.perf_counter()  # without what the program takes that computes it
                work()
            except Exception as error:  # of that program; `check` raises it
                self._error = error
            self._pending = None
            self.seconds = time.perf_counter() - begun
            self.thread = threading.get_ident()

    def forget(self) -> None:
        with self._lock:
            self._pending = None

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def _sent_to_host(source: jax.Array) -> jax.Array | None:
    """Lets an accelerator copy an array to pinned host memory, and returns it there.

    Returns:
        The array there; None where that is not possible.
    """
    devices: Any = source.sharding.addressable_devices  # which has no types
    device, *_ = devices
    kinds = {memory.kind for memory in device.addressable_memories()}
    # An array that is there already would not be copied.
    if _PINNED not in kinds or source.sharding.memory_kind == _PINNED:
        return None
    try:
        return jax.device_put(source, source.sharding.with_memory_kind(_PINNED))
    except jax.errors.JaxRuntimeError:  # no more memory can be pinned
        logger.debug("A value is not copied to pinned host memory.", exc_info=True)
        return None


def _copy_whole(cell: Cell, value: np.ndarray, source: jax.Array) -> None:
    if cell.layout is Layout.LOCAL:
        value[...] = cell.combine(source)
    elif cell.is_divided:
        for shard in shards_of(source):
            value[shard.index] = _host_view(shard.data)
    else:
        value[...] = _host_view(source)


def _copy_regions(
    wanted: Mapping[Region, Sequence[tuple[Region, np.ndarray]]], source: jax.Array
) -> None:
    parts = own_regions(source)  # only now: who holds a part keeps programs from taking the array
    for around, pairs in wanted.items():
        _copy_from(around, pairs, parts[around])


def _copy_from(
    around: Region, pairs: Sequence[tuple[Region, np.ndarray]], source: jax.Array
) -> None:
    """Copies regions of the part of a device, which is the region `around`."""
    view = _host_view(source)
    for region, copy in pairs:
        index = (
            slice(begin - first, end - first)
            for (begin, end), (first, _) in zip(region, around, strict=True)
        )
        copy[...] = view[tuple(index)]


def _is_inside(region: Region, other: Region) -> bool:
    return all(
        first <= begin and end <= last
        for (begin, end), (first, last) in zip(region, other, strict=True)
    )


def _copy_parts(parts: Sequence[np.ndarray], source: jax.Array) -> None:
    for part, data in zip(parts, own_parts(source), strict=True):
        part[...] = _host_view(data)


def _new_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array.

    NumPy requests huge pages, which can take five times as long in a virtual machine.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype, count).reshape(shape)


def _host_view(array: jax.Array) -> np.ndarray:
    """Returns the values of an array of one device, without a copy if they are in host memory.

    `np.asarray` would keep a reference to the buffer, so that a program that overwrites it would
    first copy it.
    """
    array.block_until_ready()
    exporting: Any = array  # JAX's method does not name the argument that NumPy does not pass
    try:
        return np.from_dlpack(exporting)
    except (BufferError, TypeError, RuntimeError, ValueError):  # another memory, or bfloat16, ...
        return np.asarray(array)
