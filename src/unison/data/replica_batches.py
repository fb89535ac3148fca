"""Where the replicas' batches come from: global batches divided, or batches taken in turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unison.data.batching import Rebatch
from unison.data.dataset import Dataset
from unison.data.iterators import Optional
from unison.data.leaves import shape_of
from unison.data.plan import INFINITE, UNKNOWN, Plan, Stream
from unison.data.shares import Shares
from unison.data.specs import Signature

#: What the replicas get of one leaf, in order: a list of arrays, or an array of their arrays.
Parts = Any


@dataclasses.dataclass(frozen=True)
class Step:
    """What the replicas get in one step.

    Attributes:
        parts: The parts of every leaf.
        pack: Puts the structure around as many leaves.
    """

    parts: Sequence[Parts]
    pack: Callable[[Sequence[Any]], Any]


class ReplicaBatches:
    """A source of batches for a number of replicas.

    Args:
        num_replicas: The number.
    """

    #: Whether it is made of datasets, which may be read before their batches are asked for.
    is_of_datasets = True
    #: The class of optional batches.
    optional = Optional

    def __init__(self, num_replicas: int):
        self._num_replicas = num_replicas

    def steps(self) -> Iterator[Step]:
        """Yields what the replicas get, step after step."""
        raise NotImplementedError

    def shown(self, leaf: Any) -> Any:
        """Returns a leaf that stays on the host, as users see it."""
        return leaf

    def shown_spec(self, spec: Any) -> Any:
        """Returns the spec of a leaf as users see it."""
        return spec

    @property
    def signature(self) -> Signature:
        """What a replica gets."""
        raise NotImplementedError

    def cardinality(self) -> int:
        """Returns the number of steps, `INFINITE` or `UNKNOWN`."""
        raise NotImplementedError


class _FromDatasets(ReplicaBatches):
    """Base of those that are made of datasets.

    Args:
        dataset: Whose elements are shown as its own.
        num_replicas: The number of replicas.
    """

    def __init__(self, dataset: Dataset, num_replicas: int):
        super().__init__(num_replicas)
        self._dataset = dataset
        self._plan = dataset.plan
        self.optional = dataset.optional

    def shown(self, leaf: Any) -> Any:
        return self._dataset.shown(leaf)

    def shown_spec(self, spec: Any) -> Any:
        return self._dataset.shown_spec(spec)

    @property
    def signature(self) -> Signature:
        return self._plan.signature

    def cardinality(self) -> int:
        return self._plan.cardinality()


class DividedBatches(_FromDatasets):
    """The global batches of a dataset, each divided by `Shares`."""

    def steps(self) -> Iterator[Step]:
        stream = self._plan.stream()
        while (leaves := stream.next()) is not None:
            yield Step(divided(leaves, self._num_replicas), self._plan.structure.pack)

    @property
    def signature(self) -> Signature:
        signature = self._plan.signature
        size = signature.batch_size
        is_even = size is not None and size % self._num_replicas == 0
        share = size // self._num_replicas if size is not None and is_even else None
        return signature.unbatched().batched(share)


class RegroupedExamples(DividedBatches):
    """The examples of a dataset in batches of the replicas' sizes, whatever the global batches.

    Replicas get full batches as long as there are examples; in the last step some may get none.
    """

    def __init__(self, dataset: Dataset, num_replicas: int, batch_size: int):
        super().__init__(dataset, num_replicas)
        small, larger = divmod(batch_size, num_replicas)
        self._sizes = [small + (replica < larger) for replica in range(num_replicas)]

    def steps(self) -> Iterator[Step]:
        stream = Rebatch(self._plan, self._sizes, drop_remainder=False).stream()
        return _in_turn([stream] * self._num_replicas, self._plan)


class BatchesInTurn(_FromDatasets):
    """The batches of a dataset, which the replicas take in turn."""

    def steps(self) -> Iterator[Step]:
        return _in_turn([self._plan.stream()] * self._num_replicas, self._plan)

    def cardinality(self) -> int:
        length = self._plan.cardinality()
        return length if length < 0 else -(-length // self._num_replicas)


class OwnBatches(_FromDatasets):
    """A dataset for every replica."""

    def __init__(self, datasets: Sequence[Dataset]):
        super().__init__(datasets[0], len(datasets))
        self._plans = [dataset.plan for dataset in datasets]

    def steps(self) -> Iterator[Step]:
        return _in_turn([plan.stream() for plan in self._plans], self._plan)

    def cardinality(self) -> int:
        lengths = [plan.cardinality() for plan in self._plans]
        if INFINITE in lengths:
            return INFINITE
        return UNKNOWN if UNKNOWN in lengths else max(lengths)


def _in_turn(streams: Sequence[Stream], plan: Plan) -> Iterator[Step]:
    """Yields an element of every stream, until all have ended; one that has gives no examples.

    Elements that are no batches have no way to hold no example: there, a last step that is not
    complete is dropped, as in TensorFlow.
    """
    while True:
        elements = [stream.next() for stream in streams]
        present = [element for element in elements if element is not None]
        if not present:
            return
        if len(present) < len(streams):
            if not all(shape_of(leaf) for leaf in present[0]):
                return
            nothing = tuple(leaf[:0] for leaf in present[0])
            present = [nothing if element is None else element for element in elements]
        parts = [list(of_leaf) for of_leaf in zip(*present, strict=True)]
        yield Step(parts, plan.structure.pack)


class IterableBatches(ReplicaBatches):
    """The global batches of any iterable, each divided by `Shares`.

    Args:
        source: An iterable of pytrees of arrays with one number of examples along their first
            axes.
        num_replicas: The number of replicas.

    Raises:
        TypeError: `source` is not an iterable of batches.
    """

    is_of_datasets = False

    def __init__(self, source: Iterable[Any], num_replicas: int):
        super().__init__(num_replicas)
        if isinstance(source, np.ndarray | jax.Array | str | bytes | dict | tuple):
            raise TypeError(
                "Expected an iterable of batches: a Dataset, a list, a generator, a Keras "
                f"PyDataset. Received: {type(source).__name__}, which would be cut along its first "
                "axis. Yield the batches that the replicas are to share."
            )
        if not isinstance(source, Iterable):
            raise TypeError(
                "Expected an iterable of batches: a Dataset, a list, a generator, a Keras "
                f"PyDataset. Received: {source!r}"
            )
        self._source = source

    def steps(self) -> Iterator[Step]:
        for batch in self._source:
            leaves, structure = jax.tree.flatten(batch)
            if self._num_replicas > 1:
                leaves = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
            parts = divided(leaves, self._num_replicas) if leaves else []
            yield Step(parts, functools.partial(jax.tree.unflatten, structure))

    @property
    def signature(self) -> Signature:
        raise TypeError(
            f"A {type(self._source).__name__} does not tell what its batches are. Distribute a "
            "unison.data.Dataset, or look at a batch."
        )

    def cardinality(self) -> int:
        try:
            return len(self._source)  # type: ignore[arg-type]  # where it has a length
        except TypeError:
            return UNKNOWN


def divided(leaves: Sequence[Any], num_replicas: int) -> list[Parts]:
    """Returns the parts of the leaves of a global batch, by `Shares`.

    Raises:
        ValueError: They have no or different numbers of examples along their first axes.
    """
    if num_replicas == 1:
        return [[leaf] for leaf in leaves]
    shares = Shares(count_examples(leaves), num_replicas)
    if shares.are_even and shares.examples:
        return [leaf.reshape(num_replicas, shares.chunk, *leaf.shape[1:]) for leaf in leaves]
    starts = [replica * shares.chunk for replica in range(num_replicas)]
    return [[leaf[start : start + shares.chunk] for start in starts] for leaf in leaves]


def count_examples(leaves: Sequence[Any]) -> int:
    """Returns the number of examples of a batch, which all of its arrays must have.

    Raises:
        ValueError: They have not.
    """
    shapes = [shape_of(leaf) for leaf in leaves]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(
            "All arrays of a batch must have the same number of examples along their first axis. "
            f"Received shapes: {shapes}"
        )
    return shapes[0][0]
