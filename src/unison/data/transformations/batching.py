"""Batches, and elements of batches: `batch`, `padded_batch`, `unbatch`, `rebatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from unison.data.functions import note_batch
from unison.data.leaves import as_leaf, concatenate, count_rows, shape_of, stack
from unison.data.plan import INFINITE, UNKNOWN, Plan, Stream, Transformation
from unison.data.ragged import RaggedArray, ragged_of
from unison.data.specs import ArraySpec, RaggedSpec, Signature, as_shape
from unison.data.state import State
from unison.data.structure import Leaves, Structure
from unison.errors import DataLossError, InvalidArgumentError


class _Batches(Transformation):
    """Base of the transformations that combine consecutive elements.

    Raises:
        InvalidArgumentError: The size is not a positive number.
    """

    identity: ClassVar[tuple[str, ...]] = ("_size", "_drop_remainder")

    def __init__(self, source: Plan, size: int, drop_remainder: bool):
        super().__init__(source)
        if size < 1:
            raise InvalidArgumentError(
                message=f"Expected a batch size greater than zero. Received: {size}"
            )
        self._size = size
        self._drop_remainder = drop_remainder

    def cardinality(self) -> int:
        length = self._input.cardinality()
        if length < 0:
            return length
        return length // self._size if self._drop_remainder else -(-length // self._size)

    @property
    def batch_size(self) -> int:
        return self._size

    @property
    def _known_size(self) -> int | None:
        return self._size if self._drop_remainder else None


class Batch(_Batches):
    """Consecutive elements stacked."""

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return inputs[0].batched(self._known_size)

    def _stream(self) -> Stream:
        return _BatchStream(self._input.stream(), self._size, self._drop_remainder)


class _BatchStream(Stream):
    moving = ("_stream", "_position")

    def __init__(self, stream: Stream, size: int, drop_remainder: bool):
        self._stream = stream
        self._size = size
        self._drop_remainder = drop_remainder
        self._position = 0

    def next(self) -> Leaves | None:
        start = self._position
        self._position += self._size
        try:
            block = self._stream.next_block(self._size)
        except Exception as error:
            note_batch(error, "batch", start)
            raise
        if block is None or (self._drop_remainder and count_rows(block) < self._size):
            return None
        return block

    def skip(self, count: int) -> int:
        self._position += count * self._size
        skipped = self._stream.skip(count * self._size)
        return skipped // self._size if self._drop_remainder else -(-skipped // self._size)


class _OfElements(_Batches):
    """Base of batches that are made of single elements, of which shapes may differ.

    Attributes:
        method: The method of `Dataset` that makes them, for messages.
    """

    method: ClassVar[str]

    def batch_of(self, elements: Sequence[Leaves]) -> Leaves:
        """Returns elements, at least one, as a batch."""
        raise NotImplementedError

    def _stream(self) -> Stream:
        return _OfElementsStream(self, self._input.stream())

    def next_of(self, stream: Stream, start: int) -> Leaves | None:
        """Returns the next batch of the input's elements; the next element is `start`."""
        elements: list[Leaves] = []
        while len(elements) < self._size and (element := stream.next()) is not None:
            elements.append(element)
        if not elements or (self._drop_remainder and len(elements) < self._size):
            return None
        try:
            return self.batch_of(elements)
        except Exception as error:
            note_batch(error, self.method, start)
            raise


