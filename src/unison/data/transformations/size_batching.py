"""`batch_by_size`: batches with as many elements as a budget of tokens or bytes allows."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.data.functions import ElementFunction, note_place
from unison.data.plan import INFINITE, UNKNOWN, Plan, Stream, Transformation
from unison.data.specs import Signature
from unison.data.structure import Leaves
from unison.data.transformations.batching import PaddedBatch
from unison.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Budget:
    """The limits of a batch.

    Attributes:
        max_size: The maximum sum of the elements' sizes.
        counts_padding: Whether every element counts as large as the largest one of its batch.
        max_count: The maximum number of elements; None for no limit.

    Raises:
        InvalidArgumentError: A limit is not a positive number.
    """

    max_size: float
    counts_padding: bool = True
    max_count: int | None = None

    def __post_init__(self) -> None:
        for what in ("max_size", "max_count"):
            limit = getattr(self, what)
            if limit is not None and not limit > 0:
                raise InvalidArgumentError(
                    message=f"Expected {what} to be greater than zero. Received: {what}={limit}"
                )

    def allows(self, count: int, total: float, largest: float) -> bool:
        """Whether a batch may contain elements of these sizes."""
        size = count * largest if self.counts_padding else total
        return size <= self.max_size and count <= (self.max_count or sys.maxsize)


class BatchBySize(Transformation):
    """Padded batches of as many consecutive elements as a budget allows.

    Args:
        source: The input.
        size_of: Returns the size of an element.
        budget: The limits of a batch.
        sort_window: The number of elements that are read ahead and grouped by size.
        drops_oversize: Whether an element that exceeds the budget is left out; otherwise it is an
            error.
        shapes: As in `PaddedBatch`.
        values: As in `PaddedBatch`.

    Raises:
        InvalidArgumentError: The window is not a positive number.
    """

    identity = ("_budget", "_sort_window")

    def __init__(
        self,
        source: Plan,
        size_of: ElementFunction,
        budget: Budget,
        sort_window: int,
        drops_oversize: bool,
        shapes: Any,
        values: Any,
    ):
        super().__init__(source)
        if sort_window < 1:
            raise InvalidArgumentError(
                message="Expected sort_window to be greater than zero. Received: "
                f"sort_window={sort_window}"
            )
        self._size_of = size_of
        self._budget = budget
        self._sort_window = sort_window
        self._drops_oversize = drops_oversize
        self._padding = PaddedBatch(source, 1, shapes, values, drop_remainder=False)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._padding.signature_from(inputs)

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length in (0, INFINITE) else UNKNOWN

    def _stream(self) -> Stream:
        sized: Stream = _SizedStream(self, self._input.stream())
        if self._sort_window > 1:
            sized = _SortedStream(sized, self._sort_window)
        return _BatchBySizeStream(self._padding, sized, self._budget)

    def size_of(self, element: Leaves, epoch: Any, index: int) -> float | None:
        """Returns the size of element `index`; None if it exceeds the budget.

        Raises:
            ValueError: The function does not return a nonnegative number.
            InvalidArgumentError: The element exceeds the budget, and such elements are not dropped.
        """
        try:
            leaves = self._size_of(element, self._input.structure, epoch, index)
            size = leaves[0] if len(leaves) == 1 else None
            if not isinstance(size, np.integer | np.floating) or not size >= 0:
                raise ValueError(
                    "The size_func of batch_by_size must return one number that is not negative. "
                    f"Received: {leaves!r}"
                )
            if size > self._budget.max_size and not self._drops_oversize:
                raise InvalidArgumentError(
                    message=f"Element {index} has size {size}, and a batch holds "
                    f"max_size={self._budget.max_size}. Make it smaller with map, or pass "
                    "drop_oversize=True."
                )
        except Exception as error:
            note_place(error, self._size_of.stage, index)
            raise
        return None if size > self._budget.max_size else float(size)

    def begin(self) -> Any:
        """Returns the common part of the calls of the size function in one pass."""
        return self._size_of.begin()


class _SizedStream(Stream):
    """Every element, after its size, without those that exceed the budget."""

    moving = ("_stream", "_position")

    def __init__(self, plan: BatchBySize, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._epoch = plan.begin()
        self._position = 0

    def next(self) -> Leaves | None:
        while (element := self._stream.next()) is not None:
            self._position += 1
            size = self._plan.size_of(element, self._epoch, self._position - 1)
            if size is not None:
                return (size, *element)
        return None


class _SortedStream(Stream):
    """The elements of every window in the order of their sizes.

    The order is ascending in one window and descending in the next one, so that the last elements
    of a window and the first ones after them have similar sizes, too.
    """

    moving = ("_stream", "_read", "_sorted", "_falls")

    def __init__(self, stream: Stream, size: int):
        self._stream = stream
        self._size = size
        self._read: list[Leaves] = []
        self._sorted: collections.deque[Leaves] = collections.deque()
        self._falls = False

    def next(self) -> Leaves | None:
        if not self._sorted:
            while len(self._read) < self._size and (element := self._stream.next()) is not None:
                self._read.append(element)
            self._read.sort(key=lambda element: element[0], reverse=self._falls)
            self._sorted = collections.deque(self._read)
            self._read = []
            self._falls = not self._falls
        return self._sorted.popleft() if self._sorted else None


class _BatchBySizeStream(Stream):
    """Batches of elements that follow their sizes."""

    moving = ("_stream", "_waiting")

    def __init__(self, padding: PaddedBatch, stream: Stream, budget: Budget):
        self._padding = padding
        self._stream = stream
        self._budget = budget
        #: The element for which the last batch had no room.
        self._waiting: Leaves | None = None

    def next(self) -> Leaves | None:
        batch: list[Leaves] = []
        total = largest = 0.0
        while (sized := self._waiting or self._stream.next()) is not None:
            size, *element = sized
            total, largest = total + size, max(largest, size)
            if batch and not self._budget.allows(len(batch) + 1, total, largest):
                self._waiting = sized
                break
            self._waiting = None
            batch.append(tuple(element))
        return self._padding.batch_of(batch) if batch else None
