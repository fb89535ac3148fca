"""Records of a worker's state in its host's memory: variables as they lie on the devices.

A record belongs to a worker of a job with the same number of workers and devices. So no value is
gathered, and each replica gets its own copy back. Variables of which all workers have the same
copies are only in the records of each host's first worker.
"""

from __future__ import annotations

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
    """

    form: StoredForm
    parts: list[np.ndarray]


class Place(NamedTuple):
    """The place of an array in a record's data."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


def about_record(record: Record) -> dict[str, Any]:
    """Returns what the writer of a record has told its reader.

    Raises:
        DataLossError: It is corrupt.
    """
    with decoding(_WHERE):
        found = plain_dict(record.header["about"])
        for name in ("workers", "worker", "loop"):
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
        """Returns an array, or the `StoredParts` of a variable."""
        with decoding(_WHERE):
            described, data = self._arrays[key], self._data
            if described["places"] is None:
                described, data = self._first.header["arrays"][key], self._first.data
            arrays = [
                np.array(
                    array_at(
                        data,
                        Place(whole_number(offset), shape_of(shape), dtype_named(dtype, KINDS)),
                    )
                )
                for offset, shape, dtype in described["places"]
            ]
            if described["form"] is None:
                return arrays[0]
            layout, division, extreme = described["form"]
            axes = (tuple(axis) if isinstance(axis, list) else axis for axis in division)
            return StoredParts(StoredForm(Layout(layout), PartitionSpec(*axes), extreme), arrays)

    def verify(self) -> None:
        """Does nothing: the host's memory needs no checksum."""


def array_at(memory: memoryview, place: Place) -> np.ndarray:
    """Returns the array at a place in the data of a record."""
    count = int(np.prod(place.shape, dtype=np.int64))
    flat = np.frombuffer(memory, place.dtype, count, place.offset) if count else None
    return np.empty(place.shape, place.dtype) if flat is None else flat.reshape(place.shape)
