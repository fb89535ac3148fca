"""The sources of the replicas' batches: global batches divided, or batches taken in turn."""

from __future__ import annotations

import abc
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unison.data.dataset import Dataset
from unison.data.distribution.input_workers import InputWorkers
from unison.data.distribution.regrouping import (
    RegroupedSteps,
    signature_of_replica,
    sizes_of_worker,
)
from unison.data.distribution.shares import EQUAL_SHARES, Proportions, ReplicaShares, Shares
from unison.data.distribution.steps import (
    AgreedSteps,
    Pack,
    Parts,
    Position,
    Step,
    Steps,
    step_in_turn,
)
from unison.data.distribution.worker_examples import BatchShares, Division
from unison.data.iterators import Optional
from unison.data.leaves import shape_of
from unison.data.plan import INFINITE, UNKNOWN, Plan, position_of, stream_at
from unison.data.ragged import RaggedArray
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.transformations.combination import common_structure


class ReplicaBatches(abc.ABC):
    """A source of batches for the replicas of a worker.

    Args:
        num_replicas: The number of replicas of this worker.
        workers: The worker's index among those that share the source.
        shares: The shares of all replicas of a global batch.
    """

    #: Whether its input is datasets, which may be read before their batches are requested.
    is_of_datasets = True
    #: Whether its batches, and the positions in it, are the same on all workers.
    is_global = False
    #: The class of optional batches.
    optional = Optional

    def __init__(
        self, num_replicas: int, workers: InputWorkers, shares: ReplicaShares = EQUAL_SHARES
    ):
        self._num_replicas = num_replicas
        self._workers = workers
        #: The shares of all replicas of a global batch.
        self.shares = shares

    @property
    def plans(self) -> Sequence[Plan]:
        """The plans that are read; none if the input is not a dataset."""
        return ()

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """A description of the input and of its division: positions of others are rejected."""

    @abc.abstractmethod
    def steps(self) -> Steps:
        """Begins a pass."""

    def shown(self, leaf: Any) -> Any:
        """Returns a leaf that stays on the host, as users see it."""
        return leaf

    def shown_spec(self, spec: Any) -> Any:
        """Returns the spec of a leaf as users see it."""
        return spec

    @property
    @abc.abstractmethod
    def signature(self) -> Signature:
        """The specs of a replica's part."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """Returns the number of steps, `INFINITE` or `UNKNOWN`."""

    def global_steps(self) -> Steps:
        """Begins a pass over the batches of all replicas of all workers together.

        Raises:
            ValueError: Each worker has only its own part.
        """
        if self._workers.num_workers == 1:
            return self.steps()
        raise ValueError(
            "Keras' loops need whole batches, the same on all workers, where workers may change or "
            "the model takes text. Received: a dataset of which each worker reads a part of its "
            "own (AutoShardPolicy.FILE, OFF or HINT, or a dataset of a function). Pass the dataset "
            "itself to fit, or distribute it under AutoShardPolicy.DATA."
        )


class _FromDatasets(ReplicaBatches):
    """Base of the sources whose input is datasets.

    Args:
        dataset: The dataset whose form of elements is used.
        plan: Its plan, or the part that this worker reads.
        num_replicas: The number of replicas.
        workers: The worker's index.
        shares: The shares of all replicas of a global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        num_replicas: int,
        workers: InputWorkers,
        shares: ReplicaShares = EQUAL_SHARES,
    ):
        super().__init__(num_replicas, workers, shares)
        self._dataset = dataset
        self._plan = plan
        self.optional = dataset.optional

    @property
    def plans(self) -> Sequence[Plan]:
        return (self._plan,)

    @property
    def description(self) -> str:
        return f"{type(self).__name__} of {self._dataset.plan.description}"

    def shown(self, leaf: Any) -> Any:
        return self._dataset.shown(leaf)

    def shown_spec(self, spec: Any) -> Any:
        return self._dataset.shown_spec(spec)

    @property
    def signature(self) -> Signature:
        return self._plan.signature

    def cardinality(self) -> int:
        return self._plan.cardinality()

    @property
    def _all_replicas(self) -> int:
        return self._num_replicas * self._workers.num_workers

    def _agreed(self, own: Steps) -> Steps:
        """Returns the steps of a worker; all workers take the same number of steps."""
        if self._workers.num_workers == 1:
            return own
        talk = self._workers.talk("steps")

        def pack(leaves: Sequence[Any]) -> Any:
            # This worker's part may be empty.
            return common_structure([self._plan, self._dataset.plan]).pack(leaves)

        return AgreedSteps(own, self._num_replicas, pack, talk)


