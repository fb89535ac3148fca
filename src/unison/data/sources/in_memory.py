"""Datasets of arrays, ranges and generators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from unison.data.leaves import as_leaf, gathered, read_only
from unison.data.plan import INFINITE, UNKNOWN, Plan, Rows, Stream
from unison.data.ragged import RaggedArray
from unison.data.sources.memory_maps import MappedRows
from unison.data.specs import ArraySpec, RaggedSpec, Signature
from unison.data.state import State, cannot_keep, keep_kind
from unison.data.structure import LEAF, Leaves, Structure, flatten
from unison.errors import InvalidArgumentError


class ArrayRows(Rows):
    """The rows of arrays, which all have the same number of rows."""

    def __init__(self, arrays: Leaves):
        #: The arrays.
        self.arrays = tuple(map(read_only, arrays))
        self._length = len(arrays[0])
        self._mapped = MappedRows(arrays)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Leaves:
        self._mapped.expect(is_random=True)
        return tuple(gathered(array, indices) for array in self.arrays)

    def slice(self, start: int, stop: int) -> Leaves:
        self._mapped.expect(is_random=False)
        return tuple(array[start:stop] for array in self.arrays)

    def element(self, index: int) -> Leaves:
        return tuple(array[index] for array in self.arrays)


class Slices(Plan):
    """The rows of arrays."""

    identity = ("length",)

    def __init__(self, arrays: Leaves, structure: Structure):
        if not arrays:
            raise ValueError("A dataset needs at least one array. Received: none")
        for array in arrays:
            if not isinstance(array, np.ndarray | RaggedArray):
                raise ValueError(
                    "from_tensor_slices cuts arrays along their first axis. Received a value "
                    f"without one: {array!r}. Use from_tensors for a single element."
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(
                "Arrays that are cut together must have the same length along their first axis. "
                f"Received lengths: {lengths}"
            )
        self._rows = ArrayRows(arrays)
        self.length = lengths[0]
        specs = tuple(ArraySpec.of(array).unbatched() for array in arrays)
        self._signature = Signature(structure, specs)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._signature

    def cardinality(self) -> int:
        return len(self._rows)

    def rows(self) -> Rows:
        return self._rows

    def sample(self) -> Leaves | None:
        return self._rows.element(0) if len(self._rows) else None


class ListStream(Stream):
    """Elements of a list, in order."""

    moving = ("_position",)

    def __init__(self, elements: Sequence[Leaves]):
        self._elements = elements
        self._position = 0

    def next(self) -> Leaves | None:
        if self._position >= len(self._elements):
            return None
        self._position += 1
        return self._elements[self._position - 1]

    def skip(self, count: int) -> int:
        count = max(0, min(count, len(self._elements) - self._position))
        self._position += count
        return count


class Elements(Plan):
    """Elements that are already in memory: those of a window, or a single one."""

    def __init__(self, elements: Sequence[Leaves], signature: Signature):
        self.elements = elements
        self._signature = signature

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._signature

    def cardinality(self) -> int:
        return len(self.elements)

    def _stream(self) -> Stream:
        return ListStream(self.elements)


def _kept_of(window: Elements) -> State:
    """Returns the state of a window."""
    (spec, *others) = window.signature.specs
    if others or window.structure != LEAF or not isinstance(spec, ArraySpec):
        raise cannot_keep(window)
    return [list(window.elements), spec.shape, np.empty(0, spec.dtype)]


def _window_of(kept: State) -> Elements:
    elements, shape, no_rows = kept
    return Elements(elements, Signature(LEAF, (ArraySpec(shape, no_rows.dtype),)))


keep_kind(Elements, _kept_of, _window_of)


def single_element(leaves: Leaves, structure: Structure) -> Plan:
    """Returns the plan of one element."""
    if not leaves:
        raise InvalidArgumentError(message="A dataset needs at least one array. Received: none")
    leaves = tuple(map(read_only, leaves))
    return Elements([leaves], Signature.of(leaves, structure))


class _RangeRows(Rows):
    def __init__(self, numbers: range, dtype: np.dtype):
        self._numbers = numbers
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, indices: np.ndarray) -> Leaves:
        return ((self._numbers.start + self._numbers.step * indices).astype(self._dtype),)

    def element(self, index: int) -> Leaves:
        return (self._dtype.type(self._numbers[index]),)


class Range(Plan):
    """Numbers with a fixed step.

    Raises:
        InvalidArgumentError: The step is 0.
    """

    identity = ("_numbers",)

    def __init__(self, numbers: Sequence[int], dtype: Any):
        start, stop, step = numbers
        if step == 0:
            raise InvalidArgumentError(message="The step of a range must not be 0.")
        self._numbers = range(start, stop, step)
        self._dtype = np.dtype(dtype)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return Signature(LEAF, (ArraySpec((), self._dtype),))

    def cardinality(self) -> int:
        return len(self._numbers)

    def rows(self) -> Rows:
        return _RangeRows(self._numbers, self._dtype)


class Counter(Plan):
    """Numbers with a fixed step, without end."""

    identity = ("_start", "_step")

    def __init__(self, start: int, step: int, dtype: Any):
        self._start = start
        self._step = step
        self._dtype = np.dtype(dtype)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return Signature(LEAF, (ArraySpec((), self._dtype),))

    def cardinality(self) -> int:
        return INFINITE

    def _stream(self) -> Stream:
        return _CounterStream(self._start, self._step, self._dtype)


class _CounterStream(Stream):
    moving = ("_number",)

    def __init__(self, start: int, step: int, dtype: np.dtype):
        self._number = start
        self._step = step
        self._dtype = dtype

    def next(self) -> Leaves:
        self._number += self._step
        return (self._dtype.type(self._number - self._step),)

    def next_block(self, count: int) -> Leaves:
        numbers = self._number + self._step * np.arange(count)
        self._number += self._step * count
        return (numbers.astype(self._dtype),)

    def skip(self, count: int) -> int:
        self._number += self._step * count
        return count


class Generator(Plan):
    """The elements of the iterator that a function returns.

    Args:
        make: Returns a new iterable for every iteration. To resume an iteration, the elements
            before its position are read again and dropped, since only the iterable can compute
            them.
        signature: The required signature; leaves are converted to its dtypes. None:
            that of the first element.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], signature: Signature | None):
        self._make = make
        self._signature = signature
        self._structure = None if signature is None else signature.structure

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return self._signature

    @property
    def structure(self) -> Structure:
        return self.signature.structure if self._structure is None else self._structure

    def cardinality(self) -> int:
        return UNKNOWN

    def _stream(self) -> Stream:
        return _GeneratorStream(self, iter(self._make()))

    def leaves_of(self, value: Any, index: int) -> Leaves:
        """Returns the leaves of element `index` of the generator.

        Raises:
            InvalidArgumentError: It does not have the signature.
        """
        try:
            if self._structure is None:
                found, self._structure = flatten(value)
                return tuple(map(as_leaf, found))
            leaves = self._structure.flatten(value)
            if self._signature is None:
                return tuple(map(as_leaf, leaves))
            pairs = zip(leaves, self._signature.specs, strict=True)
            return tuple(_converted(leaf, spec) for leaf, spec in pairs)
        except (TypeError, ValueError) as error:
            expected = self._structure if self._signature is None else self._signature.element_spec
            raise InvalidArgumentError(
                message=f"Element {index} of the generator is not what its signature says. "
                f"Expected: {expected}. Received: {value!r}. {error}"
            ) from error


