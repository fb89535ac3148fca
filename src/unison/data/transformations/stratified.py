"""`stratified_batch`: batches that contain every class in given proportions.

If the input has access by index, only indices are drawn. Otherwise, elements are buffered
by class. The order is a function of the seed, the pass and the classes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from unison.data.functions import BlockFunction, ElementFunction, note_place
from unison.data.leaves import stack
from unison.data.passes import Passes
from unison.data.plan import (
    INFINITE,
    UNKNOWN,
    Plan,
    Rows,
    Stream,
    Transformation,
    looking_at,
)
from unison.data.randomness import random_generator
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError

#: The purposes of draws: the order of a class, the order in a batch, the positions in buffers.
_OF_CLASS, _OF_BATCH, _PLACES = 0, 1, 2

#: The number of elements for which the class function is called at a time.
_ROWS_AT_ONCE = 1024


class StratifiedBatch(Transformation):
    """Batches of elements of several classes, in given proportions in every batch.

    Args:
        source: The input.
        size: The size of the batches.
        class_of: Returns the class of an element, an integer of at least 0.
        weights: The proportion of each class in a batch; they need not add up to 1.
        repeats: Whether a pass continues until every element has been used, and repeats the
            elements of a class that runs out; otherwise it ends with the first class that runs out.
        buffer_size: The number of elements of a class that are buffered without access by index.
        seed: Determines the order.

    Raises:
        InvalidArgumentError: A size is not a positive number.
        ValueError: The weights are not proportions.
    """

    identity = ("size", "repeats", "buffer_size", "seed")
    lasting = ("_passes",)

    def __init__(
        self,
        source: Plan,
        size: int,
        class_of: ElementFunction,
        weights: np.ndarray,
        repeats: bool,
        buffer_size: int,
        seed: int,
    ):
        super().__init__(source)
        for what, number in (("batch_size", size), ("buffer_size", buffer_size)):
            if number < 1:
                raise InvalidArgumentError(
                    message=f"Expected {what} to be greater than zero. Received: {what}={number}"
                )
        self.size = size
        self.shares = shares_of(weights, "weights")
        self.repeats = repeats
        # A batch may be of one class.
        self.buffer_size = max(buffer_size, size)
        self.seed = seed
        self._class_of = class_of
        self._members: list[np.ndarray] | None = None
        self._passes = Passes()

    def with_inputs(self, inputs: Sequence[Plan]) -> Self:
        made = super().with_inputs(inputs)
        made._members = None  # which were those of these inputs
        return made

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return inputs[0].batched(self.size)

    def cardinality(self) -> int:
        length = self._input.cardinality()
        if length in (0, INFINITE):
            return length
        return UNKNOWN if self._input.rows() is None else self._count_batches()

    def _count_batches(self) -> int:
        sizes = np.array([len(members) for members in self.members])
        quotas = Quotas(self.shares, self.size)
        taken = np.zeros_like(sizes)
        count = 0
        while not self.has_ended(taken, counts := quotas.next(), sizes):
            taken += counts
            count += 1
        return count

    def has_ended(self, taken: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> bool:
        """Whether a pass ends, after `taken` elements of each class, if `counts` are next."""
        if self.repeats:
            return bool((taken >= sizes)[self.shares > 0].all())
        return bool((taken + counts > sizes).any())

    @property
    def members(self) -> list[np.ndarray]:
        """The indices of the elements of each class.

        Raises:
            InvalidArgumentError: A class with a positive weight has no elements.
        """
        if self._members is None:  # not cached_property: see `Plan.signature`
            self._members = self._find_members()
        return self._members

    def _find_members(self) -> list[np.ndarray]:
        rows = self._input.rows()
        assert rows is not None
        with looking_at(self._input):
            classes = self._classes_of(rows)
        members = [np.flatnonzero(classes == number) for number in range(len(self.shares))]
        for number, share in enumerate(self.shares):
            if share and not len(members[number]):
                raise InvalidArgumentError(
                    message=f"The dataset has no element of class {number}, of which every batch "
                    f"of stratified_batch is to hold {share:.3g}. Give it the weight 0."
                )
        return members

    def _classes_of(self, rows: Rows) -> np.ndarray:
        signature = self._input.known_signature
        on_blocks = None
        if signature is not None and signature.is_static:
            on_blocks = self._class_of.on_blocks(signature)
        if on_blocks is None:
            epoch = self._class_of.begin()
            numbers = range(len(rows))
            return np.array([self.class_of(rows.element(i), epoch, i) for i in numbers], int)
        found = [np.zeros(0, int)]
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(rows))
            found.append(self._checked_block(on_blocks, rows.slice(start, stop), start, stop))
        return np.concatenate(found)

    def _checked_block(
        self, function: BlockFunction, block: Leaves, start: int, stop: int
    ) -> np.ndarray:
        leaves = function(block, np.arange(start, stop))
        classes = leaves[0]
        is_class = classes.ndim == 1 and classes.dtype.kind in "iu" and len(leaves) == 1
        if not is_class or classes.min() < 0 or classes.max() >= len(self.shares):
            for index, of_one in enumerate(zip(*leaves, strict=True), start):
                self._checked(of_one, index)
        return classes.astype(int)

    def class_of(self, element: Leaves, epoch: Any, index: int) -> int:
        """Returns the class of element `index`.

        Raises:
            ValueError: The function does not return a class number.
        """
        try:
            leaves = self._class_of(element, self._input.structure, epoch, index)
        except Exception as error:
            note_place(error, self._class_of.stage, index)
            raise
        return self._checked(leaves, index)

    def _checked(self, leaves: Leaves, index: int) -> int:
        return checked_class(leaves, len(self.shares), self._class_of.stage, index)

    def begin(self) -> Any:
        """Returns the common part of the calls of the class function in one pass."""
        return self._class_of.begin()

    def _stream(self) -> Stream:
        epoch = self._passes.begin()
        rows = self._input.rows()
        if rows is not None:
            return _IndexedStream(self, rows, epoch)
        return _BufferedStream(self, self._input.stream(), epoch)


def shares_of(weights: Any, what: str) -> np.ndarray:
    """Returns weights normalized to a sum of 1.

    Raises:
        ValueError: A weight is negative, or all are 0.
    """
    array = np.asarray(weights, float)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all() or array.min() < 0:
        array = np.zeros(1)
    if not array.sum():
        raise ValueError(
            f"Expected {what}, one a class, none negative and not all 0. Received: {weights!r}"
        )
    return array / array.sum()


def checked_class(leaves: Leaves, num_classes: int, stage: str, index: int) -> int:
    """Returns the result of a class function for element `index`.

    Raises:
        ValueError: It is not a class number.
    """
    if len(leaves) == 1 and isinstance(leaves[0], np.integer) and 0 <= leaves[0] < num_classes:
        return int(leaves[0])
    raise ValueError(
        f"The class_func of {stage} must return one integer of at least 0 and less than "
        f"{num_classes}, the number of classes. Received: {leaves!r} for element {index}"
    )


class Quotas:
    """The number of elements of each class in every batch.

    Each class gets its share, rounded down, in every batch. The remaining places are given to the
    classes that lack most, so that over many batches the proportions are exact.

    Args:
        shares: The proportion of each class.
        size: The size of the batches.

    Examples:
        >>> quotas = Quotas(np.array([0.5, 0.25, 0.25]), 6)
        >>> [quotas.next().tolist() for _ in range(3)]
        [[3, 2, 1], [3, 1, 2], [3, 2, 1]]
    """

    def __init__(self, shares: np.ndarray, size: int):
        exact = np.round(shares * size, 9)
        self._always = np.floor(exact).astype(int)
        self._rest = exact - self._always
        self._places = size - int(self._always.sum())
        self._owed = np.zeros(len(shares))

    def next(self) -> np.ndarray:
        """Returns the numbers of the next batch."""
        counts = self._always.copy()
        self._owed = np.round(self._owed + self._rest, 9)
        first = np.argsort(-self._owed, kind="stable")[: self._places]
        counts[first] += 1
        self._owed[first] -= 1
        return counts

    def state(self) -> State:
        """Returns what the classes lack."""
        return self._owed.copy()

    def restore(self, state: State) -> None:
        """Restores the state of another one."""
        self._owed = state.copy()


class _IndexedStream(Stream):
    """Batches of rows whose indices are drawn."""

    moving = ("_epoch", "_quotas", "_taken", "_position", "_has_ended")

    def __init__(self, plan: StratifiedBatch, rows: Rows, epoch: int):
        self._plan = plan
        self._rows = rows
        self._epoch = epoch
        self._quotas = Quotas(plan.shares, plan.size)
        #: The number of used elements of each class.
        self._taken = np.zeros(len(plan.shares), int)
        self._position = 0
        self._has_ended = not len(rows)
        #: The order of the current round through each class.
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def restore(self, state: State) -> None:
        super().restore(state)
        self._orders = {}

    def next(self) -> Leaves | None:
        if self._has_ended:
            return None
        members = self._plan.members
        sizes = np.array([len(indices) for indices in members])
        counts = self._quotas.next()
        if self._plan.has_ended(self._taken, counts, sizes):
            self._has_ended = True
            return None
        parts = [self._next_of(number, int(count)) for number, count in enumerate(counts)]
        order = random_generator(self._plan.seed, self._epoch, _OF_BATCH, self._position)
        self._taken = self._taken + counts
        self._position += 1
        return self._rows.take(order.permutation(np.concatenate(parts)))

    def _next_of(self, number: int, count: int) -> np.ndarray:
        """Returns the next indices of a class, beginning again after its last one."""
        if not count:
            return np.zeros(0, int)
        members = self._plan.members[number]
        parts = []
        start = int(self._taken[number])
        while count:
            turn, place = divmod(start, len(members))
            part = members[self._order(number, turn, len(members))[place : place + count]]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def _order(self, number: int, turn: int, length: int) -> np.ndarray:
        latest, order = self._orders.get(number, (-1, np.zeros(0, int)))
        if latest != turn:
            generator = random_generator(self._plan.seed, self._epoch, _OF_CLASS, number, turn)
            order = generator.permutation(length)
            self._orders[number] = turn, order
        return order


class _BufferedStream(Stream):
    """Batches of elements that are buffered by class."""

    moving = (
        "_stream",
        "_epoch",
        "_draws",
        "_quotas",
        "_counts",
        "_fresh",
        "_given",
        "_position",
        "_has_ended",
    )

    def __init__(self, plan: StratifiedBatch, stream: Stream, epoch: int):
        self._plan = plan
        self._stream = stream
        self._epoch = epoch
        self._calls = plan.begin()
        self._draws = random_generator(plan.seed, epoch, _PLACES)
        self._quotas = Quotas(plan.shares, plan.size)
        #: The numbers of elements of the next batch.
        self._counts = self._quotas.next()
        #: For each class, the buffered elements, and those that may be repeated.
        self._fresh: list[list[Leaves]] = [[] for _ in plan.shares]
        self._given: list[list[Leaves]] = [[] for _ in plan.shares]
        self._position = 0
        self._has_ended = False

    def next(self) -> Leaves | None:
        while self._is_short() and not self._has_ended and not self._is_full():
            element = self._stream.next()
            if element is None:
                self._has_ended = True
            else:
                self._position += 1
                number = self._plan.class_of(element, self._calls, self._position - 1)
                if self._plan.shares[number]:
                    self._keep(self._fresh[number], element)
        if self._has_ended and (self._is_short() if not self._plan.repeats else self._is_empty()):
            return None
        batch = [element for number in range(len(self._counts)) for element in self._take(number)]
        self._counts = self._quotas.next()
        return stack([batch[index] for index in self._draws.permutation(len(batch))])

    def _is_empty(self) -> bool:
        return not any(self._fresh)

    def _is_short(self) -> bool:
        """Whether a class has too few elements for the next batch."""
        pairs = zip(self._fresh, self._counts, strict=True)
        return any(len(buffer) < count for buffer, count in pairs)

    def _is_full(self) -> bool:
        """Whether reading more would drop an element that must not be dropped."""
        if not self._plan.repeats:
            return False
        return any(len(buffer) >= self._plan.buffer_size for buffer in self._fresh)

    def _keep(self, buffer: list[Leaves], element: Leaves) -> None:
        """Adds an element to a buffer; in a full one, it replaces another element."""
        if len(buffer) < self._plan.buffer_size:
            buffer.append(element)
        else:
            buffer[int(self._draws.integers(len(buffer)))] = element

    def _take(self, number: int) -> list[Leaves]:
        """Returns the elements of a class for the next batch, with repetitions if necessary."""
        fresh, given = self._fresh[number], self._given[number]
        taken = []
        for _ in range(self._counts[number]):
            if fresh:
                place = int(self._draws.integers(len(fresh)))
                fresh[place], fresh[-1] = fresh[-1], fresh[place]
                taken.append(fresh.pop())
                if self._plan.repeats:
                    self._keep(given, taken[-1])
            elif given:
                taken.append(given[int(self._draws.integers(len(given)))])
            else:
                raise InvalidArgumentError(
                    message=f"There is no element of class {number} among the first "
                    f"{self._position}, and another class has filled its buffer, or they are all. "
                    "Shuffle the elements first, raise buffer_size (received: "
                    f"{self._plan.buffer_size}), or give the class the weight 0."
                )
        return taken
