"""One worker's examples of every global batch, computed without the examples of the others.

If a dataset is a source, in some order, mapped example by example and batched, a worker
determines its examples from the order, which is numbers; the others it neither reads nor maps. A
function that was called before the order was made is called for the worker's examples after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from unison.data.chunks import Chunk
from unison.data.distribution.shares import Proportions, Shares
from unison.data.functions import BlockFunction, ElementFunction
from unison.data.leaves import concatenate, stack
from unison.data.options import WithOptions
from unison.data.plan import INFINITE, UNKNOWN, Plan, Rows, Stream, Transformation
from unison.data.sources.in_memory import Range
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves, Structure
from unison.data.transformations.batching import Batch
from unison.data.transformations.mapping import Map
from unison.data.transformations.prefetching import Prefetch
from unison.data.transformations.repetition import Repeat
from unison.data.transformations.selection import Shard, Skip, Take
from unison.data.transformations.shuffling import Shuffle
from unison.thread_pool import ThreadPool

#: The transformations that change the order and the number of elements, whatever they are.
_BY_POSITION = (Prefetch, Repeat, Shard, Shuffle, Skip, Take, WithOptions)


class Division(NamedTuple):
    """The division of global batches between replicas, as one worker sees it.

    Attributes:
        num_replicas: The number of replicas on all workers.
        replicas: The replicas of the worker.
        proportions: Their shares of a batch are proportional to these.
    """

    num_replicas: int
    replicas: range
    proportions: Proportions = None


@dataclasses.dataclass(frozen=True)
class BatchSharding:
    """The examples of every global batch that are a worker's.

    Attributes:
        batch_size: The size of a global batch.
        num_batches: The number of global batches; None for no end.
        num_examples: The total number of examples; None for no end.
        division: How batches are divided.
        needs_examples: Whether at least one example of every batch is read: it shows the
            signature of an empty batch.
    """

    batch_size: int
    num_batches: int | None
    num_examples: int | None
    division: Division
    needs_examples: bool = False

    def size_of(self, batch: int) -> int:
        """Returns the size of a global batch."""
        if self.num_examples is None:
            return self.batch_size
        return min(self.batch_size, self.num_examples - batch * self.batch_size)

    def own(self, batch: int) -> range:
        """Returns the positions in a global batch of the worker's examples."""
        size = self.size_of(batch)
        num_replicas, replicas, proportions = self.division
        return range(size)[Shares(size, num_replicas, proportions).of(replicas)]

    def read(self, batch: int) -> range:
        """Returns the positions in a global batch of the examples that the worker reads."""
        return self.own(batch) or range(self.needs_examples)

    def numbers_of(self, places: Any, first_batch: int) -> Any:
        """Returns the numbers, among all examples, of the examples that the worker reads.

        Args:
            places: Their indices among the worker's, counted from `first_batch`: an int, or an
                array.
            first_batch: The number of a global batch.
        """
        full = self.read(0)
        if not full:  # only the last batch, of another size, has examples for this worker
            last = self.num_batches - 1  # type: ignore[operator]  # otherwise there is none
            return last * self.batch_size + self.read(last).start + places
        batches = first_batch + places // len(full)
        if self.num_batches is None:
            return batches * self.batch_size + full.start + places % len(full)
        last = self.num_batches - 1
        in_last = batches >= last
        batches = batches - in_last * (batches - last)
        starts = full.start + in_last * (self.read(last).start - full.start)
        return batches * self.batch_size + starts + places - (batches - first_batch) * len(full)


def owned(plan: Plan) -> Callable[[Division], BatchShares] | None:
    """Returns the function from a division to the plan of a worker's examples of every batch.

    None if they cannot be known in advance. Each pass takes its own plan, whose functions
    contain the position at which the pass has begun.

    Args:
        plan: The plan of global batches.
    """
    while isinstance(plan, Prefetch | WithOptions):  # distributed batches are read ahead anyway
        plan = plan.inputs[0]
    if not isinstance(plan, Batch):
        return None
    elements = plan.inputs[0]
    maps: list[Map] = []
    source = elements
    while isinstance(source, Map | Prefetch | WithOptions):
        if isinstance(source, Map):
            maps.append(source)
        source = source.inputs[0]
    length = source.cardinality()
    order, rows = _order_of(source)
    if length == UNKNOWN or not (maps or rows is not None):
        return None
    is_endless = length == INFINITE
    sharding_by = functools.partial(
        BatchSharding,
        plan.batch_size,
        None if is_endless else plan.cardinality(),
        None if is_endless else length,
        needs_examples=elements.known_signature is None,
    )

    def plan_of_pass(division: Division) -> BatchShares:
        sharding = sharding_by(division=division)
        examples = OwnExamples(order, source, rows, sharding)
        made: Plan = examples
        for each in reversed(maps):
            # A process has a copy of the function, without the position at which a pass has begun.
            if len(division.replicas) < division.num_replicas and not each.in_processes:
                each = each.with_function(_Renumbered(each.function, sharding, examples))
            made = each.with_inputs([made])
        return BatchShares(made, examples, elements)

    # Passes share their worker processes.
    in_processes = any(each.in_processes for each in maps)
    return functools.lru_cache(maxsize=1)(plan_of_pass) if in_processes else plan_of_pass