class DividedBatches(_FromDatasets):
    """The global batches of a dataset, each divided between all replicas by `Shares`.

    Every worker reads all of them, and takes the shares of its replicas.
    """

    is_global = True

    def global_steps(self) -> Steps:
        return _DividedSteps(self._plan, 1, InputWorkers())

    def steps(self) -> Steps:
        return _DividedSteps(self._plan, self._num_replicas, self._workers, self.shares.proportions)

    @property
    def signature(self) -> Signature:
        return signature_of_replica(self._plan.signature, self._all_replicas, self.shares)


class _DividedSteps(Steps):
    def __init__(
        self,
        plan: Plan,
        num_replicas: int,
        workers: InputWorkers,
        proportions: Proportions = None,
    ):
        self._plan = plan
        self._num_replicas = num_replicas
        self._workers = workers
        self._proportions = proportions
        self._stream = plan.stream()

    def divide_by(self, proportions: Proportions) -> None:
        self._proportions = proportions

    def next(self) -> Step | None:
        leaves = self._stream.next()
        if leaves is None:
            return None
        pack = self._plan.structure.pack
        return divided_step(leaves, pack, self._num_replicas, self._workers, self._proportions)

    def skip(self, count: int) -> None:
        self._stream.skip(count)

    def state(self) -> State:
        return position_of(self._plan, self._stream)

    def resume(self, positions: Sequence[Position]) -> None:
        # In global batches, whatever the number of workers.
        (position,) = positions
        self._stream = stream_at(self._plan, position.state)
        self.skip(position.taken)


