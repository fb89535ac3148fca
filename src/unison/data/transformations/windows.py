"""Datasets of some of a dataset's elements: `window`, `group_by_window`."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np

from unison.data.functions import note_place
from unison.data.plan import INFINITE, Plan, Reading, Stream, Transformation
from unison.data.sources.in_memory import Elements
from unison.data.specs import DatasetSpec, Signature
from unison.data.state import State
from unison.data.structure import LEAF, Leaves, tuple_of
from unison.data.transformations.nesting import FromDatasets, Function
from unison.errors import InvalidArgumentError


class Window(Transformation):
    """Datasets of consecutive elements, one for each leaf.

    Args:
        source: The input.
        size: The number of elements in a window.
        shift: The distance between the beginnings of two windows.
        stride: The distance between two elements of a window.
        drop_remainder: Whether incomplete windows are dropped.

    Raises:
        InvalidArgumentError: A number is not positive.
    """

    identity = ("size", "shift", "stride", "drop_remainder")

    def __init__(self, source: Plan, size: int, shift: int, stride: int, drop_remainder: bool):
        super().__init__(source)
        for what, number in (("size", size), ("shift", shift), ("stride", stride)):
            if number < 1:
                raise InvalidArgumentError(
                    message=f"Expected the {what} of a window to be greater than zero. Received: "
                    f"{number}"
                )
        self.size, self.shift, self.stride = size, shift, stride
        self.drop_remainder = drop_remainder

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        (inner,) = inputs
        return Signature(
            inner.structure, tuple(DatasetSpec(plan) for plan in _one_a_leaf([], inner))
        )

    @property
    def span(self) -> int:
        """The number of elements that a window spans."""
        return (self.size - 1) * self.stride + 1

    def cardinality(self) -> int:
        length = self._input.cardinality()
        if length < 0:
            return length
        if self.drop_remainder:
            return max((length - self.span) // self.shift + 1, 0)
        return -(-length // self.shift)

    def window_of(self, elements: Sequence[Leaves]) -> Leaves:
        """Returns the window of these elements."""
        return tuple(_one_a_leaf(elements, _of_all(elements, self._input)))

    def _stream(self) -> Stream:
        return _WindowStream(self, self._input.stream())


def _one_a_leaf(elements: Sequence[Leaves], signature: Signature) -> list[Plan]:
    """Returns a plan of every leaf of the elements."""
    return [
        Elements([(element[index],) for element in elements], Signature(LEAF, (spec,)))
        for index, spec in enumerate(signature.specs)
    ]


class _WindowStream(Stream):
    moving = ("_stream", "_buffer", "_has_ended")

    def __init__(self, plan: Window, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._buffer: list[Leaves] = []
        self._has_ended = False

    def next(self) -> Leaves | None:
        plan = self._plan
        while not self._has_ended and len(self._buffer) < plan.span:
            element = self._stream.next()
            if element is None:
                self._has_ended = True
            else:
                self._buffer.append(element)
        if not self._buffer or (plan.drop_remainder and len(self._buffer) < plan.span):
            return None
        window = plan.window_of(self._buffer[: plan.span : plan.stride])
        beyond = plan.shift - len(self._buffer)
        del self._buffer[: plan.shift]
        if beyond > 0:
            self._stream.skip(beyond)
        return window


class GroupByWindow(FromDatasets):
    """The elements of the datasets that a function returns for windows of elements with one key.

    Args:
        source: The input.
        key_of: Returns the int64 key of an element.
        reduce: Returns a dataset, given a key and the dataset of a window.
        size_of: Returns the size of the windows of a key.
        stage: The transformation's name, for messages.
    """

    def __init__(
        self,
        source: Plan,
        key_of: Function,
        reduce: Function,
        size_of: Callable[[int], int],
        stage: str = "group_by_window",
    ):
        super().__init__(source, reduce, stage)
        self._key_of = key_of
        self._size_of = size_of

    def cardinality(self) -> int:
        length = self._input.cardinality()
        return length if length == INFINITE else super().cardinality()

    def key_of(self, element: Leaves, index: int) -> int:
        """Returns the key of element `index`."""
        try:
            leaves = self._key_of(element, self._input.structure)
            if len(leaves) != 1 or getattr(leaves[0], "dtype", None) != np.int64:
                raise ValueError(f"A key must be one int64. Received: {leaves!r}")
        except Exception as error:
            note_place(error, self._stage, index)
            raise
        return int(leaves[0])

    def size_of(self, key: int) -> int:
        """Returns the size of the windows of a key.

        Raises:
            InvalidArgumentError: It is not a positive number.
        """
        size = self._size_of(key)
        if size < 1:
            raise InvalidArgumentError(
                message=f"Expected a window size greater than zero. Received: {size}"
            )
        return size

    def reduced(self, key: int, elements: Sequence[Leaves]) -> Plan:
        """Returns the plan of the function's dataset for a window."""
        signature = _of_all(elements, self._input)
        return self._made_of((np.int64(key), Elements(elements, signature)), tuple_of(LEAF, LEAF))

    def _stream(self) -> Stream:
        return _GroupStream(self, self._input.stream())


