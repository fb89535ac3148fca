"""One of several datasets at a time: `sample_from_datasets`, `choose_from_datasets`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unison.data.combination import common_signature
from unison.data.plan import UNKNOWN, Plan, Stream
from unison.data.randomness import random_generator
from unison.data.specs import Signature
from unison.data.structure import Leaves, Structure
from unison.errors import InvalidArgumentError


class Sample(Plan):
    """Elements of inputs that are drawn at random.

    Args:
        inputs: The datasets.
        weights: How often each is drawn; they need not add up to 1.
        seed: Determines the draws.
        stop_on_empty: Whether all ends with the first that ends; otherwise the rest goes on.
    """

    def __init__(
        self, inputs: Sequence[Plan], weights: Sequence[float], seed: int, stop_on_empty: bool
    ):
        self.inputs = tuple(inputs)
        self._weights = np.asarray(weights, float)
        self._seed = seed
        self._stop_on_empty = stop_on_empty
        _ = self.known_signature  # raises where they do not fit

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return common_signature(inputs)

    @property
    def structure(self) -> Structure:
        return self.inputs[0].structure

    def cardinality(self) -> int:
        return UNKNOWN

    def _stream(self) -> Stream:
        drawn = np.flatnonzero(self._weights).tolist()
        streams = [self.inputs[index].stream() for index in drawn]
        return _SampleStream(streams, self._weights[drawn], self._seed, self._stop_on_empty)


class _SampleStream(Stream):
    def __init__(self, streams: list[Stream], weights: np.ndarray, seed: int, stop_on_empty: bool):
        self._streams = streams
        self._weights = weights
        self._random = random_generator(seed)
        self._stop_on_empty = stop_on_empty

    def next(self) -> Leaves | None:
        while self._streams:
            limits = np.cumsum(self._weights)
            drawn = self._random.random() * limits[-1]
            index = min(int(np.searchsorted(limits, drawn, side="right")), len(self._streams) - 1)
            element = self._streams[index].next()
            if element is not None:
                return element
            del self._streams[index]
            self._weights = np.delete(self._weights, index)
            if self._stop_on_empty:
                self._streams = []
        return None


class Choose(Plan):
    """Elements of inputs that another dataset chooses, by their index.

    Args:
        inputs: The datasets.
        choice: The plan of the indices, int64 scalars.
        stop_on_empty: Whether all ends when a dataset that has ended is chosen; otherwise that
            choice is passed over.
    """

    def __init__(self, inputs: Sequence[Plan], choice: Plan, stop_on_empty: bool):
        self.inputs = tuple(inputs)
        self._choice = choice
        self._stop_on_empty = stop_on_empty
        _ = self.known_signature  # raises where they do not fit

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return common_signature(inputs)

    @property
    def structure(self) -> Structure:
        return self.inputs[0].structure

    def cardinality(self) -> int:
        return UNKNOWN

    def _stream(self) -> Stream:
        streams = [plan.stream() for plan in self.inputs]
        return _ChosenStream(streams, self._choice.stream(), self._stop_on_empty)


class _ChosenStream(Stream):
    def __init__(self, streams: list[Stream], choice: Stream, stop_on_empty: bool):
        self._streams = streams
        self._choice = choice
        self._stop_on_empty = stop_on_empty

    def next(self) -> Leaves | None:
        while (chosen := self._choice.next()) is not None:
            index = int(chosen[0])
            if not 0 <= index < len(self._streams):
                raise InvalidArgumentError(
                    message=f"There are {len(self._streams)} datasets to choose from. Received: "
                    f"the choice {index}"
                )
            element = self._streams[index].next()
            if element is not None:
                return element
            if self._stop_on_empty:
                break
        return None
