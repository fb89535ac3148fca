"""Records of a worker's state in its host's memory: variables as they lie on the devices.

For a job of as many workers and devices as the one that has written it, no value is gathered, and
each replica gets its own copy back. For a job of another number of workers, the records of all
workers are read: their parts of a value are put together, and copies that differ are combined.
Variables of which all workers have the same copies are only in the records of each host's first
worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from unison.cells import Layout, StoredForm
from unison.storage.decoding import (
    decoding,
    dtype_named,
    plain_dict,
    plain_list,
    shape_of,
    whole_number,
)
from unison.storage.memory_slots import Record
from unison.storage.npy import KINDS
from unison.train.archive import check_graph, description_of, node_of

_WHERE = "The state in the memory of its host"


class StoredParts(NamedTuple):
    """The parts of a variable's stored array on the devices of a worker.

    Attributes:
        form: The array's form.
        parts: The parts; see `own_parts`.
        are_mapped: Whether they are in a record's memory, which the next records overwrite.
    """

    form: StoredForm
    parts: list[np.ndarray]
    are_mapped: bool = False


class StoredCopies(NamedTuple):
    """All copies of a variable of which each replica has its own, on another number of replicas.

    Attributes:
        form: The form of the stored array.
        copies: The stored array, whose first axis is the replicas.
    """

    form: StoredForm
    copies: np.ndarray


class Place(NamedTuple):
    """The place of an array in a record's data.

    Attributes:
        offset: Where it begins.
        shape: Its shape.
        dtype: Its dtype.
        start: For a part of an array, the index of its first element there.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    start: tuple[int, ...] = ()


def about_record(record: Record) -> dict[str, Any]:
    """Returns what the writer of a record has told its reader.

    Raises:
        DataLossError: It is corrupt.
    """
    with decoding(_WHERE):
        found = plain_dict(record.header["about"])
        for name in ("workers", "worker", "first", "loop"):
            whole_number(found[name])
        if found["step"] != record.step:
            raise ValueError(f"expected step {record.step}, received {found['step']!r:.100}")
        found["position"]  # it is there
        return found


class RecordArchive:
    """A record, as checkpoints are read.

    Args:
        record: The record.
        of_first: The record of the same step of the host's first worker.

    Raises:
        DataLossError: It is corrupt.
    """

    def __init__(self, record: Record, of_first: Record):
        self.prefix = "in the memory of the host"
        self._data = record.data
        self._first = of_first
        with decoding(_WHERE):
            self.nodes = [node_of(node) for node in plain_list(record.header["nodes"])]
            self._arrays: dict[str, Any] = plain_dict(record.header["arrays"])
            self.arrays = {key: description_of(array) for key, array in self._arrays.items()}
            check_graph(self.nodes, self.arrays)

    def read(self, key: str) -> Any:
        """Returns an array, or the `StoredParts` of a variable, which are not copied."""
        with decoding(_WHERE):
            described, data = self._arrays[key], self._data
            if described["places"] is None:
                described, data = self._first.header["arrays"][key], self._first.data
            arrays = [array_at(data, place) for place in _places(described["places"])]
            form = _form(described["form"])
            if form is None:
                return np.array(arrays[0])
            return StoredParts(form, arrays, are_mapped=True)

    def verify(self) -> None:
        """Does nothing: the host's memory needs no checksum."""


class RegroupedArchive(RecordArchive):
    """The records of all workers of a job, as a checkpoint for another number of workers.

    Args:
        records: The records of a step, in the order of the workers.
        place: The worker whose objects this one gets: what is not a variable, as the states of
            random generators.

    Raises:
        DataLossError: A record is corrupt.
    """

    def __init__(self, records: Sequence[Record], place: int):
        super().__init__(records[place], records[place])
        self._records = records

    def read(self, key: str) -> Any:
        """Returns an array, or the `StoredCopies` of a variable."""
        with decoding(_WHERE):
            form = _form(self._arrays[key]["form"])
            if form is None:
                return super().read(key)
            array = _put_together(self._parts(key))
            return StoredCopies(form, array) if form.layout is Layout.LOCAL else array

    def _parts(self, key: str) -> Iterator[tuple[Place, np.ndarray]]:
        for record in self._records:
            for place in _places(record.header["arrays"][key]["places"] or []):
                yield place, array_at(record.data, place)


def _put_together(parts: Iterator[tuple[Place, np.ndarray]]) -> np.ndarray:
    """Returns an array of which there are parts; of equal ones, there may be several.

    Raises:
        ValueError: Elements are missing.
    """
    by_start = {place.start: part for place, part in parts}
    ends = [
        tuple(begin + size for begin, size in zip(start, part.shape, strict=True))
        for start, part in by_start.items()
    ]
    shape = tuple(map(max, zip(*ends, strict=True)))
    if sum(part.size for part in by_start.values()) != math.prod(shape):
        raise ValueError("expected all parts of a variable")
    first = next(iter(by_start.values()))
    if first.shape == shape:
        return np.array(first)
    whole = np.empty(shape, first.dtype)
    for start, part in by_start.items():
        whole[tuple(slice(b, b + size) for b, size in zip(start, part.shape, strict=True))] = part
    return whole


def _places(described: Any) -> list[Place]:
    return [
        Place(whole_number(offset), shape_of(shape), dtype_named(dtype, KINDS), shape_of(start))
        for offset, shape, dtype, start in plain_list(described)
    ]


def _form(described: Any) -> StoredForm | None:
    if described is None:
        return None
    layout, division, extreme = described
    axes = (tuple(axis) if isinstance(axis, list) else axis for axis in division)
    return StoredForm(Layout(layout), PartitionSpec(*axes), extreme)


def array_at(memory: memoryview, place: Place) -> np.ndarray:
    """Returns the array at a place in the data of a record."""
    count = int(np.prod(place.shape, dtype=np.int64))
    flat = np.frombuffer(memory, place.dtype, count, place.offset) if count else None
    return np.empty(place.shape, place.dtype) if flat is None else flat.reshape(place.shape)
