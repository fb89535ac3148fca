"""A subset of a dataset's elements, by their values: `filter`, `take_while`, `unique`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from unison.data.functions import BlockFunction, ElementFunction, as_truth, note_place
from unison.data.plan import UNKNOWN, Plan, Rows, SameElements, Stream
from unison.data.specs import ArraySpec
from unison.data.state import State
from unison.data.structure import Leaves

#: The number of rows for which a predicate of blocks is called at a time.
_ROWS_AT_ONCE = 256


class Filter(SameElements):
    """The elements for which a predicate is true."""

    lasting = ("_predicate",)

    def __init__(self, source: Plan, predicate: ElementFunction):
        super().__init__(source)
        self._predicate = predicate

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length == 0 else UNKNOWN

    def _stream(self) -> Stream:
        rows = self._input.rows()
        inputs = self._input.known_signature
        if rows is not None and inputs is not None and inputs.is_static:
            predicate = self._predicate.on_blocks(inputs)
            if predicate is not None:
                return _FilteredRows(rows, predicate, self._predicate.stage)
        return _FilterStream(self._input.stream(), self._input, self._predicate)


class _FilterStream(Stream):
    moving: ClassVar[Sequence[str]] = ("_stream", "_position")

    def __init__(self, stream: Stream, source: Plan, predicate: ElementFunction):
        self._stream = stream
        self._source = source
        self._predicate = predicate
        self._epoch = predicate.begin()
        self._position = 0

    def next(self) -> Leaves | None:
        while (element := self._stream.next()) is not None:
            if self._holds(element):
                return element
        return None

    def _holds(self, element: Leaves) -> bool:
        index = self._position
        self._position += 1
        try:
            answer = self._predicate(element, self._source.structure, self._epoch, index)
            return as_truth(answer, self._predicate.stage)
        except Exception as error:
            note_place(error, self._predicate.stage, index)
            raise


class _FilteredRows(Stream):
    """The rows for which a predicate of blocks is true."""

    moving = ("_position", "_kept")

    def __init__(self, rows: Rows, predicate: BlockFunction, stage: str):
        self._rows = rows
        self._predicate = predicate
        self._stage = stage
        self._position = 0
        self._kept: collections.deque[int] = collections.deque()

    def next(self) -> Leaves | None:
        self._look(1)
        return self._rows.element(self._kept.popleft()) if self._kept else None

    def next_block(self, count: int) -> Leaves | None:
        self._look(count)
        indices = [self._kept.popleft() for _ in range(min(count, len(self._kept)))]
        return self._rows.take(np.array(indices)) if indices else None

    def _look(self, count: int) -> None:
        """Finds `count` rows to keep, if there are so many."""
        while len(self._kept) < count and self._position < len(self._rows):
            start = self._position
            self._position = min(start + _ROWS_AT_ONCE, len(self._rows))
            rows = self._rows.slice(start, self._position)
            answers = self._predicate(rows, np.arange(start, self._position))
            if len(answers) != 1 or answers[0].dtype != np.bool_ or answers[0].ndim != 1:
                raise ValueError(
                    f"The predicate of {self._stage} must return one bool. Received: an array of "
                    f"shape {answers[0].shape[1:]} and dtype {answers[0].dtype}"
                )
            self._kept.extend((start + np.flatnonzero(answers[0])).tolist())


class TakeWhile(SameElements):
    """The elements before the first one for which a predicate is false."""

    lasting = ("_predicate",)

    def __init__(self, source: Plan, predicate: ElementFunction):
        super().__init__(source)
        self._predicate = predicate

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length == 0 else UNKNOWN

    def _stream(self) -> Stream:
        return _TakeWhileStream(self._input.stream(), self._input, self._predicate)


class _TakeWhileStream(_FilterStream):
    moving = (*_FilterStream.moving, "_has_ended")

    _has_ended = False

    def next(self) -> Leaves | None:
        element = None if self._has_ended else self._stream.next()
        if element is None or not self._holds(element):
            self._has_ended = True
            return None
        return element


class Unique(SameElements):
    """The elements, without repetitions.

    Raises:
        TypeError: They have several components, or are datasets.
    """

    def __init__(self, source: Plan):
        super().__init__(source)
        signature = source.known_signature
        if signature is not None and [type(spec) for spec in signature.specs] != [ArraySpec]:
            raise TypeError(
                "unique needs elements of one array, number or text. Received: "
                f"{signature.element_spec}"
            )

    def cardinality(self) -> int:
        return 0 if self._input.cardinality() == 0 else UNKNOWN

    def _stream(self) -> Stream:
        return _UniqueStream(self._input.stream())


class _UniqueStream(Stream):
    def __init__(self, stream: Stream):
        self._stream = stream
        self._seen: set[Any] = set()

    def state(self) -> State:
        return {"stream": self._stream.state(), "seen": list(self._seen)}

    def restore(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._seen = set(state["seen"])

    def next(self) -> Leaves | None:
        while (element := self._stream.next()) is not None:
            key = _key_of(element[0])
            if key not in self._seen:
                self._seen.add(key)
                return element
        return None


def _key_of(leaf: Any) -> Any:
    """Returns a hashable value that is equal for equal leaves only, and can be part of a state."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    content = tuple(leaf.ravel().tolist()) if leaf.dtype.kind == "O" else leaf.tobytes()
    return (leaf.shape, content)
