"""Plans: what a dataset is made of, and how its elements are computed.

A `Dataset` is a plan: a tree of `Plan`s, one for each source and transformation. Iterating opens
a `Stream`, one for each plan, which knows where it is. Wherever the meaning allows it, elements
are computed as whole blocks:

* `Stream.next_block` gives consecutive elements stacked, which is what `batch` asks for;
* `Plan.rows` gives access by index, which lets `shuffle` permute numbers and not elements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from unison.data.leaves import NestedDataset, stack
from unison.data.specs import Signature
from unison.data.state import State, restored, state_of
from unison.data.structure import Leaves, Structure

#: The cardinality of a dataset that never ends. TF: `tf.data.INFINITE_CARDINALITY`.
INFINITE = -1

#: The cardinality of a dataset whose length only iterating tells.
#: TF: `tf.data.UNKNOWN_CARDINALITY`.
UNKNOWN = -2

#: Lets the library choose: a number of threads, the size of a buffer. TF: `tf.data.AUTOTUNE`.
AUTOTUNE = -1


class Stream:
    """The elements of a plan, from the first on; opened by `Plan.stream`.

    Everything that decides what comes next is in its attributes. Those that reading changes are
    named in `moving`; what they hold is the stream's state.
    """

    #: The attributes that reading changes. They hold numbers, text, arrays, elements, random
    #: generators, other streams, and lists of these.
    moving: ClassVar[Sequence[str]] = ()

    def state(self) -> State:
        """Returns where the stream is; see `restore`."""
        return {name: state_of(getattr(self, name)) for name in self.moving}

    def restore(self, state: State) -> None:
        """Goes to where another stream of the same plan, also of another process, was.

        Args:
            state: What its `state` returned.
        """
        for name in self.moving:
            setattr(self, name, restored(getattr(self, name), state[name]))

    def next(self) -> Leaves | None:
        """Returns the next element; None at the end, and ever after."""
        raise NotImplementedError

    def next_block(self, count: int) -> Leaves | None:
        """Returns the next elements stacked: `count` of them, fewer at the end, None after it.

        Raises:
            InvalidArgumentError: They have different shapes.
        """
        elements: list[Leaves] = []
        while len(elements) < count and (element := self.next()) is not None:
            elements.append(element)
        return stack(elements) if elements else None

    def skip(self, count: int) -> None:
        """Passes over the next `count` elements, or those that are left."""
        for _ in range(count):
            if self.next() is None:
                return


class Rows:
    """The elements of a plan, by index."""

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, indices: np.ndarray) -> Leaves:
        """Returns the elements at `indices`, in that order, stacked."""
        raise NotImplementedError

    def slice(self, start: int, stop: int) -> Leaves:
        """Returns the elements from `start` up to `stop`, stacked."""
        return self.take(np.arange(start, stop))

    def element(self, index: int) -> Leaves:
        """Returns one element."""
        return tuple(leaf[0] for leaf in self.slice(index, index + 1))


class RowsStream(Stream):
    """The rows in order."""

    moving = ("_position",)

    def __init__(self, rows: Rows):
        self._rows = rows
        self._position = 0

    def next(self) -> Leaves | None:
        if self._position >= len(self._rows):
            return None
        self._position += 1
        return self._rows.element(self._position - 1)

    def next_block(self, count: int) -> Leaves | None:
        start = self._position
        stop = min(start + count, len(self._rows))
        if start >= stop:
            return None
        self._position = stop
        return self._rows.slice(start, stop)

    def skip(self, count: int) -> None:
        self._position = min(self._position + count, len(self._rows))


class Plan(NestedDataset):
    """A source or a transformation.

    A subclass gives `_stream` or `rows`, its cardinality, and what its elements are
    (`signature_from`).
    """

    #: What the dataset is called in messages.
    name: ClassVar[str]
    inputs: Sequence[Plan] = ()

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        """Returns what the elements are, where those of the inputs are `inputs`.

        None where only an element would tell.
        """
        raise NotImplementedError

    @property
    def known_signature(self) -> Signature | None:
        """What the elements are; None where only one of them would tell."""
        inputs = [plan.known_signature for plan in self.inputs]
        known = [signature for signature in inputs if signature is not None]
        return self.signature_from(known) if len(known) == len(inputs) else None

    @functools.cached_property
    def signature(self) -> Signature:
        """What the elements are; looks at the first one where nothing else tells.

        Raises:
            ValueError: There is none to look at.
        """
        signature = self.signature_from([plan.signature for plan in self.inputs])
        if signature is not None:
            return signature
        first = self.stream().next()
        if first is None:
            raise ValueError(
                f"What the elements of {self.name} are is known from the first one, and there is "
                "none. Ask its source for the element_spec."
            )
        # One element does not tell the sizes of all.
        signature = Signature.of(first, self.structure)
        return signature.map(lambda spec: spec.with_unknown_sizes())

    @property
    def structure(self) -> Structure:
        """The structure of the elements; of one that has been computed, always known."""
        return self.signature.structure

    def cardinality(self) -> int:
        """Returns the number of elements, `INFINITE` or `UNKNOWN`."""
        raise NotImplementedError

    def rows(self) -> Rows | None:
        """Returns access by index; None where there is none."""
        return None

    def stream(self) -> Stream:
        """Opens the elements from the first on."""
        rows = self.rows()
        return self._stream() if rows is None else RowsStream(rows)

    def _stream(self) -> Stream:
        raise NotImplementedError

    @property
    def batch_size(self) -> int | None:
        """How many examples every element holds, but for the last ones; None if unknown."""
        signature = self.known_signature
        return None if signature is None else signature.batch_size


class Transformation(Plan):
    """Base of the plans of one input.

    Args:
        source: The input.
    """

    def __init__(self, source: Plan):
        self._input = source
        self.inputs = (source,)

    @property
    def structure(self) -> Structure:
        return self._input.structure

    def cardinality(self) -> int:
        return self._input.cardinality()


class SameElements(Transformation):
    """Base of the transformations that change no element."""

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return inputs[0]

    @property
    def batch_size(self) -> int | None:
        return self._input.batch_size
