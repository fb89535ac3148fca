"""Several datasets as one: `zip`, `concatenate`; and `enumerate`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from unison.data.leaves import concatenate, count_rows
from unison.data.plan import INFINITE, UNKNOWN, Plan, Rows, Stream, Transformation
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Leaves, Structure, tuple_of


class Zip(Plan):
    """Tuples of one element of every input; it ends with the shortest.

    Args:
        inputs: The plans, in the order of the leaves of `structure`.
        structure: The structure of the inputs.
    """

    def __init__(self, inputs: Sequence[Plan], structure: Structure):
        self.inputs = tuple(inputs)
        self._around = structure

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        structure = _filled(self._around, iter([signature.structure for signature in inputs]))
        return Signature(structure, tuple(spec for inner in inputs for spec in inner.specs))

    @property
    def structure(self) -> Structure:
        return _filled(self._around, iter([plan.structure for plan in self.inputs]))

    def cardinality(self) -> int:
        lengths = [plan.cardinality() for plan in self.inputs]
        if UNKNOWN in lengths:
            return UNKNOWN
        return min((length for length in lengths if length >= 0), default=INFINITE)

    def rows(self) -> Rows | None:
        rows = [plan.rows() for plan in self.inputs]
        return None if None in rows else _ZippedRows([part for part in rows if part is not None])

    @property
    def batch_size(self) -> int | None:
        sizes = {plan.batch_size for plan in self.inputs}
        return sizes.pop() if len(sizes) == 1 else None

    def _stream(self) -> Stream:
        return _ZipStream([plan.stream() for plan in self.inputs])


def _filled(around: Structure, parts: Iterator[Structure]) -> Structure:
    """Returns `around` with its leaves replaced by the structures `parts`, in order."""
    if around.kind is None:
        return next(parts)
    children = tuple(_filled(child, parts) for child in around.children)
    return Structure(around.kind, children, around.keys, around.order)


class _ZippedRows(Rows):
    def __init__(self, parts: Sequence[Rows]):
        self._parts = parts
        self._length = min(map(len, parts))

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Leaves:
        return tuple(leaf for rows in self._parts for leaf in rows.take(indices))

    def slice(self, start: int, stop: int) -> Leaves:
        return tuple(leaf for rows in self._parts for leaf in rows.slice(start, stop))

    def element(self, index: int) -> Leaves:
        return tuple(leaf for rows in self._parts for leaf in rows.element(index))


class _ZipStream(Stream):
    moving = ("_streams", "_has_ended")

    def __init__(self, streams: Sequence[Stream]):
        self._streams = streams
        self._has_ended = False

    def next(self) -> Leaves | None:
        parts = []
        for stream in self._streams:
            element = None if self._has_ended else stream.next()
            if element is None:
                self._has_ended = True
                return None
            parts.append(element)
        return tuple(leaf for part in parts for leaf in part)

    def next_block(self, count: int) -> Leaves | None:
        if self._has_ended:
            return None
        blocks = []
        for stream in self._streams:
            block = stream.next_block(count)
            if block is None:
                self._has_ended = True
                return None
            blocks.append(block)
        shortest = min(map(count_rows, blocks))
        self._has_ended = shortest < count
        return tuple(leaf[:shortest] for block in blocks for leaf in block)


class Enumerate(Transformation):
    """A number, followed by the element."""

    identity = ("_start",)

    def __init__(self, source: Plan, start: int):
        super().__init__(source)
        self._start = start

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        (inner,) = inputs
        return Signature(tuple_of(LEAF, inner.structure), (ArraySpec((), _INT64), *inner.specs))

    @property
    def structure(self) -> Structure:
        return tuple_of(LEAF, self._input.structure)

    def rows(self) -> Rows | None:
        rows = self._input.rows()
        return None if rows is None else _NumberedRows(rows, self._start)

    def _stream(self) -> Stream:
        return _NumberedStream(self._input.stream(), self._start)


_INT64 = np.dtype(np.int64)


class _NumberedRows(Rows):
    def __init__(self, rows: Rows, start: int):
        self._rows = rows
        self._start = start

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Leaves:
        return (self._start + np.asarray(indices, np.int64), *self._rows.take(indices))

    def slice(self, start: int, stop: int) -> Leaves:
        numbers = np.arange(self._start + start, self._start + stop)
        return (numbers, *self._rows.slice(start, stop))

    def element(self, index: int) -> Leaves:
        return (np.int64(self._start + index), *self._rows.element(index))


class _NumberedStream(Stream):
    moving = ("_stream", "_number")

    def __init__(self, stream: Stream, start: int):
        self._stream = stream
        self._number = start

    def next(self) -> Leaves | None:
        element = self._stream.next()
        if element is None:
            return None
        self._number += 1
        return (np.int64(self._number - 1), *element)

    def next_block(self, count: int) -> Leaves | None:
        block = self._stream.next_block(count)
        if block is None:
            return None
        start = self._number
        self._number += count_rows(block)
        return (np.arange(start, self._number), *block)


class Concatenate(Plan):
    """The elements of one input, followed by those of the other.

    Raises:
        TypeError: They have different structures or dtypes.
    """

    def __init__(self, inputs: Sequence[Plan]):
        self.inputs = tuple(inputs)
        self._told: Structure | None = None
        _ = self.known_signature  # raises if they differ

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return common_signature(inputs)

    @property
    def structure(self) -> Structure:
        if self._told is None:
            self._told = common_structure(self.inputs)
        return self._told

    def cardinality(self) -> int:
        lengths = [plan.cardinality() for plan in self.inputs]
        if INFINITE in lengths:
            return INFINITE
        return UNKNOWN if UNKNOWN in lengths else sum(lengths)

    @property
    def batch_size(self) -> int | None:
        sizes = {plan.batch_size for plan in self.inputs}
        return sizes.pop() if len(sizes) == 1 else None

    def _stream(self) -> Stream:
        return _ConcatenatedStream([plan.stream() for plan in self.inputs])


class _ConcatenatedStream(Stream):
    moving = ("_streams", "_position")

    def __init__(self, streams: Sequence[Stream]):
        self._streams = streams
        self._position = 0

    def next(self) -> Leaves | None:
        while self._position < len(self._streams):
            element = self._streams[self._position].next()
            if element is not None:
                return element
            self._position += 1
        return None

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and self._position < len(self._streams):
            block = self._streams[self._position].next_block(count)
            if block is None:
                self._position += 1
            else:
                blocks.append(block)
                count -= count_rows(block)
        return concatenate(blocks) if blocks else None


def common_signature(signatures: Sequence[Signature]) -> Signature:
    """Returns the signature that describes the elements of all.

    Raises:
        TypeError: They have different structures or dtypes.
    """
    return functools.reduce(Signature.widened, signatures)


def common_structure(plans: Sequence[Plan]) -> Structure:
    """Returns the common structure of the elements of plans.

    Raises:
        ValueError: Only an element would determine it, and they have no elements.
    """
    for plan in plans[:-1]:
        with contextlib.suppress(ValueError):  # it is empty
            return plan.structure
    return plans[-1].structure