def _of_all(elements: Sequence[Leaves], plan: Plan) -> Signature:
    """Returns the signature of some elements of a plan."""
    signature = plan.known_signature
    if signature is None:
        first = Signature.of(elements[0], plan.structure)
        signature = first.map(lambda spec: spec.with_unknown_sizes())
    return signature


class _GroupStream(Stream):
    def __init__(self, plan: GroupByWindow, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._groups: collections.defaultdict[int, list[Leaves]] = collections.defaultdict(list)
        self._sizes: dict[int, int] = {}
        self._window: _OpenWindow | None = None
        self._position = 0

    def state(self) -> State:
        return {
            "stream": self._stream.state(),
            "groups": [(key, list(elements)) for key, elements in self._groups.items()],
            "window": None if self._window is None else self._window.state(),
            "position": self._position,
        }

    def restore(self, state: State) -> None:
        self._stream.restore(state["stream"])
        self._groups = collections.defaultdict(list)
        self._groups.update((key, list(elements)) for key, elements in state["groups"])
        window = state["window"]
        self._window = None if window is None else _OpenWindow(self._plan, **window)
        self._position = state["position"]

    def next(self) -> Leaves | None:
        while True:
            if self._window is not None:
                element = self._window.stream.next()
                if element is not None:
                    return element
                self._window = None
            key = self._full_group()
            if key is None:
                return None
            self._window = _OpenWindow(self._plan, key, self._groups.pop(key))

    def _full_group(self) -> int | None:
        """Reads until a group is full, or to the end; returns its key, None if none is left.

        At the end, the remaining groups follow in the order of their keys.
        """
        while (element := self._stream.next()) is not None:
            key = self._plan.key_of(element, self._position)
            self._position += 1
            self._groups[key].append(element)
            if key not in self._sizes:
                self._sizes[key] = self._plan.size_of(key)
            if len(self._groups[key]) >= self._sizes[key]:
                return key
        return min(self._groups, default=None)


class _OpenWindow:
    """A window whose elements are being read.

    Args:
        plan: The transformation.
        key: The window's key.
        elements: Its content.
        position: The position at which to resume; None for the beginning.
    """

    def __init__(
        self, plan: GroupByWindow, key: int, elements: list[Leaves], position: State = None
    ):
        self._key = key
        self._elements = elements
        self._reading = Reading(plan.reduced(key, elements))
        if position is not None:
            self._reading.restore(position)

    @property
    def stream(self) -> Stream:
        """The elements of the function's dataset for the window."""
        return self._reading.stream

    def state(self) -> State:
        """Returns the arguments that create an equal one."""
        position = self._reading.state()
        return {"key": self._key, "elements": self._elements, "position": position}
