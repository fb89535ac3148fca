"""The next element of one of several datasets: `sample_from_datasets`, `choose_from_datasets`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unison.data.plan import INFINITE, UNKNOWN, Plan, Stream
from unison.data.randomness import random_generator
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves, Structure
from unison.data.transformations.combination import common_signature, common_structure
from unison.errors import InvalidArgumentError


class Sample(Plan):
    """Elements that are drawn at random from inputs.

    Args:
        inputs: The datasets.
        weights: The relative frequency of each; they need not add up to 1.
        seed: Determines the draws.
        stop_on_empty: Whether the result ends with the first input that ends; otherwise it
            continues.
    """

    identity = ("_stop_on_empty",)
    lasting = ("_seed",)

    def __init__(
        self, inputs: Sequence[Plan], weights: Sequence[float], seed: int, stop_on_empty: bool
    ):
        self.inputs = tuple(inputs)
        self._weights = np.asarray(weights, float)
        self._seed = seed
        self._stop_on_empty = stop_on_empty
        self._told: Structure | None = None
        _ = self.known_signature  # raises if they differ

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return common_signature(inputs)

    @property
    def structure(self) -> Structure:
        if self._told is None:
            self._told = common_structure(self.inputs)
        return self._told

    def cardinality(self) -> int:
        are_endless = [plan.cardinality() == INFINITE for plan in self.inputs]
        ends_never = all(are_endless) if self._stop_on_empty else any(are_endless)
        return INFINITE if ends_never else UNKNOWN

    def _stream(self) -> Stream:
        drawn = np.flatnonzero(self._weights).tolist()
        streams = [self.inputs[index].stream() for index in drawn]
        return _SampleStream(streams, self._weights[drawn], self._seed, self._stop_on_empty)


class _SampleStream(Stream):
    moving = ("_streams", "_open", "_random")

    def __init__(self, streams: list[Stream], weights: np.ndarray, seed: int, stop_on_empty: bool):
        self._streams = streams
        self._weights = weights
        # The indices of the streams that have not ended.
        self._open = list(range(len(streams)))
        self._limits = np.cumsum(weights)
        self._random = random_generator(seed)
        self._stop_on_empty = stop_on_empty

    def restore(self, state: State) -> None:
        super().restore(state)
        self._limits = np.cumsum(self._weights[self._open])

    def next(self) -> Leaves | None:
        while self._open:
            drawn = self._random.random() * self._limits[-1]
            place = int(np.searchsorted(self._limits, drawn, side="right"))
            place = min(place, len(self._open) - 1)
            element = self._streams[self._open[place]].next()
            if element is not None:
                return element
            del self._open[place]
            if self._stop_on_empty:
                self._open = []
            self._limits = np.cumsum(self._weights[self._open])
        return None


class Choose(Plan):
    """Elements of inputs whose indices come from another dataset.

    Args:
        inputs: The datasets.
        choice: The plan of the indices, int64 scalars.
        stop_on_empty: Whether the result ends when a dataset that has ended is chosen; otherwise
            that choice is skipped.
    """

    identity = ("_stop_on_empty",)

    def __init__(self, inputs: Sequence[Plan], choice: Plan, stop_on_empty: bool):
        self.inputs = tuple(inputs)
        self._choice = choice
        self._stop_on_empty = stop_on_empty
        self._told: Structure | None = None
        _ = self.known_signature  # raises if they differ

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return common_signature(inputs)

    @property
    def structure(self) -> Structure:
        if self._told is None:
            self._told = common_structure(self.inputs)
        return self._told

    @property
    def opened(self) -> Sequence[Plan]:
        return (*self.inputs, self._choice)

    def cardinality(self) -> int:
        lengths = [plan.cardinality() for plan in (*self.inputs, self._choice)]
        return INFINITE if {*lengths} == {INFINITE} else UNKNOWN

    def _stream(self) -> Stream:
        streams = [plan.stream() for plan in self.inputs]
        return _ChosenStream(streams, self._choice.stream(), self._stop_on_empty)


class _ChosenStream(Stream):
    moving = ("_streams", "_choice", "_has_ended")

    def __init__(self, streams: list[Stream], choice: Stream, stop_on_empty: bool):
        self._streams = streams
        self._choice = choice
        self._stop_on_empty = stop_on_empty
        self._has_ended = False

    def next(self) -> Leaves | None:
        while not self._has_ended and (chosen := self._choice.next()) is not None:
            index = int(chosen[0])
            if not 0 <= index < len(self._streams):
                raise InvalidArgumentError(
                    message=f"There are {len(self._streams)} datasets to choose from. Received: "
                    f"the choice {index}"
                )
            element = self._streams[index].next()
            if element is not None:
                return element
            self._has_ended = self._stop_on_empty
        return None