class _OfElementsStream(Stream):
    moving = ("_stream", "_position")

    def __init__(self, plan: _OfElements, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._position = 0

    def next(self) -> Leaves | None:
        start = self._position
        self._position += self._plan.batch_size
        return self._plan.next_of(self._stream, start)


class RaggedBatch(_OfElements):
    """Consecutive elements stacked, of which arrays of unknown sizes become ragged.

    An array is ragged up to the last axis whose size is not known.

    Args:
        source: The input.
        size: The number of elements.
        drop_remainder: Whether a smaller last batch is dropped.
        splits_dtype: The dtype of the splits: int32 or int64.
    """

    identity = (*_Batches.identity, "_splits_dtype")
    method = "ragged_batch"

    def __init__(self, source: Plan, size: int, drop_remainder: bool, splits_dtype: Any):
        super().__init__(source, size, drop_remainder)
        self._splits_dtype = np.dtype(splits_dtype)

    def _ragged(self, spec: Any) -> Any:
        """Returns the spec of an element as that of the leaf that is stacked."""
        if not isinstance(spec, ArraySpec):
            return spec
        if spec.shape is None:
            raise TypeError(
                "ragged_batch needs a known number of axes. Received elements of unknown shape: "
                f"{spec}"
            )
        unknown = [axis for axis, size in enumerate(spec.shape) if size is None]
        if not unknown:
            return spec
        return RaggedSpec(spec.shape, spec.dtype, unknown[-1], self._splits_dtype)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return inputs[0].map(lambda spec: self._ragged(spec).batched(self._known_size))

    def batch_of(self, elements: Sequence[Leaves]) -> Leaves:
        specs = [self._ragged(spec) for spec in self._input.signature.specs]
        return stack([tuple(map(_as_ragged, element, specs)) for element in elements])


def _as_ragged(leaf: Any, spec: Any) -> Any:
    if not isinstance(spec, RaggedSpec) or isinstance(leaf, RaggedArray):
        return leaf
    return ragged_of(leaf, spec.ragged_rank, spec.splits_dtype)


class PaddedBatch(_OfElements):
    """Consecutive elements, padded to one shape and stacked.

    Args:
        source: The input.
        size: The number of elements.
        shapes: For every leaf the shape to pad to; None, or a size of None, pads to the largest.
            Or None, for the known sizes of the input.
        values: For every leaf the padding; None: 0, or empty text.
        drop_remainder: Whether a smaller last batch is dropped.

    Raises:
        ValueError: Shapes are required, since the number of axes is unknown, or are invalid.
        TypeError: A value does not have the dtype of its leaf.
    """

    method = "padded_batch"

    def __init__(self, source: Plan, size: int, shapes: Any, values: Any, drop_remainder: bool):
        super().__init__(source, size, drop_remainder)
        self._given = shapes, values
        # For every leaf the shape and the value; known once the signature of the elements is.
        self._paddings: list[tuple[tuple[int | None, ...], Any]] | None = None
        if (known := source.known_signature) is not None:
            self._paddings = self._paddings_of(known)

    def _paddings_of(self, inputs: Signature) -> list[tuple[tuple[int | None, ...], Any]]:
        shapes, values = self._given
        of_leaves = zip(
            inputs.specs,
            _per_leaf(shapes, inputs.structure),
            _per_leaf(values, inputs.structure, True),
            strict=True,
        )
        return [
            (_padded_shape(spec, shape, index), _padding(spec, value))
            for index, (spec, shape, value) in enumerate(of_leaves)
        ]

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        (inner,) = inputs
        paddings = self._paddings or self._paddings_of(inner)
        specs = [
            ArraySpec((self._known_size, *shape), spec.dtype)
            for spec, (shape, _) in zip(inner.specs, paddings, strict=True)
        ]
        return Signature(inner.structure, tuple(specs))

    def batch_of(self, elements: Sequence[Leaves]) -> Leaves:
        if self._paddings is None:
            # One element does not determine the sizes of all.
            first = Signature.of(elements[0], self._input.structure)
            self._paddings = self._paddings_of(first.map(lambda spec: spec.with_unknown_sizes()))
        return tuple(
            _pad([element[index] for element in elements], shape, value)
            for index, (shape, value) in enumerate(self._paddings)
        )


def _per_leaf(given: Any, structure: Structure, may_be_one: bool = False) -> Sequence[Any]:
    """Returns an argument for every leaf, given in their structure, as one for all, or None."""
    is_one = may_be_one and np.ndim(given) == 0 and not isinstance(given, tuple | dict)
    if given is None or is_one:
        return [given] * structure.num_leaves
    return structure.flatten(given)


def _padded_shape(spec: Any, given: Any, index: int) -> tuple[int | None, ...]:
    if isinstance(spec, RaggedSpec):
        raise TypeError(
            f"padded_batch takes arrays; component {index} is ragged: {spec}. Use batch, which "
            "makes it ragged, and x.to_tensor() in map."
        )
    shape = spec.shape if given is None else as_shape(given)
    if shape is None:
        raise ValueError(
            f"padded_batch needs padded_shapes, because the number of axes of component {index} "
            "is not known."
        )
    if spec.shape is not None and len(shape) != len(spec.shape):
        raise ValueError(
            f"The padded shape {shape} does not fit component {index}, whose shape is {spec.shape}."
        )
    return shape


def _padding(spec: ArraySpec, value: Any) -> Any:
    if value is None:
        return b"" if spec.dtype.kind == "O" else np.zeros((), spec.dtype)
    leaf = as_leaf(value)
    if isinstance(leaf, bytes) == (spec.dtype.kind == "O"):
        if isinstance(leaf, bytes):
            return leaf
        # A Python number fits any dtype that can hold it; anything else has a dtype of its own.
        is_plain = isinstance(value, bool | int | float) and not isinstance(value, np.generic)
        converted = np.asarray(leaf).astype(spec.dtype)
        if converted == leaf and (is_plain or leaf.dtype == spec.dtype):
            return converted
    raise TypeError(f"A padding value must have the dtype {spec.dtype}. Received: {value!r}")


def _pad(leaves: list[Any], shape: tuple[int | None, ...], value: Any) -> np.ndarray:
    for number, leaf in enumerate(leaves):
        if len(shape_of(leaf)) != len(shape):
            raise InvalidArgumentError(
                message=f"Cannot pad to the shape {list(shape)}: element {number} of the batch has "
                f"the shape {list(shape_of(leaf))}, with another number of axes."
            )
    largest = np.max([shape_of(leaf) for leaf in leaves], axis=0).astype(int)
    sizes = [int(most) if size is None else size for size, most in zip(shape, largest, strict=True)]
    for number, leaf in enumerate(leaves):
        if any(own > size for own, size in zip(shape_of(leaf), sizes, strict=True)):
            raise DataLossError(
                message=f"Cannot pad to the shape {list(shape)}: element {number} of the batch has "
                f"the shape {list(shape_of(leaf))}, and would be cut."
            )
    padded = np.full((len(leaves), *sizes), value, getattr(value, "dtype", object))
    for row, leaf in enumerate(leaves):
        padded[row, ...][tuple(slice(size) for size in shape_of(leaf))] = leaf
    return padded


class Unbatch(Transformation):
    """The rows of every element.

    Raises:
        ValueError: The elements have no rows.
    """

    def __init__(self, source: Plan):
        super().__init__(source)
        _ = self.known_signature  # raises if they have none

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return inputs[0].unbatched()

    def cardinality(self) -> int:
        length = self._input.cardinality()
        if length in (INFINITE, 0):
            return length
        signature = self._input.known_signature
        size = None if signature is None else signature.batch_size
        return UNKNOWN if length < 0 or size is None else length * size

    def _stream(self) -> Stream:
        return UnbatchStream(self._input.stream())


class UnbatchStream(Stream):
    """The rows of the elements of another stream."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._batch: Leaves | None = None
        self._position = 0
        self._length = 0

    def state(self) -> State:
        rest = None
        if self._batch is not None and self._position < self._length:
            rest = tuple(leaf[self._position :] for leaf in self._batch)
        return {"stream": self._stream.state(), "rest": rest}

    def restore(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._batch = state["rest"]
        self._position = 0
        self._length = 0 if self._batch is None else count_rows(self._batch)

    def next(self) -> Leaves | None:
        if not self._has_row():
            return None
        assert self._batch is not None
        self._position += 1
        return tuple(leaf[self._position - 1] for leaf in self._batch)

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and self._has_row():
            assert self._batch is not None
            stop = min(self._position + count, self._length)
            blocks.append(tuple(leaf[self._position : stop] for leaf in self._batch))
            count -= stop - self._position
            self._position = stop
        return concatenate(blocks) if blocks else None

    def no_rows(self) -> Leaves | None:
        """Returns a block without rows; None if all have been read."""
        if not self._has_row():
            return None
        assert self._batch is not None
        return tuple(leaf[:0] for leaf in self._batch)

    def _has_row(self) -> bool:
        """Advances to the next row, if there is one."""
        while self._position >= self._length:
            self._batch = self._stream.next()
            if self._batch is None:
                return False
            self._position = 0
            self._length = _length_of(self._batch)
        return True


def _length_of(batch: Leaves) -> int:
    lengths = {shape_of(leaf)[:1] for leaf in batch}
    if len(lengths) != 1 or () in lengths:
        raise InvalidArgumentError(
            message="The components of an element that is cut into rows must have the same number "
            f"of them. Received shapes: {[shape_of(leaf) for leaf in batch]}"
        )
    return count_rows(batch)


class Rebatch(Transformation):
    """The rows of batches, in batches of other sizes.

    Args:
        source: The plan of batches.
        sizes: The sizes, in turn; they may be 0.
        drop_remainder: Whether a last batch that is too small is dropped.
    """

    identity = ("_sizes", "_drop_remainder")

    def __init__(self, source: Plan, sizes: Sequence[int], drop_remainder: bool):
        super().__init__(source)
        if not sizes or min(sizes) < 0 or not sum(sizes):
            raise InvalidArgumentError(
                message=f"Expected sizes of batches, not all of them 0. Received: {list(sizes)}"
            )
        self._sizes = tuple(sizes)
        self._drop_remainder = drop_remainder
        _ = self.known_signature  # raises if there are no rows

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        is_one_size = len(set(self._sizes)) == 1 and self._drop_remainder
        return inputs[0].unbatched().batched(self._sizes[0] if is_one_size else None)

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length in (INFINITE, 0) else UNKNOWN

    def _stream(self) -> Stream:
        stream = UnbatchStream(self._input.stream())
        return _RebatchStream(stream, self._sizes, self._drop_remainder)


class _RebatchStream(Stream):
    moving = ("_stream", "_position")

    def __init__(self, stream: UnbatchStream, sizes: Sequence[int], drop_remainder: bool):
        self._stream = stream
        self._sizes = sizes
        self._drop_remainder = drop_remainder
        self._position = 0

    def next(self) -> Leaves | None:
        size = self._sizes[self._position % len(self._sizes)]
        self._position += 1
        if not size:
            return self._stream.no_rows()
        block = self._stream.next_block(size)
        if block is None or (self._drop_remainder and count_rows(block) < size):
            return None
        return block
