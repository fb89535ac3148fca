"""Dynamic sharding: the sources of a dataset, replaced by the rows that a worker is handed out.

A source is a plan with access by index: arrays, ranges, names of files, Parquet; also a selection
or a zip of them, so that `range(100).take(5)` has five elements, on however many workers. What
follows a source is computed by the worker that was handed its rows: each `batch`, `shuffle` or
`take` further on is one of this worker's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unison.data.caching.cache import Cache
from unison.data.caching.saving import Snapshot
from unison.data.leaves import concatenate, count_rows
from unison.data.passes import Passes
from unison.data.plan import UNKNOWN, Plan, Rows, SameElements, Stream
from unison.data.state import State
from unison.data.structure import Leaves
from unison.data.transformations.combination import Enumerate, Zip
from unison.data.transformations.guarding import AssertCardinality
from unison.data.transformations.nesting import FromDatasets
from unison.data.transformations.repetition import Repeat
from unison.data.transformations.selection import Shard, Skip, Take
from unison.errors import InvalidArgumentError

#: Transformations by position, which are a part of the source that they select from.
_OF_POSITIONS = (Enumerate, Shard, Skip, Take, Zip)

#: Hands out rows of a source: called with its number, the repetition, and whether a row stands for
#: many elements. Returns the first row, and the one after the last; None if none are left.
HandOut = Callable[[int, int, bool], tuple[int, int] | None]


def split_sizes(plan: Plan) -> list[int]:
    """Returns the number of rows of each source, in order.

    Raises:
        InvalidArgumentError: A source cannot be divided.
    """
    return [_rows_of(source) for source in _sources(plan)]


def _sources(plan: Plan) -> Iterator[Plan]:
    if _is_source(plan):
        yield plan
        return
    if isinstance(plan, Snapshot) or (isinstance(plan, Cache) and plan.is_in_files):
        raise InvalidArgumentError(
            message=f"ShardingPolicy.DYNAMIC cannot be combined with files that keep elements "
            f"({plan.name}): a worker has other elements in every pass. Use cache() without a "
            "filename, or ShardingPolicy.OFF."
        )
    if isinstance(plan, Zip):
        raise InvalidArgumentError(
            message="ShardingPolicy.DYNAMIC cannot divide a zip of datasets without access by "
            f"index: {plan.description[:300]}. Zip the arrays or names of files, and map them then."
        )
    for each in plan.inputs:
        yield from _sources(each)


def _is_source(plan: Plan) -> bool:
    if not plan.inputs:
        return True
    if not isinstance(plan, _OF_POSITIONS):
        return False
    return all(_is_source(each) and each.rows() is not None for each in plan.inputs)


def _rows_of(source: Plan) -> int:
    rows = source.rows()
    if rows is None:
        raise InvalidArgumentError(
            message=f"ShardingPolicy.DYNAMIC cannot divide the source {source.name}, which has no "
            "access by index. Use from_tensor_slices, range, or a dataset of names of files; or "
            "ShardingPolicy.OFF, under which every worker computes all elements."
        )
    return len(rows)


def with_splits(plan: Plan, hand_out: HandOut) -> Plan:
    """Returns the plan of the elements that come from the rows that are handed out."""
    numbers = iter(range(len(list(_sources(plan)))))

    def rewrite(each: Plan, is_nested: bool) -> Plan:
        if _is_source(each):
            return Splits(each, next(numbers), hand_out, is_nested)
        is_nested = is_nested or isinstance(each, FromDatasets)
        inputs = [rewrite(source, is_nested) for source in each.inputs]
        if isinstance(each, AssertCardinality):
            return inputs[0]  # it is the number of all workers' elements
        if isinstance(each, Repeat):
            if not any(map(_rows_of, _sources(each.inputs[0]))):
                return inputs[0]  # all passes are empty, on all workers
            return Again(inputs[0], each.passes)
        return each.with_inputs(inputs)

    return rewrite(plan, False)


class Splits(SameElements):
    """The rows of a source that are handed out to this worker.

    Args:
        source: The source.
        number: Its number in the plan.
        hand_out: Hands out rows.
        is_nested: Whether a row stands for many elements, as the name of a file.
    """

    def __init__(self, source: Plan, number: int, hand_out: HandOut, is_nested: bool):
        super().__init__(source)
        self._number = number
        self._hand_out = hand_out
        self._is_nested = is_nested
        #: Each pass over the source is a repetition.
        self._repetitions = Passes()

    def with_inputs(self, inputs: Any) -> Splits:
        return Splits(inputs[0], self._number, self._hand_out, self._is_nested)

    def cardinality(self) -> int:
        return UNKNOWN

    def _stream(self) -> Stream:
        rows = self._input.rows()
        assert rows is not None
        repetition = self._repetitions.begin()
        return _SplitsStream(
            rows, lambda: self._hand_out(self._number, repetition, self._is_nested)
        )


class _StreamOfWorker(Stream):
    """A stream that is never resumed: an input worker that restarts does not go back to it."""

    def state(self) -> State:
        return None

    def restore(self, state: State) -> None:
        del state


class _SplitsStream(_StreamOfWorker):
    def __init__(self, rows: Rows, hand_out: Callable[[], tuple[int, int] | None]):
        self._rows = rows
        self._hand_out = hand_out
        self._start = self._stop = 0
        self._has_ended = False

    def _present(self) -> bool:
        """Whether there is a row; asks for more if necessary."""
        while self._start >= self._stop and not self._has_ended:
            found = self._hand_out()
            if found is None:
                self._has_ended = True
            else:
                self._start, self._stop = found
        return self._start < self._stop

    def next(self) -> Leaves | None:
        if not self._present():
            return None
        self._start += 1
        return self._rows.element(self._start - 1)

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and self._present():
            stop = min(self._start + count, self._stop)
            blocks.append(self._rows.slice(self._start, stop))
            count -= stop - self._start
            self._start = stop
        return concatenate(blocks) if blocks else None


class Again(SameElements):
    """The elements of a `repeat` whose passes may be empty on this worker: others had the rows."""

    def __init__(self, source: Plan, count: int):
        super().__init__(source)
        self._count = count

    def _stream(self) -> Stream:
        return _AgainStream(self._input, self._count)


class _AgainStream(_StreamOfWorker):
    def __init__(self, source: Plan, count: int):
        self._source = source
        self._left = count
        self._pass: Stream | None = None

    def _open(self) -> Stream | None:
        if self._pass is None and self._left:
            self._pass = self._source.stream()
        return self._pass

    def _close(self) -> None:
        self._pass = None
        self._left -= 1

    def next(self) -> Leaves | None:
        while (stream := self._open()) is not None:
            element = stream.next()
            if element is not None:
                return element
            self._close()
        return None

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        while count and (stream := self._open()) is not None:
            block = stream.next_block(count)
            if block is None:
                self._close()
                continue
            blocks.append(block)
            count -= count_rows(block)
        return concatenate(blocks) if blocks else None
