"""What the replicas of a worker get, step after step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unison.data.distribution.input_workers import Talk
from unison.data.distribution.shares import Proportions
from unison.data.leaves import dtype_of, shape_of
from unison.data.state import State
from unison.data.structure import Leaves

#: What the replicas get of one leaf, in order: a list of arrays, or an array of their arrays.
Parts = Any

#: Puts the structure around leaves.
Pack = Callable[[Sequence[Any]], Any]


class Step(NamedTuple):
    """What the replicas of a worker get in one step.

    Attributes:
        parts: The parts of every leaf.
        pack: Puts the structure around as many leaves.
        shapes: For every leaf the shapes of the parts of all replicas of all workers; None where
            there is one worker.
    """

    parts: Sequence[Parts]
    pack: Pack
    shapes: Sequence[Sequence[tuple[int, ...]]] | None = None


class Position(NamedTuple):
    """Where a worker is.

    Attributes:
        state: Where it was.
        taken: How many steps it has taken since.
    """

    state: State
    taken: int


class Steps(abc.ABC):
    """One pass over what the replicas of a worker get."""

    #: Whether its positions are the same on all workers.
    is_global = False
    #: Where the workers agree on them.
    talk = Talk()

    @abc.abstractmethod
    def next(self) -> Step | None:
        """Returns the next step; None at the end, and ever after."""

    def divide_by(self, proportions: Proportions) -> None:
        """Says what the parts of the next steps are in proportion to; on all workers the same.

        Where each worker reads examples of its own, a pass keeps the sizes it began with.
        """
        del proportions

    def skip(self, count: int) -> None:
        """Passes over the next steps, or those that are left."""
        for _ in range(count):
            if self.next() is None:
                return

    @abc.abstractmethod
    def state(self) -> State:
        """Returns where this worker is."""

    @abc.abstractmethod
    def resume(self, positions: Sequence[Position]) -> None:
        """Goes to where the workers were.

        Args:
            positions: Those of all, of which there may have been another number; one, if they are
                the same on all workers.

        Raises:
            ValueError: This cannot be done with another number of workers.
        """


class AgreedSteps(Steps):
    """Steps of which all workers take the same number.

    A worker that has no more examples gets empty batches, until none has any. Elements that are
    no batches have no way to hold no example: there, the pass ends with the first worker.

    Args:
        own: Those of this worker.
        num_replicas: How many replicas it has.
        pack: Puts the structure around leaves where there has been no step.
        talk: Where the workers say what they have.
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
        self._has_ended = True  # also where something fails
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
        arrays = [np.empty((0, *shapes[0][1:]), np.dtype(dtype)) for dtype, shapes in kinds]
        return Step([[array] * self._num_replicas for array in arrays], self._pack)

    def skip(self, count: int) -> None:
        # All workers skip as many; there is nothing to agree about.
        self._own.skip(count)

    def state(self) -> State:
        return self._own.state()

    def resume(self, positions: Sequence[Position]) -> None:
        self._own.resume(positions)


def _kinds_of(step: Step) -> list[Any]:
    """Returns for every leaf its dtype, and the shapes of its parts."""
    return [[_name_of(parts[0]), [list(shape_of(part)) for part in parts]] for parts in step.parts]


def _name_of(leaf: Any) -> str:
    dtype = dtype_of(leaf)
    # To NumPy, those that JAX adds (bfloat16) are mere bytes, but their names tell.
    return dtype.name if dtype.kind == "V" else dtype.str


def step_in_turn(elements: Sequence[Leaves | None], pack: Pack) -> Step | None:
    """Returns the step in which each replica gets an element; one without gets no examples.

    None where they are no batches, and not all replicas have one.
    """
    present = [element for element in elements if element is not None]
    if len(present) < len(elements):
        if not all(shape_of(leaf) for leaf in present[0]):
            return None
        nothing = tuple(leaf[:0] for leaf in present[0])
        present = [nothing if element is None else element for element in elements]
    return Step([list(of_leaf) for of_leaf in zip(*present, strict=True)], pack)
