"""Chunks: consecutive elements that are passed to a function together, and its results."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from unison.data.functions import ElementFunction, note_place
from unison.data.leaves import concatenate, count_rows, stack
from unison.data.plan import Plan
from unison.data.specs import ArraySpec
from unison.data.state import State
from unison.data.structure import Leaves, Structure
from unison.errors import InvalidArgumentError
from unison.interrupts import is_of_a_signal_handler

#: The duration of a chunk in seconds, with which the cost of passing it on is negligible.
_SECONDS_OF_A_CHUNK = 5e-3

#: The maximum number of elements of a chunk, unless larger blocks are requested.
_MOST_ELEMENTS = 1024

#: The number of elements for a function of blocks if single elements are requested.
_BLOCK_FOR_SINGLE_ELEMENTS = 256

#: Allocates an array of a shape and a dtype, whose values are written later.
Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class Chunk:
    """Consecutive elements: stacked, or in a list.

    Args:
        start: The number of the first element.
        block: The elements, stacked.
        elements: Or the elements in a list.
    """

    def __init__(
        self, start: int, block: Leaves | None = None, elements: list[Leaves] | None = None
    ):
        self.start = start
        self._block = block
        self._elements = elements

    def __len__(self) -> int:
        if self._block is not None:
            return count_rows(self._block)
        assert self._elements is not None
        return len(self._elements)

    def __iter__(self) -> Iterator[Leaves]:
        if self._block is not None:
            return zip(*self._block, strict=True)
        assert self._elements is not None
        return iter(self._elements)

    def __getitem__(self, index: int) -> Leaves:
        if self._block is not None:
            return tuple(leaf[index] for leaf in self._block)
        assert self._elements is not None
        return self._elements[index]

    def part(self, start: int, stop: int) -> Chunk:
        """Returns the elements from `start` up to `stop`."""
        if start == 0 and stop >= len(self):
            return self
        if self._block is not None:
            block = tuple(leaf[start:stop] for leaf in self._block)
            return Chunk(self.start + start, block)
        assert self._elements is not None
        return Chunk(self.start + start, elements=self._elements[start:stop])

    @property
    def is_stacked(self) -> bool:
        """Whether they are stacked."""
        return self._block is not None

    def stacked(self) -> Leaves:
        """Returns the elements stacked.

        Raises:
            InvalidArgumentError: They have different shapes.
        """
        if self._block is not None:
            return self._block
        assert self._elements is not None
        return stack(self._elements)

    def state(self) -> State:
        return self.start, self._block, self._elements

    @classmethod
    def of_state(cls, state: State) -> Self:
        """Returns the chunk with this `state`.

        Raises:
            ValueError: It is not the state of a chunk.
        """
        start, block, elements = state
        if type(start) is not int or (block is None) == (elements is None):
            raise ValueError(f"expected the state of a chunk, received {str(state)[:80]!r}")
        return cls(start, block, elements)

    def __reduce__(self) -> Any:
        return Chunk, self.state()


def joined(chunks: list[Chunk]) -> Chunk:
    """Returns consecutive chunks of stacked elements as one chunk."""
    return Chunk(chunks[0].start, concatenate([chunk.stacked() for chunk in chunks]))


def _have_one_shape(plan: Plan) -> bool:
    """Whether the elements of a plan are known to have one shape, and so can be stacked."""
    signature = plan.known_signature
    return signature is not None and all(
        isinstance(spec, ArraySpec) and spec.shape is not None and None not in spec.shape
        for spec in signature.specs
    )


class ChunkReader:
    """Reads the elements of a plan from a new stream, in chunks.

    Args:
        source: Their plan.
        for_blocks: Whether several are read only for a consumer that needs them stacked.
    """

    def __init__(self, source: Plan, for_blocks: bool = False):
        self._stream = source.stream()
        self._position = 0
        #: The elements that have been read and returned, and are read again.
        self._again: collections.deque[Chunk] = collections.deque()
        #: The error that was raised after elements that have been read.
        self._error: Exception | None = None
        self._is_stackable = for_blocks or _have_one_shape(source)

    def read(self, count: int, times: int = 1) -> Chunk | None:
        """Returns the next elements; None at the end.

        Args:
            count: Their maximum number.
            times: The number of such reads that are counted as one call.
        """
        if self._again:
            return self._read_again(count * times)
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback references this frame
        if self._is_stackable and count > 1:
            return self._read_blocks(count, times)
        return self._read_elements(count * times)

    def _read_again(self, count: int) -> Chunk:
        chunk = self._again.popleft()
        if len(chunk) > count:
            self._again.appendleft(chunk.part(count, len(chunk)))
        return chunk.part(0, count)

    def _read_blocks(self, count: int, times: int) -> Chunk | None:
        chunks: list[Chunk] = []
        try:
            while len(chunks) < times:
                block = self._stream.next_block(count)
                if block is None:
                    break
                chunks.append(Chunk(self._position, block))
                self._position += len(chunks[-1])
        except Exception as error:
            if not chunks:
                raise
            self._error = error
        return joined(chunks) if chunks else None

    def _read_elements(self, count: int) -> Chunk | None:
        elements: list[Leaves] = []
        try:
            while len(elements) < count and (element := self._stream.next()) is not None:
                elements.append(element)
        except Exception as error:
            if not elements:
                raise
            self._error = error
        start = self._position
        self._position += len(elements)
        return Chunk(start, elements=elements) if elements else None

    def state_with(self, before: Sequence[Chunk]) -> State:
        """Returns the position of the inputs at which the elements of `before` are read again."""
        again = [chunk.state() for chunk in (*before, *self._again)]
        return {"stream": self._stream.state(), "position": self._position, "again": again}

    def restore(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._position = state["position"]
        self._again = collections.deque(map(Chunk.of_state, state["again"]))
        self._error = None


class _RowWriter:
    """Results that are written into arrays as they arrive, while their signatures are the same.

    Args:
        start: The number of the first result's element.
        count: Their maximum number.
        allocate: Allocates the arrays.
        as_leaves: Converts a result to leaves, unless it already is one.
    """

    def __init__(
        self,
        start: int,
        count: int,
        allocate: Allocate,
        as_leaves: Callable[[Leaves], Leaves],
    ):
        self._start = start
        self._as_leaves = as_leaves
        self._count = count
        self._allocate = allocate
        self._written = 0
        #: An array for each leaf, with the shape and the dtype of its rows.
        self._arrays: list[tuple[np.ndarray, tuple[int, ...], np.dtype]] | None = None
        #: The results in a list, if their signatures differ, or they are not numbers.
        self._elements: list[Leaves] | None = None

    def __len__(self) -> int:
        return self._written

    def add(self, result: Leaves) -> None:
        if self._arrays is None or not self._write(result):
            leaves = self._as_leaves(result)
            if self._elements is not None:
                self._elements.append(leaves)
            elif self._arrays is None:
                self._begin(leaves)
            elif not self._write(leaves):
                self._elements = [*self.chunk(), leaves]
                self._arrays = None
        self._written += 1

    def _write(self, result: Leaves) -> bool:
        """Writes a result, if it has the signature of the first one, and returns whether it has."""
        assert self._arrays is not None
        row = self._written
        for leaf, (array, shape, dtype) in zip(result, self._arrays, strict=True):
            if getattr(leaf, "shape", None) != shape:
                return False
            if leaf.dtype is not dtype and leaf.dtype != dtype:
                return False
            array[row] = leaf
        return True

    def _begin(self, leaves: Leaves) -> None:
        if all(isinstance(x, np.ndarray | np.generic) and x.dtype.kind != "O" for x in leaves):
            self._arrays = []
            for leaf in leaves:
                array = self._allocate((self._count, *leaf.shape), leaf.dtype)
                array[0] = leaf
                self._arrays.append((array, leaf.shape, leaf.dtype))
        else:
            self._elements = [leaves]

    def chunk(self) -> Chunk:
        """Returns the written results."""
        if self._elements is not None:
            return Chunk(self._start, elements=self._elements)
        assert self._arrays is not None
        return Chunk(self._start, tuple(array[: self._written] for array, _, _ in self._arrays))


#: The results of a function for a chunk, in order, and the errors that it raised for elements.
Outcome = list[Chunk | Exception]


class ChunkFunction:
    """A function of elements, or of blocks of elements, as it is called for chunks.

    Args:
        function: The function.
        structure: Returns the structure of the elements; called when there is an element.
        takes_blocks: Whether its argument is a block.
        epoch: The common part of its calls in this pass.
    """

    def __init__(
        self,
        function: ElementFunction,
        structure: Callable[[], Structure],
        takes_blocks: bool,
        epoch: Any = None,
    ):
        self.function = function
        self._structure = structure
        self.takes_blocks = takes_blocks
        self._epoch = epoch

    def __reduce__(self) -> Any:
        # Another process does not have the plan.
        return _with_structure, (
            self.function,
            self._structure(),
            self.takes_blocks,
            self._epoch,
        )

    def count_for(self, asked_for: int) -> int:
        """Returns the number of elements to pass to the function if `asked_for` are requested."""
        return _BLOCK_FOR_SINGLE_ELEMENTS if self.takes_blocks and asked_for == 1 else asked_for

    def of_element(self, element: Leaves, index: int) -> Leaves:
        """Returns the result for one element."""
        if self.takes_blocks:
            return self._of_block_of_one(element, index)
        try:
            return self.function(element, self._structure(), self._epoch, index)
        except Exception as error:
            note_place(error, self.function.stage, index)
            raise

    def _of_block_of_one(self, element: Leaves, index: int) -> Leaves:
        return tuple(leaf[0] for leaf in self.of_block(stack([element]), index))

    def of_block(self, block: Leaves, start: int) -> Leaves:
        """Returns the stacked results of a function of blocks.

        Raises:
            InvalidArgumentError: Their number differs from that of the elements.
        """
        stop = start + count_rows(block)
        try:
            results = self.function(block, self._structure(), self._epoch, start)
            shapes = [getattr(leaf, "shape", ()) for leaf in results]
            if any(shape[:1] != (stop - start,) for shape in shapes):
                raise InvalidArgumentError(
                    message=f"The function of {self.function.stage}, which is vectorized, must "
                    "return as many rows as it gets, in every component. Expected: "
                    f"{stop - start} rows. Received shapes: {shapes}"
                )
        except Exception as error:
            error.add_note(
                f"In the function of {self.function.stage}, called for the block of elements "
                f"{start} to {stop - 1} of the dataset."
            )
            raise
        return results

    def __call__(self, chunk: Chunk, allocate: Allocate = np.empty) -> Outcome:
        """Returns the function's results for the elements."""
        if not self.takes_blocks:
            return self._one_by_one(chunk, allocate)
        try:
            return [Chunk(chunk.start, self.of_block(chunk.stacked(), chunk.start))]
        except InvalidArgumentError as error:
            return [error]
        except Exception as error:
            # In blocks of one, it fails only for the elements that cause the error.
            by_one = len(chunk) > 1 and not is_of_a_signal_handler(error)
            return self._one_by_one(chunk, allocate) if by_one else [error]

    def _one_by_one(self, chunk: Chunk, allocate: Allocate) -> Outcome:
        function = self.function
        outcome: Outcome = []
        stop = chunk.start + len(chunk)
        writer = _RowWriter(chunk.start, len(chunk), allocate, function.as_leaves)
        call = self._caller(chunk)
        for index, element in enumerate(chunk, chunk.start):
            try:
                writer.add(call(element, index))
            except Exception as error:
                note_place(error, function.stage, index)
                if len(writer):
                    outcome.append(writer.chunk())
                outcome.append(error)
                writer = _RowWriter(index + 1, stop - index - 1, allocate, function.as_leaves)
        if len(writer):
            outcome.append(writer.chunk())
        try:
            return outcome
        finally:
            del outcome  # each error's traceback references this frame, which references the others

    def _caller(self, chunk: Chunk) -> Callable[[Leaves, int], Leaves]:
        """Returns the function of one element of a chunk and its number."""
        if self.takes_blocks:
            return self._of_block_of_one
        function, structure, epoch = self.function, self._structure(), self._epoch
        if chunk.is_stacked:
            return function.for_rows(structure, epoch)
        return lambda element, index: function(element, structure, epoch, index)


