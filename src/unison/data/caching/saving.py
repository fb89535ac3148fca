"""`save`, `load` and `snapshot`: a dataset's elements in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unison.data.caching.cache import KeepingStream, KeepsElements, as_block, read_some
from unison.data.caching.column_files import codec_of
from unison.data.caching.dataset_files import DatasetWriter, KeptDataset, read_dataset
from unison.data.functions import ElementFunction
from unison.data.leaves import count_rows
from unison.data.plan import INFINITE, Plan, Stream, position_of, stream_at
from unison.data.sources.in_memory import Elements
from unison.data.specs import DatasetSpec, Signature
from unison.data.state import State
from unison.data.structure import LEAF, Leaves, Structure
from unison.errors import InvalidArgumentError, NotFoundError


def save(
    plan: Plan, folder: str, compression: str | None, shard_function: ElementFunction | None
) -> None:
    """Writes the elements of a plan to a folder, and replaces the existing ones.

    Args:
        plan: The plan.
        folder: The folder; it may be remote (fsspec).
        compression: None, "GZIP" or "SNAPPY".
        shard_function: The number of an element's shard; None for one shard.

    Raises:
        InvalidArgumentError: The plan never ends.
    """
    if plan.cardinality() == INFINITE:
        raise InvalidArgumentError(
            message="An endless dataset cannot be saved: take(count) of it. Received: a dataset of "
            f"{plan.description}"
        )
    writer = DatasetWriter(folder, compression)
    keeper = writer if shard_function is None else _Sharding(writer, shard_function, plan)
    stream = plan.stream()
    try:
        while (block := read_some(stream, plan.known_signature)) is not None:
            keeper.add(block)
        writer.publish(plan, replaces=True)
    finally:
        writer.discard()


def load(folder: str, expected: Signature | None) -> KeptDataset:
    """Returns the dataset in a folder.

    Args:
        folder: The folder.
        expected: The expected signature of its elements; None for the stored one.

    Raises:
        NotFoundError: The folder has no dataset.
        InvalidArgumentError: The elements have another signature.
        DataLossError: Its files are corrupt.
    """
    kept = read_dataset(folder, expected)
    if kept is None:
        raise NotFoundError(
            message=f"There is no dataset in {folder}: it has no dataset.json. A dataset is there "
            "when save has returned."
        )
    return kept


def datasets_of(plans: Sequence[Plan]) -> Plan:
    """Returns the plan of elements that are themselves datasets."""
    signature = Signature(LEAF, (DatasetSpec(plans[0]),))
    return Elements([(plan,) for plan in plans], signature)


class Snapshot(KeepsElements):
    """The elements, which are written to a folder in the first pass and read from it in later ones.

    Args:
        source: The input.
        folder: The folder; it may be remote (fsspec).
        compression: None, "GZIP" or "SNAPPY".
        shard_function: The number of an element's shard; None for one shard.
        read: Returns the plan of the elements in a folder.
    """

    def __init__(
        self,
        source: Plan,
        folder: str,
        compression: str | None,
        shard_function: ElementFunction | None,
        read: Callable[[KeptDataset], Plan],
    ):
        super().__init__(source)
        self._folder = folder
        self._compression = compression
        self._shard_function = shard_function
        self._read = read
        self._reader: Plan | None = None
        codec_of(compression)  # raises if the compression is unknown

    def of(self, source: Plan, part: str = "") -> Snapshot:
        folder = self._folder + part
        return Snapshot(source, folder, self._compression, self._shard_function, self._read)

    def _open(self) -> Stream:
        return _SnapshotStream(self)

    def reader(self) -> Plan | None:
        """Returns the plan of the written elements; None if nothing has been written yet."""
        if self._reader is None:
            kept = read_dataset(self._folder, self._input.known_signature)
            if kept is not None:
                self.kept_signature = kept.signature
                self._reader = self._read(kept)
        return self._reader

    def first_pass(self) -> KeepingStream:
        """Opens a pass over the input that writes the snapshot."""
        writer = DatasetWriter(
            self._folder,
            self._compression,
            f"A pass over snapshot({self._folder!r}) ended before its last element. What it has "
            "written is removed.",
        )
        function = self._shard_function
        keeper = writer if function is None else _Sharding(writer, function, self._input)

        def publish(begin: State) -> None:
            del begin
            writer.publish(self._input)

        return KeepingStream(self._input, keeper, publish)


class _SnapshotStream(Stream):
    """A pass over the input, or over the written elements."""

    def __init__(self, plan: Snapshot):
        self._plan = plan
        self._reader = plan.reader()
        self._stream = plan.first_pass() if self._reader is None else self._reader.stream()

    def state(self) -> State:
        if self._reader is None:
            return {"is_written": False, "position": self._stream.state()}
        return {"is_written": True, "position": position_of(self._reader, self._stream)}

    def restore(self, state: State) -> None:
        if state["is_written"]:
            self._reader = self._plan.reader()
            if self._reader is None:
                raise NotFoundError(
                    message="This position is in a snapshot that no longer exists. Start "
                    "a new pass."
                )
            self._stream = stream_at(self._reader, state["position"])
            return
        stream = self._plan.first_pass()
        if self._reader is not None:
            # Another pass has written the snapshot since: this one continues to read its input.
            stream.stop_keeping()
            self._reader = None
        stream.restore(state["position"])
        self._stream = stream

    def next(self) -> Leaves | None:
        return self._stream.next()

    def next_block(self, count: int) -> Leaves | None:
        return self._stream.next_block(count)

    def skip(self, count: int) -> int:
        return self._stream.skip(count)


class _Sharding:
    """Adds each element to the shard of a writer that a function returns."""

    def __init__(self, writer: DatasetWriter, function: ElementFunction, source: Plan):
        self._writer = writer
        self._function = function
        self._source = source

    def add(self, block: Leaves) -> None:
        structure = self._source.structure
        for row in range(count_rows(block)):
            element = tuple(leaf[row] for leaf in block)
            self._writer.add(as_block(element), self._shard_of(element, structure))

    def discard(self) -> None:
        self._writer.discard()

    def _shard_of(self, element: Leaves, structure: Structure) -> int:
        result: tuple[Any, ...] = self._function(element, structure)
        if len(result) != 1 or np.shape(result[0]) or not _is_whole_number(result[0]):
            raise InvalidArgumentError(
                message="`shard_func` must return the number of a shard, one int64. Received: "
                f"{result!r}"
            )
        return int(result[0])


def _is_whole_number(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) is not None and leaf.dtype.kind in "iu"