class DividedExamples(DividedBatches):
    """The same as `DividedBatches`, except that a worker only computes its replicas' examples.

    Args:
        dataset: The dataset of global batches.
        plan: Their plan.
        own_plans: Returns the plan of the worker's examples in a pass, given the division.
        num_replicas: The number of its replicas.
        workers: The worker's index.
        shares: The shares of all replicas of a global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        own_plans: Callable[[Division], BatchShares],
        num_replicas: int,
        workers: InputWorkers,
        shares: ReplicaShares = EQUAL_SHARES,
    ):
        super().__init__(dataset, plan, num_replicas, workers, shares)
        self._own_plans = own_plans

    def steps(self) -> OwnedSteps:
        return OwnedSteps(
            self._own_plans,
            lambda: self._plan.structure.pack,
            self._num_replicas,
            self._workers,
            self.shares.proportions,
        )


class OwnedSteps(Steps):
    """A worker's examples of global batches, of which any can be read.

    Args:
        plans: Returns the plan of the worker's examples, given the division.
        pack: Returns what packs leaves into the structure.
        num_replicas: The number of the worker's replicas.
        workers: The worker's index.
        proportions: Those of the replicas' shares.
    """

    def __init__(
        self,
        plans: Callable[[Division], BatchShares],
        pack: Callable[[], Pack],
        num_replicas: int,
        workers: InputWorkers,
        proportions: Proportions,
    ):
        self._plans = plans
        self._pack = pack
        self._num_replicas = num_replicas
        self._workers = workers
        self._division = self._divided_by(proportions)
        self._plan = plans(self._division)
        self._stream = self._plan.stream()
        # The worker's buffers hold its own examples. The position in the global batches is that of
        # the pass's beginning, and a number of batches, which are skipped without being computed.
        self._begin = position_of(self._plan, self._stream)
        self._batches = 0

    def _divided_by(self, proportions: Proportions) -> Division:
        workers, count = self._workers, self._num_replicas
        return Division(workers.num_workers * count, _replicas_of(workers, count), proportions)

    def divide_by(self, proportions: Proportions) -> None:
        if proportions != self._division.proportions:
            self._divide(self._division._replace(proportions=proportions))

    def divide_among_present(self) -> None:
        """Divides the next batches between the workers that there are now."""
        division = self._divided_by(self._division.proportions)
        if division != self._division:
            self._divide(division)

    def _divide(self, division: Division) -> None:
        self._division = division
        self._plan = self._plans(division)
        self._go_to(self._begin, self._batches)

    def at(self, batch: int) -> OwnedSteps:
        """Returns the steps of the same pass from a batch on, for the present workers."""
        made = copy.copy(self)
        made._batches = batch
        made._divide(self._divided_by(self._division.proportions))
        return made

    def next(self) -> Step | None:
        leaves = self._stream.next()
        if leaves is None:
            return None
        self._batches += 1
        *own, size = leaves
        shares = Shares(int(size), self._division.num_replicas, self._division.proportions)
        return _step_of_shares(own, self._pack(), self._num_replicas, shares, self._workers)

    def skip(self, count: int) -> None:
        self._batches += count
        self._stream.skip(count)

    def state(self) -> State:
        return {"begin": self._begin, "batches": self._batches}

    def resume(self, positions: Sequence[Position]) -> None:
        (position,) = positions
        self._go_to(position.state["begin"], position.state["batches"] + position.taken)

    def _go_to(self, begin: State, batches: int) -> None:
        self._begin = begin
        self._stream = stream_at(self._plan, begin)
        self._batches = 0
        self.skip(batches)


class RegroupedExamples(_FromDatasets):
    """The examples that each worker reads, in batches of its replicas' sizes.

    Replicas get full batches while their worker has examples; in the last steps, some may get
    none. A pass keeps the proportions with which it began.

    Args:
        dataset: The dataset of batches.
        plan_of_worker: Returns the part of the plan that a worker reads.
        num_replicas: The number of replicas of each worker.
        batch_size: The size of a global batch.
        workers: The index of this worker.
        shares: The shares of all replicas of a global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan_of_worker: Callable[[], Plan],
        num_replicas: int,
        batch_size: int,
        workers: InputWorkers,
        shares: ReplicaShares = EQUAL_SHARES,
    ):
        super().__init__(dataset, plan_of_worker(), num_replicas, workers, shares)
        self._plan_of_worker = plan_of_worker
        self._batch_size = batch_size
        self._sizes()  # raises the function's errors immediately

    def steps(self) -> Steps:
        steps = RegroupedSteps(
            self._plan, self._plan_of_worker, self._sizes(), self._num_replicas, self._workers
        )
        return self._agreed(steps)

    def _sizes(self) -> list[int]:
        return sizes_of_worker(
            self._batch_size, self._num_replicas, self._workers, self.shares.proportions
        )

    @property
    def signature(self) -> Signature:
        return signature_of_replica(self._plan.signature, self._all_replicas, self.shares)

    def cardinality(self) -> int:
        # With several workers, each has only its own part.
        length = super().cardinality()
        return length if self._workers.num_workers == 1 or length == INFINITE else UNKNOWN