def _order_of(plan: Plan) -> tuple[Plan, Rows | None]:
    """Returns the plan of the numbers of a source's rows, and the rows; else `plan` and None."""
    if not plan.inputs:
        # Rows that differ between passes are not a source that passes leave unchanged.
        rows = None if plan.lasting else plan.rows()
        return (plan, None) if rows is None else (Range([0, len(rows), 1], np.int64), rows)
    if isinstance(plan, Map) and plan.is_of_single_elements:
        order, rows = _order_of(plan.inputs[0])
        return (plan, None) if rows is None else (order, _CalledRows(rows, plan))
    if not isinstance(plan, _BY_POSITION):
        return plan, None
    order, rows = _order_of(plan.inputs[0])
    return (plan, None) if rows is None else (plan.with_inputs([order]), rows)


def _rows_at(rows: Rows, numbers: np.ndarray) -> Leaves:
    """Returns rows by their numbers; consecutive ones without a copy, where that is possible."""
    first = int(numbers[0])
    if np.array_equal(numbers, np.arange(first, first + len(numbers))):
        return rows.slice(first, first + len(numbers))
    return rows.take(numbers)


class _CalledRows(Rows):
    """The results of a function of a source's rows, which is called when they are taken."""

    def __init__(self, rows: Rows, mapped: Map):
        self._rows = rows
        self._function = mapped.function
        self._structure = mapped.inputs[0].structure
        self._num_threads = mapped.most_callers
        self._executor: ThreadPool | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Leaves:
        return stack(self.elements(indices))

    def elements(self, indices: np.ndarray) -> list[Leaves]:
        """Returns the elements at `indices`, which may have different shapes."""
        numbers = indices.tolist()
        if isinstance(self._rows, _CalledRows):
            rows = self._rows.elements(indices)
        else:
            rows = [*zip(*_rows_at(self._rows, indices), strict=True)]
        if self._num_threads == 1:
            return self._results(rows, numbers)
        if self._executor is None:
            self._executor = ThreadPool(self._num_threads, "unison-data-map")
        count = -(-len(rows) // self._num_threads)
        parts = [slice(first, first + count) for first in range(0, len(rows), count)]
        results = self._executor.map(lambda part: self._results(rows[part], numbers[part]), parts)
        return [*itertools.chain.from_iterable(results)]

    def _results(self, rows: Sequence[Leaves], numbers: Sequence[int]) -> list[Leaves]:
        results = []
        for number, row in zip(numbers, rows, strict=True):
            with _saying(number, "the source's"):
                results.append(self._function(row, self._structure, None, number))
        return results


class OwnExamples(Transformation):
    """A worker's consecutive examples.

    Args:
        order: The examples of all workers, or the numbers of their rows.
        source: The examples of all workers.
        rows: The rows, if `order` yields numbers.
        sharding: Which examples are the worker's.
    """

    def __init__(self, order: Plan, source: Plan, rows: Rows | None, sharding: BatchSharding):
        super().__init__(order)
        self._source = source
        self.rows_of_source = rows
        self.sharding = sharding
        self._latest: weakref.ref[_OwnStream] | None = None

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return self._source.known_signature

    @property
    def structure(self) -> Structure:
        return self._source.structure

    def cardinality(self) -> int:
        return INFINITE if self.sharding.num_examples is None else UNKNOWN

    @property
    def latest(self) -> _OwnStream:
        """The stream that was opened last."""
        stream = None if self._latest is None else self._latest()
        assert stream is not None
        return stream

    def _stream(self) -> Stream:
        stream = _OwnStream(self, self._input.stream())
        self._latest = weakref.ref(stream)
        return stream


class _OwnStream(Stream):
    """Reads the worker's examples of consecutive global batches."""

    moving = ("_stream", "_batch", "first_batch", "_position")

    def __init__(self, plan: OwnExamples, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._batch = 0
        #: The first batch that was read.
        self.first_batch = 0
        self._block: Chunk | None = None
        self._position = 0

    def next(self) -> Leaves | None:
        block = self._open()
        if block is None:
            return None
        self._position += 1
        return block[self._position - 1]

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and (block := self._open()) is not None:
            stop = min(self._position + count, len(block))
            blocks.append(block.part(self._position, stop).stacked())
            count -= stop - self._position
            self._position = stop
        return concatenate(blocks) if blocks else None

    def state(self) -> State:
        return super().state(), None if self._block is None else self._block.state()

    def restore(self, state: State) -> None:
        moving, block = state
        super().restore(moving)
        self._block = None if block is None else Chunk.of_state(block)

    def skip_batches(self, count: int) -> None:
        """Begins at a later batch."""
        self._stream.skip(count * self._plan.sharding.batch_size)
        self._batch = self.first_batch = count

    def _open(self) -> Chunk | None:
        """Returns the examples of the next batch with one to be read; None at the end."""
        sharding = self._plan.sharding
        while self._block is None or self._position >= len(self._block):
            if self._batch == sharding.num_batches:
                return None
            block = self._stream.next_block(sharding.batch_size)
            if block is None:
                return None
            where = sharding.read(self._batch)
            self._batch += 1
            self._block = self._taken(block, where) if where else None
            self._position = 0
        return self._block

    def _taken(self, block: Leaves, where: range) -> Chunk:
        rows = self._plan.rows_of_source
        part = tuple(leaf[where.start : where.stop] for leaf in block)
        if rows is None:
            return Chunk(0, part)
        (numbers,) = part
        if isinstance(rows, _CalledRows):
            return Chunk(0, elements=rows.elements(numbers))
        return Chunk(0, _rows_at(rows, numbers))


class BatchShares(Transformation):
    """A worker's examples of every global batch, stacked, and the size of the global batch.

    Args:
        mapped: The worker's examples.
        examples: Their inputs.
        elements: The examples of all workers.
    """

    def __init__(self, mapped: Plan, examples: OwnExamples, elements: Plan):
        super().__init__(mapped)
        self._examples = examples
        self._elements = elements

    def cardinality(self) -> int:
        count = self._examples.sharding.num_batches
        return INFINITE if count is None else count

    def nothing(self) -> Leaves:
        """Returns a batch without examples."""
        signature = self._elements.known_signature
        assert signature is not None  # otherwise, one example of every batch is read
        return tuple(
            np.empty((0, *(size or 0 for size in spec.shape or ())), spec.dtype)
            for spec in signature.specs
        )

    def _stream(self) -> Stream:
        mapped = self._input.stream()
        return _SharesStream(self, mapped, self._examples)


class _SharesStream(Stream):
    moving = ("_stream", "_batch")

    def __init__(self, plan: BatchShares, stream: Stream, examples: OwnExamples):
        self._plan = plan
        self._stream = stream
        self._examples = examples.latest
        self._sharding = examples.sharding
        self._batch = 0

    def next(self) -> Leaves | None:
        sharding = self._sharding
        if self._batch == sharding.num_batches:
            return None
        size, own = sharding.size_of(self._batch), sharding.own(self._batch)
        where = sharding.read(self._batch)
        self._batch += 1
        block = self._stream.next_block(len(where)) if where else self._plan.nothing()
        if block is None:
            return None
        return (*(leaf[: len(own)] for leaf in block), np.int64(size))

    def skip(self, count: int) -> int:
        if self._batch:
            return super().skip(count)
        most = self._sharding.num_batches
        self._batch = count if most is None else min(count, most)
        self._examples.skip_batches(self._batch)
        return self._batch


@contextlib.contextmanager
def _saying(number: int, whose: str = "those that all workers read together") -> Iterator[None]:
    """Inside, an error gets a note with an element's number among all workers' elements."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It is element {number} of {whose}.")
        raise


class _Renumbered:
    """A function of a worker's examples, called with their numbers among all examples.

    All other attributes are the function's own.
    """

    def __init__(self, function: ElementFunction, sharding: BatchSharding, examples: OwnExamples):
        self._function = function
        self._numbers: Callable[[Any], Any] = lambda places: sharding.numbers_of(
            places, examples.latest.first_batch
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(
        self, leaves: Leaves, structure: Structure, epoch: Any = None, index: int = 0
    ) -> Leaves:
        number = self._numbers(index)
        with _saying(number):
            return self._function(leaves, structure, epoch, number)

    def for_rows(self, structure: Structure, epoch: Any) -> Callable[[Leaves, int], Leaves]:
        of_row = self._function.for_rows(structure, epoch)

        def of_own_row(row: Leaves, index: int) -> Leaves:
            number = self._numbers(index)
            with _saying(number):
                return of_row(row, number)

        return of_own_row

    def state(self) -> State:
        return self._function.state()

    def restore(self, state: State) -> None:
        self._function.restore(state)

    def on_blocks(self, inputs: Signature) -> BlockFunction | None:
        return self._of_all(self._function.on_blocks(inputs))

    def on_text_blocks(
        self, sample: Leaves, structure: Structure, most_callers: int
    ) -> BlockFunction | None:
        return self._of_all(self._function.on_text_blocks(sample, structure, most_callers))

    def _of_all(self, function: BlockFunction | None) -> BlockFunction | None:
        if function is None:
            return None
        return lambda block, places: function(block, self._numbers(places))
