"""`rejection_resample`: elements left out, or used twice, to get classes in given proportions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.data.functions import ElementFunction, note_place
from unison.data.passes import Passes
from unison.data.plan import INFINITE, UNKNOWN, Plan, Stream, Transformation
from unison.data.randomness import random_generator
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import LEAF, Leaves, Structure, tuple_of
from unison.data.transformations.stratified import checked_class

logger = logging.getLogger("unison")

#: The purposes of draws: whether an element is accepted, which of the two streams is read.
_ACCEPTED, _CHOSEN = 0, 1

#: The number of elements between two estimates of the proportions.
_ESTIMATED_TOGETHER = 32

#: The number of elements of each class that are assumed at the beginning.
_SEEN_BEFORE = 10

#: The fraction of rejected elements from which on a warning is logged.
_MANY = 0.5


class RejectionResample(Transformation):
    """Pairs of a class and an element, with the classes in given proportions.

    With the probability m an element is taken from the input unchanged; otherwise, from a second
    reading of the input, in which an element of class i is accepted with the probability a_i:

        m = min_i r_i,  a_i = (r_i - m) / (max_i r_i - m),  r_i = target_i / initial_i

    Args:
        source: The input.
        class_of: Returns the class of an element, an integer of at least 0.
        target: The proportions in the result.
        initial: The proportions in the input; None to estimate them while reading.
        seed: Determines which elements are accepted.

    Source: TensorFlow's `Dataset.rejection_resample`.
    """

    identity = ("seed",)
    lasting = ("_passes",)

    def __init__(
        self,
        source: Plan,
        class_of: ElementFunction,
        target: np.ndarray,
        initial: np.ndarray | None,
        seed: int,
    ):
        super().__init__(source)
        self._class_of = class_of
        self._target = target
        self.initial = initial
        self.seed = seed
        self._passes = Passes()

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        (inner,) = inputs
        of_class = self._class_of.signature_of(inner)
        if of_class is None:
            return None
        return Signature(tuple_of(LEAF, inner.structure), of_class.specs + inner.specs)

    @property
    def structure(self) -> Structure:
        return tuple_of(LEAF, self._input.structure)

    def cardinality(self) -> int:
        length = self._input.cardinality()
        is_as_it_is = self.initial is not None and self.odds(self.initial)[0] == 1
        return length if length == INFINITE or is_as_it_is else UNKNOWN

    def _stream(self) -> Stream:
        streams = [_ClassStream(self, self._input.stream()) for _ in range(2)]
        return _ResampledStream(self, streams[0], streams[1], self._passes.begin())

    @property
    def num_classes(self) -> int:
        return len(self._target)

    def odds(self, initial: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns m and the a_i for classes with the proportions `initial`."""
        ratios = self._target / (initial + np.finfo(np.float32).tiny)
        least, most = float(ratios.min()), float(ratios.max())
        if np.isclose(least, most):
            return 1.0, np.ones(len(ratios))
        return least, (ratios - least) / (most - least)

    def class_of(self, element: Leaves, epoch: Any, index: int) -> Any:
        """Returns the class of element `index`, as the function returned it.

        Raises:
            ValueError: It is not a class number.
        """
        try:
            leaves = self._class_of(element, self._input.structure, epoch, index)
        except Exception as error:
            note_place(error, self._class_of.stage, index)
            raise
        checked_class(leaves, self.num_classes, self._class_of.stage, index)
        return leaves[0]

    def begin(self) -> Any:
        """Returns the common part of the calls of the class function in one pass."""
        return self._class_of.begin()


class _ClassStream(Stream):
    """Every element, after its class."""

    moving = ("_stream", "_position")

    def __init__(self, plan: RejectionResample, stream: Stream):
        self._plan = plan
        self._stream = stream
        self._epoch = plan.begin()
        self._position = 0

    def next(self) -> Leaves | None:
        element = self._stream.next()
        if element is None:
            return None
        self._position += 1
        return (self._plan.class_of(element, self._epoch, self._position - 1), *element)


class _ResampledStream(Stream):
    """Unchanged elements, and accepted ones, as the draws determine."""

    moving = (
        "_original",
        "_read",
        "_ahead",
        "_seen",
        "_acceptance",
        "_choice",
        "_has_ended",
        "_has_warned",
    )

    def __init__(self, plan: RejectionResample, original: Stream, read: Stream, epoch: int):
        self._plan = plan
        self._original = original
        self._read = read
        self._acceptance = random_generator(plan.seed, epoch, _ACCEPTED)
        self._choice = random_generator(plan.seed, epoch, _CHOSEN)
        #: The elements read from the second stream, and the number of each class.
        self._ahead: list[Leaves] = []
        self._seen = np.full(plan.num_classes, _SEEN_BEFORE)
        self._has_ended = False
        self._has_warned = False
        self._update_odds()

    def restore(self, state: State) -> None:
        super().restore(state)
        self._update_odds()

    def next(self) -> Leaves | None:
        if self._has_ended:
            return None
        if self._plan.initial is None and not self._ahead:
            self._look_ahead()
        is_original = self._choice.random() < self._as_it_is
        element = self._original.next() if is_original else self._next_accepted()
        self._has_ended = element is None
        return element

    def _next_accepted(self) -> Leaves | None:
        while (element := self._next_read()) is not None:
            if self._acceptance.random() < self._accepted[int(element[0])]:
                return element
        return None

    def _next_read(self) -> Leaves | None:
        if self._plan.initial is not None:
            return self._read.next()
        if not self._ahead:
            self._look_ahead()
        return self._ahead.pop() if self._ahead else None

    def _look_ahead(self) -> None:
        """Reads elements whose classes are estimated before one of them is accepted."""
        read: list[Leaves] = []
        while len(read) < _ESTIMATED_TOGETHER and (element := self._read.next()) is not None:
            read.append(element)
        classes = np.array([element[0] for element in read], int)
        self._seen = self._seen + np.bincount(classes, minlength=self._plan.num_classes)
        self._ahead = read[::-1]
        self._update_odds()

    def _update_odds(self) -> None:
        initial = self._seen / self._seen.sum()
        if self._plan.initial is not None:
            initial = self._plan.initial
        self._as_it_is, self._accepted = self._plan.odds(initial)
        rejected = float((1 - self._accepted) @ initial)
        if rejected >= _MANY and not self._has_warned and self._as_it_is < 1:
            self._has_warned = True
            logger.warning(
                "rejection_resample leaves out %.0f %% of the elements that it reads a second "
                "time: the classes have the shares %s, and are accepted with the probabilities %s",
                100 * rejected,
                np.round(initial, 4).tolist(),
                np.round(self._accepted, 4).tolist(),
            )