class BatchesInTurn(_FromDatasets):
    """The batches of each worker's own dataset, which its replicas take in turn."""

    # Every worker may have a different dataset; see `_StepsInTurn.resume`.
    description = "BatchesInTurn"

    def steps(self) -> Steps:
        return self._agreed(_StepsInTurn([self._plan], self._num_replicas, self._workers))

    def cardinality(self) -> int:
        length = super().cardinality()
        if length < 0:
            return length
        return UNKNOWN if self._workers.num_workers > 1 else -(-length // self._num_replicas)


class OwnBatches(_FromDatasets):
    """A dataset for every replica."""

    description = "OwnBatches"

    def __init__(self, datasets: Sequence[Dataset], plans: Sequence[Plan], workers: InputWorkers):
        super().__init__(datasets[0], plans[0], len(datasets), workers)
        self._plans = plans

    @property
    def plans(self) -> Sequence[Plan]:
        return self._plans

    def steps(self) -> Steps:
        return self._agreed(_StepsInTurn(self._plans, 1, self._workers))

    def cardinality(self) -> int:
        lengths = [plan.cardinality() for plan in self._plans]
        if INFINITE in lengths:
            return INFINITE
        return UNKNOWN if UNKNOWN in lengths or self._workers.num_workers > 1 else max(lengths)


class _StepsInTurn(Steps):
    """Elements of every plan, `each` of them in turn, until all plans have ended."""

    def __init__(self, plans: Sequence[Plan], each: int, workers: InputWorkers):
        self._plans = plans
        self._each = each
        self._workers = workers
        self._streams = [plan.stream() for plan in plans]

    def next(self) -> Step | None:
        elements = [stream.next() for stream in self._streams for _ in range(self._each)]
        if all(element is None for element in elements):
            return None
        return step_in_turn(elements, self._plans[0].structure.pack)

    def state(self) -> State:
        pairs = zip(self._plans, self._streams, strict=True)
        return [(plan.description, position_of(plan, stream)) for plan, stream in pairs]

    def resume(self, positions: Sequence[Position]) -> None:
        if len(positions) != self._workers.num_workers:
            raise ValueError(
                "Where a function makes each worker's dataset, a pass resumes with as many workers "
                f"as it began. Expected: {len(positions)}. Received: {self._workers.num_workers}. "
                "Use experimental_distribute_dataset, or begin a new epoch."
            )
        state, taken = positions[self._workers.index]
        expected = [plan.description for plan in self._plans]
        received = [description for description, _ in state]
        if received != expected:
            raise ValueError(
                "The state belongs to datasets other than those of the function. Expected: "
                f"{expected}. Received: {received}"
            )
        pairs = zip(self._plans, state, strict=True)
        self._streams = [stream_at(plan, position) for plan, (_, position) in pairs]
        self.skip(taken)


class IterableBatches(ReplicaBatches):
    """The global batches of any iterable, each divided by `Shares`.

    Args:
        source: An iterable of pytrees of arrays with the same number of examples along their first
            axes.
        num_replicas: The number of replicas.
        workers: The worker's index. All workers iterate over the same batches.
        shares: The shares of all replicas of a global batch.

    Raises:
        TypeError: `source` is not an iterable of batches.
    """

    is_of_datasets = False
    is_global = True

    def global_steps(self) -> Steps:
        return _IterableSteps(iter(self._source), 1, InputWorkers())

    def __init__(
        self,
        source: Iterable[Any],
        num_replicas: int,
        workers: InputWorkers,
        shares: ReplicaShares = EQUAL_SHARES,
    ):
        super().__init__(num_replicas, workers, shares)
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

    @property
    def description(self) -> str:
        return f"{type(self).__name__} of {type(self._source).__name__}"

    def steps(self) -> Steps:
        batches = iter(self._source)
        return _IterableSteps(batches, self._num_replicas, self._workers, self.shares.proportions)

    @property
    def signature(self) -> Signature:
        raise TypeError(
            f"A {type(self._source).__name__} has no element_spec. Distribute a "
            "unison.data.Dataset, or look at a batch."
        )

    def cardinality(self) -> int:
        try:
            return len(self._source)  # type: ignore[arg-type]  # if it has a length
        except TypeError:
            return UNKNOWN


class _IterableSteps(Steps):
    def __init__(
        self,
        batches: Iterator[Any],
        num_replicas: int,
        workers: InputWorkers,
        proportions: Proportions = None,
    ):
        self._batches = batches
        self._num_replicas = num_replicas
        self._workers = workers
        self._proportions = proportions

    def divide_by(self, proportions: Proportions) -> None:
        self._proportions = proportions

    def next(self) -> Step | None:
        for batch in self._batches:
            leaves, structure = jax.tree.flatten(batch)
            if self._num_replicas * self._workers.num_workers > 1:
                leaves = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
            pack = functools.partial(jax.tree.unflatten, structure)
            if not leaves:
                return Step([], pack)
            return divided_step(leaves, pack, self._num_replicas, self._workers, self._proportions)
        return None

    def state(self) -> State:
        return self._knowing_iterator().get_state()

    def resume(self, positions: Sequence[Position]) -> None:
        (position,) = positions
        self._knowing_iterator().set_state(position.state)
        self.skip(position.taken)

    def _knowing_iterator(self) -> Any:
        """Returns the iterator, if it has a position, as Grain's have."""
        if not (hasattr(self._batches, "get_state") and hasattr(self._batches, "set_state")):
            raise TypeError(
                "The distributed iterable has no position to save: it has no `get_state` and "
                f"`set_state`. Received: {self._batches!r}. Distribute a unison.data.Dataset."
            )
        return self._batches


def divided_step(
    leaves: Sequence[Any],
    pack: Pack,
    num_replicas: int,
    workers: InputWorkers,
    proportions: Proportions,
) -> Step:
    """Returns a worker's parts of the leaves of a global batch, by `Shares`.

    Raises:
        ValueError: They have no examples, or different numbers of them, along their first axes.
    """
    if num_replicas * workers.num_workers == 1:
        return Step([[leaf] for leaf in leaves], pack)
    shares = Shares(count_examples(leaves), num_replicas * workers.num_workers, proportions)
    if workers.num_workers > 1:
        own = shares.of(_replicas_of(workers, num_replicas))
        leaves = [leaf[own] for leaf in leaves]
    return _step_of_shares(leaves, pack, num_replicas, shares, workers)


def _step_of_shares(
    own: Sequence[Any], pack: Pack, num_replicas: int, shares: Shares, workers: InputWorkers
) -> Step:
    """Returns the step of a worker's own examples."""
    replicas = _replicas_of(workers, num_replicas)
    parts = cut(own, shares.counts[replicas.start : replicas.stop])
    if workers.num_workers == 1:
        return Step(parts, pack)
    shapes = [[(count, *shape_of(leaf)[1:]) for count in shares.counts] for leaf in own]
    return Step(parts, pack, shapes)


def _replicas_of(workers: InputWorkers, num_replicas: int) -> range:
    first = workers.index * num_replicas
    return range(first, first + num_replicas)


def cut(leaves: Sequence[Any], counts: Sequence[int]) -> list[Parts]:
    """Returns the parts of leaves with the examples of replicas, given the replicas' `counts`."""
    if len(counts) == 1:
        return [[leaf] for leaf in leaves]
    are_ragged = any(isinstance(leaf, RaggedArray) for leaf in leaves)
    if counts[0] and len(set(counts)) == 1 and not are_ragged:
        return [leaf.reshape(len(counts), counts[0], *leaf.shape[1:]) for leaf in leaves]
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    slices = [slice(*bound) for bound in bounds]
    return [[leaf[own] for own in slices] for leaf in leaves]


def count_examples(leaves: Sequence[Any]) -> int:
    """Returns the number of examples of a batch, which all of its arrays must have.

    Raises:
        ValueError: The arrays have different numbers.
    """
    shapes = [shape_of(leaf) for leaf in leaves]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(
            "All arrays of a batch must have the same number of examples along their first axis. "
            f"Received shapes: {shapes}"
        )
    return shapes[0][0]