def _with_structure(
    function: ElementFunction, structure: Structure, takes_blocks: bool, epoch: Any
) -> ChunkFunction:
    return ChunkFunction(function, lambda: structure, takes_blocks, epoch)


class Results:
    """The outcome of a chunk, as it is consumed.

    Args:
        chunk: The elements.
        outcome: The results and errors of its elements.
    """

    def __init__(self, chunk: Chunk, outcome: Outcome):
        self._chunk = chunk
        self._left = outcome[::-1]
        self._place = 0
        self._taken = 0

    def __bool__(self) -> bool:
        """Whether there are results left."""
        return bool(self._left)

    def rest(self) -> Chunk:
        """Returns the elements whose results have not been consumed."""
        return self._chunk.part(self._taken, len(self._chunk))

    def next(self) -> Leaves:
        """Returns the next result, or raises the error of its element."""
        results = self._present()
        self._place += 1
        element = results[self._place - 1]
        self._go_on(results, 1)
        return element

    def next_block(self, count: int) -> Leaves:
        """Returns up to `count` of the next results, stacked."""
        results = self._present()
        part = results.part(self._place, self._place + count)
        self._place += len(part)
        self._go_on(results, len(part))
        return part.stacked()

    def _present(self) -> Chunk:
        results = self._left[-1]
        if isinstance(results, Exception):
            self._left.pop()
            self._taken = len(self._chunk) if not self._left else self._taken + 1
            try:
                raise results
            finally:
                del results  # its traceback references this frame
        return results

    def _go_on(self, results: Chunk, count: int) -> None:
        self._taken += count
        if self._place == len(results):
            self._left.pop()
            self._place = 0


class Pace:
    """The duration of calls, and the number of calls that are worth a chunk."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def note(self, count: int, seconds: float) -> None:
        """Records the duration of `count` calls."""
        self._seconds = seconds / count

    def elements(self) -> int:
        """Returns the number of elements of a chunk."""
        if not self._seconds:
            return 1
        return min(max(int(_SECONDS_OF_A_CHUNK / self._seconds), 1), _MOST_ELEMENTS)
