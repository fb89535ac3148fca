"""The parts of the replicas of a worker, step after step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unison.data.distribution.input_workers import Talk
from unison.data.distribution.shares import Proportions
from unison.data.leaves import dtype_of, shape_of
from unison.data.ragged import empty_like
from unison.data.state import State
from unison.data.structure import Leaves
from unison.storage.decoding import name_of_dtype

#: The replicas' parts of one leaf, in order: a list of arrays, or a stacked array.
Parts = Any

#: Packs leaves into the structure.
Pack = Callable[[Sequence[Any]], Any]


class Step(NamedTuple):
    """The parts of the replicas of a worker in one step.

    Attributes:
        parts: The parts of every leaf.
        pack: Packs leaves into the structure.
        shapes: For every leaf, the shapes of the parts of all replicas of all workers; None if
            there is one worker.
    """

    parts: Sequence[Parts]
    pack: Pack
    shapes: Sequence[Sequence[tuple[int, ...]]] | None = None


class Position(NamedTuple):
    """The position of a worker.

    Attributes:
        state: The state of its stream at a record.
        taken: The number of steps since then.
    """

    state: State
    taken: int


class Steps(abc.ABC):
    """One pass over the parts of the replicas of a worker."""

    #: The store through which the workers agree on them.
    talk = Talk()

    @abc.abstractmethod
    def next(self) -> Step | None:
        """Returns the next step; None at the end, also in further calls."""

    def divide_by(self, proportions: Proportions) -> None:
        """Sets the proportions of the parts of the next steps; all workers must set the same.

        If each worker reads examples of its own, a pass keeps the sizes with which it began.
        """
        del proportions

    def skip(self, count: int) -> None:
        """Skips the next steps."""
        for _ in range(count):
            if self.next() is None:
                return

    @abc.abstractmethod
    def state(self) -> State:
        """Returns the position of this worker."""

    @abc.abstractmethod
    def resume(self, positions: Sequence[Position]) -> None:
        """Resumes at the positions of the workers.

        Args:
            positions: The positions of all workers, whose number may differ; one if they are
                the same on all workers.

        Raises:
            ValueError: This number of workers cannot resume at the positions of another number.
        """


class AgreedSteps(Steps):
    """Steps, of which all workers take the same number.

    A worker without further examples gets empty batches until none has any. Elements that are
    not batches cannot be empty: in this case, the pass ends with the first worker.

    Args:
        own: The steps of this worker.
        num_replicas: The number of replicas of this worker.
        pack: Packs leaves into the structure, if there has been no step yet.
        talk: The store through which workers exchange their signatures.
    """

    def __init__(self, own: Steps, num_replicas: int, pack: Pack, talk: Talk):
        self._own = own
        self._num_replicas = num_replicas
        self._pack = pack
        self.talk = talk
        self._has_ended = False

    def next(self) -> Step | None:
        if self._has_ended:
            return None
        self._has_ended = True  # also if something fails
        try:
            step = self._own.next()
        except Exception as error:
            self.talk.fail(f"in its input: {type(error).__name__}: {error}")
            raise
        said = self.talk.ask(None if step is None else _kinds_of(step))
        present = [kinds for kinds in said if kinds is not None]
        has_scalars = any(not shapes[0] for kinds in present for _, shapes in kinds)
        if not present or (has_scalars and len(present) < len(said)):
            return None
        self._has_ended = False
        nothing = self._empty(present[0])
        if step is None:
            step = nothing
        of_workers = [_kinds_of(nothing) if kinds is None else kinds for kinds in said]
        shapes = [
            [tuple(shape) for kinds in of_workers for shape in kinds[leaf][1]]
            for leaf in range(len(step.parts))
        ]
        return step._replace(shapes=shapes)

    def _empty(self, kinds: Sequence[Any]) -> Step:
        """Returns a step without examples, of leaves of the given kinds."""
        arrays = [_no_examples(np.dtype(dtype), shapes[0]) for dtype, shapes in kinds]
        return Step([[array] * self._num_replicas for array in arrays], self._pack)

    def skip(self, count: int) -> None:
        # All workers skip the same number; there is nothing to agree on.
        self._own.skip(count)

    def state(self) -> State:
        return self._own.state()

    def resume(self, positions: Sequence[Position]) -> None:
        self._own.resume(positions)


def _no_examples(dtype: np.dtype, shape: Sequence[int | None]) -> Any:
    if None in shape:
        return empty_like(dtype, shape)
    return np.empty((0, *(size for size in shape[1:] if size is not None)), dtype)


def _kinds_of(step: Step) -> list[Any]:
    """Returns for every leaf its dtype, and the shapes of its parts."""
    return [
        [name_of_dtype(dtype_of(parts[0])), [list(shape_of(part)) for part in parts]]
        for parts in step.parts
    ]


def step_in_turn(elements: Sequence[Leaves | None], pack: Pack) -> Step | None:
    """Returns the step in which each replica gets an element; one without it gets no examples.

    None if they are not batches, and some replicas have none.
    """
    present = [element for element in elements if element is not None]
    if len(present) < len(elements):
        if not all(shape_of(leaf) for leaf in present[0]):
            return None
        nothing = tuple(leaf[:0] for leaf in present[0])
        present = [nothing if element is None else element for element in elements]
    return Step([list(of_leaf) for of_leaf in zip(*present, strict=True)], pack)