class _GeneratorStream(Stream):
    def __init__(self, plan: Generator, iterator: Iterator[Any]):
        self._plan = plan
        self._iterator = iterator
        self._position = 0

    def state(self) -> State:
        return self._position

    def restore(self, state: State) -> None:
        self._position += sum(1 for _ in itertools.islice(self._iterator, state))

    def next(self) -> Leaves | None:
        try:
            value = next(self._iterator)
        except StopIteration:
            return None
        except Exception as error:
            error.add_note(f"In the generator, asked for element {self._position} of the dataset.")
            raise
        self._position += 1
        return self._plan.leaves_of(value, self._position - 1)


def _converted(value: Any, spec: Any) -> Any:
    leaf = as_leaf(value)
    if isinstance(spec, RaggedSpec) and spec.ragged_rank == 0 and isinstance(leaf, np.ndarray):
        leaf = RaggedArray(leaf, (), spec.splits_dtype)
    if isinstance(leaf, RaggedArray):
        leaf = RaggedArray(leaf.flat.astype(spec.dtype, copy=False), leaf.splits, leaf.splits_dtype)
        if not spec.describes(leaf):
            raise ValueError(f"A leaf does not fit {spec}: {leaf!r}")
        return leaf
    is_text = spec.dtype.kind == "O"
    if not is_text and not isinstance(leaf, bytes) and leaf.dtype != spec.dtype:
        leaf = leaf.astype(spec.dtype)
    if not spec.describes(leaf):
        raise ValueError(f"A leaf does not fit {spec}: {leaf!r}")
    return leaf
