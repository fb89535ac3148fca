"""`DistributedDataset`: batches for the replicas of a strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unison.data.dataset import Dataset
from unison.data.distribution.ahead import BatchesAhead
from unison.data.distribution.input_workers import InputWorkers
from unison.data.distribution.own_rows import BatchesOfOwnRows
from unison.data.distribution.ragged_parts import bucketed
from unison.data.distribution.replica_batches import (
    BatchesInTurn,
    DividedBatches,
    DividedExamples,
    IterableBatches,
    OwnBatches,
    RegroupedExamples,
    ReplicaBatches,
)
from unison.data.distribution.sharding import (
    agreed,
    comes_from_files,
    divided_by_files,
    divided_by_hint,
    possible_policies,
)
from unison.data.distribution.shares import EQUAL_SHARES, Proportions, ReplicaShares
from unison.data.distribution.steps import Parts, Position, Step
from unison.data.distribution.worker_examples import owned
from unison.data.iterators import ElementIterator, Optional, require_python
from unison.data.leaves import concatenate, dtype_of, shape_of
from unison.data.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from unison.data.plan import INFINITE, Plan, memories_of, recall
from unison.data.ragged import RaggedArray
from unison.data.state import State, decode, encode
from unison.runtime.placement import Placement
from unison.runtime.precision import device_array
from unison.runtime.transfers import placed
from unison.values import PerReplica, is_numeric

#: The only worker.
_ALONE = InputWorkers()

#: The number of the format of states.
_VERSION = 1


class DistributedDataset:
    """Batches with a `PerReplica` for every array; with one replica, the arrays themselves.

    It can be iterated over as often as its source. A thread copies the batches of datasets
    to the replicas' devices ahead of their use.

    Args:
        source: The source of the batches.
        placement: The devices of this worker's replicas.
        options: How the batches are transferred.
        workers: The worker's index among those that share the source.
        others: Returns other ways to divide the same dataset, for passes that began with them.

    TF: `tf.distribute.DistributedDataset`.
    """

    def __init__(
        self,
        source: ReplicaBatches,
        placement: Placement,
        options: InputOptions,
        workers: InputWorkers = _ALONE,
        others: Callable[[], Sequence[ReplicaBatches]] = lambda: (),
    ):
        self._source = source
        self._others = others
        self._placement = placement
        self._options = options
        self._workers = workers

    def __iter__(self) -> DistributedIterator:
        require_python("Iterating over a distributed dataset")
        is_ahead = self._options.experimental_fetch_to_device and self._source.is_of_datasets
        size = max(self._options.experimental_per_replica_buffer_size, 1) if is_ahead else 0
        batches = BatchesAhead(self._source, self._others, self._placed, size)
        optional = self._source.optional
        return DistributedIterator(batches, lambda: self.element_spec, optional, self._workers)

    @property
    def element_spec(self) -> Any:
        """The specs of a batch: a `PerReplicaSpec` per array; with one replica, the array's spec.

        Raises:
            TypeError: The source is an iterable without specs.
        """
        signature = self._source.signature.map(self._source.shown_spec)
        if not self._is_alone:
            count = len(self._placement.local_replicas)
            signature = signature.map(lambda spec: PerReplicaSpec((spec,) * count))
        return signature.element_spec

    @property
    def cardinality(self) -> np.int64:
        """The number of batches, or `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return np.int64(self._source.cardinality())

    def __len__(self) -> int:
        length = self._source.cardinality()
        if length < 0:
            reason = "is infinite" if length == INFINITE else "has no length that is known"
            raise TypeError(f"The distributed dataset {reason}.")
        return length

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Returns the last state of a function that is called with a state and each batch."""
        return functools.reduce(reduce_func, self, initial_state)

    def global_batches(self) -> Iterator[Any]:
        """Yields the global batches, on the host."""
        steps = self._source.global_steps()
        while (step := steps.next()) is not None:
            yield step.pack([_united(parts) for parts in step.parts])

    def own_batches(self) -> BatchesOfOwnRows:
        """Returns the global batches of a pass as trees of `OwnRows`, where several workers share
        them.
        """
        return BatchesOfOwnRows(self._source, self._workers)

    @property
    def can_be_divided_again(self) -> bool:
        """Whether a worker can compute its own rows of any batch of a pass, when workers change."""
        return isinstance(self._source, DividedExamples)

    @property
    def shares(self) -> ReplicaShares:
        """The shares of all replicas of a global batch."""
        return self._source.shares

    @property
    def num_parts(self) -> int:
        """The number of workers that read a part of their own each; 1 if they share batches."""
        return 1 if self._source.is_global else self._workers.num_workers

    def memory(self) -> State:
        """Returns the state of previous passes in this process that affects later ones."""
        return [memories_of(plan, self.num_parts > 1) for plan in self._source.plans]

    def recall(self, memory: State) -> None:
        """Restores this state: later passes are those that followed when `memory` was returned."""
        for plan, memories in zip(self._source.plans, memory, strict=True):
            recall(plan, memories, self.num_parts > 1)

    @property
    def _is_alone(self) -> bool:
        """Whether there is one replica, which gets the arrays themselves."""
        return self._placement.num_replicas == 1

    def _placed(self, step: Step) -> Any:
        if self._is_alone and not self._source.is_of_datasets:
            return step.pack([parts[0] for parts in step.parts])
        shapes = step.shapes or [[shape_of(part) for part in parts] for parts in step.parts]
        kinds = list(zip(step.parts, shapes, strict=True))
        leaves = [self._is_ragged(parts) for parts in step.parts]
        if not any(leaves):
            return step.pack(self._placed_parts(kinds))
        # The arrays of ragged leaves are placed like others, and put together again.
        arrays = [
            self._arrays_of(parts) if is_ragged else [(parts, of_all)]
            for (parts, of_all), is_ragged in zip(kinds, leaves, strict=True)
        ]
        placed = iter(self._placed_parts([kind for of_leaf in arrays for kind in of_leaf]))
        packed = []
        for (parts, _), of_leaf, is_ragged in zip(kinds, arrays, leaves, strict=True):
            own = [next(placed) for _ in of_leaf]
            packed.append(self._ragged(parts[0], own) if is_ragged else own[0])
        return step.pack(packed)

    def _placed_parts(self, kinds: Sequence[tuple[Parts, Any]]) -> list[Any]:
        """Returns the replicas' parts of leaves, each with the shapes of all, on the devices."""
        whole = [self._whole(parts, of_all) for parts, of_all in kinds]
        arrays = iter(self._fetched([leaf for leaf in whole if leaf is not None]))
        return [
            self._of_parts(parts, of_all) if leaf is None else self._of_whole(next(arrays))
            for (parts, of_all), leaf in zip(kinds, whole, strict=True)
        ]

    def _is_ragged(self, parts: Parts) -> bool:
        """Whether the parts are ragged arrays that go to the devices."""
        return isinstance(parts[0], RaggedArray) and self._is_fetched(parts)

    def _arrays_of(self, parts: Sequence[RaggedArray]) -> list[tuple[Parts, Any]]:
        """Returns the parts of each array of a ragged leaf, padded, with the shapes of all.

        With several workers, the lengths on the others are not known here: they exchange them.
        """
        columns = zip(*(jax.tree.leaves(part) for part in bucketed(parts)), strict=True)
        is_known = self._workers.num_workers == 1
        return [
            (list(column), [shape_of(array) for array in column] if is_known else None)
            for column in columns
        ]

    def _ragged(self, like: RaggedArray, arrays: list[Any]) -> Any:
        return self._source.shown(jax.tree.unflatten(jax.tree.structure(like), arrays))

    def _whole(self, parts: Parts, shapes: Sequence[tuple[int, ...]] | None) -> Any:
        """Returns the parts that can be placed as one array; None if they stay separate."""
        if not self._is_fetched(parts):
            return None
        if self._is_alone:
            return _as_array(parts[0])
        if shapes is None or len(set(shapes)) > 1:
            return None
        return _as_array(np.stack(parts) if isinstance(parts, list) else parts)

    def _fetched(self, leaves: list[Any]) -> Sequence[jax.Array]:
        if not leaves:
            return []
        if self._is_alone:
            on_device: list[jax.Array] = placed(leaves, self._placement.local_devices[0])
            return on_device
        return self._placement.spread(leaves)

    def _is_fetched(self, parts: Parts) -> bool:
        return self._options.experimental_fetch_to_device and is_numeric(dtype_of(parts[0]))

    def _of_whole(self, array: jax.Array) -> Any:
        return array if self._is_alone else PerReplica.from_stacked(array, self._placement)

    def _of_parts(self, parts: Parts, shapes: Sequence[tuple[int, ...]] | None) -> Any:
        if self._is_fetched(parts):
            pairs = zip(parts, self._placement.local_devices, strict=True)
            return PerReplica([placed(_as_array(part), to) for part, to in pairs], shapes)
        shown = [self._source.shown(part) for part in parts]
        return shown[0] if self._is_alone else PerReplica(shown, shapes)


class DistributedIterator(ElementIterator):
    """The consecutive batches of a `DistributedDataset`.

    Args:
        batches: The batches.
        element_spec: Returns their specs.
        optional: The class of the optional batches.
        workers: The worker's index among those that share the batches.

    TF: `tf.distribute.DistributedIterator`.
    """

    def __init__(
        self,
        batches: BatchesAhead,
        element_spec: Callable[[], Any],
        optional: type[Optional],
        workers: InputWorkers,
    ):
        super().__init__(batches, element_spec, optional)
        self._batches = batches
        self._workers = workers

    def close(self) -> None:
        """Stops reading ahead. No further batch is returned."""
        self._batches.close()

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the iterator, after the last batch that was returned.

        If each worker reads a part of its own (`AutoShardPolicy.FILE`, datasets of a
        function), all workers must call this, after the same step; the state is that of all of
        them. Otherwise, it is the position in the global batches.

        Returns:
            Text and arrays, for `set_state`; nothing in it needs pickling.

        Raises:
            TypeError: The source has no position.
        """
        own = self._batches.position()
        is_global = self._batches.is_global
        positions = [own] if is_global else self._workers.talk("positions").ask(tuple(own))
        text, data = encode([tuple(position) for position in positions])
        pipeline = self._batches.description
        return {"version": _VERSION, "pipeline": pipeline, "position": text, "data": data}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes at the position of another iterator over an equal dataset.

        The number of replicas and workers may differ: the rest of the epoch is
        divided among the current ones. All of them must call this.

        Args:
            state: The result of `get_state`.

        Raises:
            ValueError: It is the state of another dataset, or of datasets of a function and
                another number of workers.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"Expected the state of a distributed iterator, of version {_VERSION}. Received: "
                f"{state!r}"
            )
        positions = decode(state["position"], state["data"])
        self._batches.resume(state["pipeline"], [Position(*position) for position in positions])


@dataclasses.dataclass(frozen=True)
class PerReplicaSpec:
    """The specs of the components of a `PerReplica` value.

    TF: `PerReplicaSpec`.
    """

    value_specs: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.value_specs))})"


def distribute_dataset(
    dataset: Iterable[Any],
    placement: Placement,
    options: InputOptions | None = None,
    workers: InputWorkers = _ALONE,
    shares: ReplicaShares = EQUAL_SHARES,
) -> DistributedDataset:
    """Returns the global batches of a dataset, each divided between the replicas of all workers.

    The dataset's `AutoShardPolicy` determines what each worker reads.

    Args:
        dataset: The dataset, the same on all workers.
        placement: The devices of this worker's replicas; every worker has the same number.
        options: How the batches are transferred.
        workers: The worker's index.
        shares: The shares of all replicas of a global batch.

    Raises:
        TypeError: `dataset` is not an iterable of batches.
        NotImplementedError: The options request a separate dataset for every replica.
        NotFoundError, InvalidArgumentError: Files are to be divided, and there are none, or
            fewer than workers.
    """
    options = options or InputOptions()
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`."
        )
    count = len(placement.local_replicas)
    if not isinstance(dataset, Dataset):
        source = IterableBatches(dataset, count, workers, shares)
        return DistributedDataset(source, placement, options, workers)
    plan = dataset.plan
    if workers.are_several:
        plan = agreed(plan, workers.talk("dataset"))
    sources = (
        source
        for policy in possible_policies(plan, workers)
        for source in _divided(dataset, plan, policy, count, workers, shares)
    )
    first = next(sources)
    others = functools.cache(lambda: [*sources])
    return DistributedDataset(first, placement, options, workers, others)


def _divided(
    dataset: Dataset,
    plan: Plan,
    policy: AutoShardPolicy,
    num_replicas: int,
    workers: InputWorkers,
    shares: ReplicaShares,
) -> Iterator[ReplicaBatches]:
    """Yields the batches of one dataset, divided between the workers by a policy.

    First with this number of workers, then with other numbers.
    """
    size = plan.batch_size
    if policy is AutoShardPolicy.DATA or (size is None and workers.num_workers == 1):
        divided = DividedBatches(dataset, plan, num_replicas, workers, shares)
        is_alone = workers.num_workers == 1 and not workers.may_change
        if is_alone:
            yield divided
        own_plans = owned(plan)
        if own_plans is not None:
            yield DividedExamples(dataset, plan, own_plans, num_replicas, workers, shares)
        if not is_alone:
            yield divided
        return
    if size is None:
        raise ValueError(
            f"Under AutoShardPolicy.{policy.name}, several workers need batches of a size that is "
            f"known. Received: a dataset of {plan.description}. Use dataset.batch as the last "
            "transformation that changes shapes, or AutoShardPolicy.DATA."
        )

    def plan_of_worker() -> Plan:
        if policy is AutoShardPolicy.FILE and (workers.num_workers > 1 or comes_from_files(plan)):
            return divided_by_files(plan, workers)
        return divided_by_hint(plan, workers) if policy is AutoShardPolicy.HINT else plan

    yield RegroupedExamples(dataset, plan_of_worker, num_replicas, size, workers, shares)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    placement: Placement,
    options: InputOptions | None = None,
    workers: InputWorkers = _ALONE,
    shares: ReplicaShares = EQUAL_SHARES,
) -> DistributedDataset:
    """Returns the batches of the datasets that a function returns; replicas get whole batches.

    Args:
        dataset_fn: Returns a worker's dataset, whose batches its replicas take in turn. With
            `InputReplicationMode.PER_REPLICA`, it is called for each replica.
        placement: The devices of this worker's replicas; every worker has the same number.
        options: How the batches are transferred.
        workers: The worker's index.
        shares: Determines `InputContext.get_per_replica_batch_size`.

    Raises:
        TypeError: The function does not return a dataset.
        ValueError: The options contradict each other.
        AbortedError: The function of another worker has failed.
    """
    options = options or InputOptions()
    is_own = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if options.experimental_place_dataset_on_device and (
        not is_own or options.experimental_fetch_to_device
    ):
        raise ValueError(
            "experimental_place_dataset_on_device takes InputReplicationMode.PER_REPLICA and "
            f"experimental_fetch_to_device=False. Received: {options}"
        )
    count = len(placement.local_replicas)
    pipelines = count if is_own else 1
    talk = workers.talk("function")
    try:
        datasets = [
            _made_by(dataset_fn, workers, pipelines, pipeline, count, shares.proportions)
            for pipeline in range(pipelines)
        ]
    except Exception as error:
        talk.fail(f"in its input: {type(error).__name__}: {error}")
        raise
    talk.ask(None)
    plans = [dataset.plan for dataset in datasets]
    if workers.team_size > 1:  # they read the same examples
        plans = [agreed(plan, workers.talk_in_team("function")) for plan in plans]
    source: ReplicaBatches
    if is_own:
        source = OwnBatches(datasets, plans, workers)
    else:
        source = BatchesInTurn(datasets[0], plans[0], count, workers)
    return DistributedDataset(source, placement, options, workers)


def _made_by(
    dataset_fn: Callable[[InputContext], Dataset],
    workers: InputWorkers,
    pipelines: int,
    pipeline: int,
    num_replicas: int,
    proportions: Proportions,
) -> Dataset:
    """Returns the dataset that a function returns for one of a worker's pipelines."""
    index = workers.index * pipelines + pipeline
    of_pipeline = num_replicas // pipelines
    batch_shares = None
    if proportions is not None:
        own = proportions[index * of_pipeline :][:of_pipeline]
        batch_shares = [share / sum(proportions) for share in own]
    context = InputContext(
        num_input_pipelines=workers.num_workers * pipelines,
        input_pipeline_id=index,
        num_replicas_in_sync=workers.num_workers * num_replicas,
        batch_shares=batch_shares,
    )
    dataset = dataset_fn(context)
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"The dataset function must return a Dataset. Received: {dataset!r} of type "
            f"{type(dataset).__name__}"
        )
    return dataset


def _as_array(value: Any) -> Any:
    """Returns an array that can be placed: NumPy's 64-bit numbers would be truncated."""
    if isinstance(value, jax.Array) or value.dtype.itemsize < 8:
        return value
    return device_array(np.asarray(value))


def _united(parts: Parts) -> np.ndarray:
    if isinstance(parts, list):
        return concatenate([(part,) for part in parts])[0]
    replicas, examples, *rest = parts.shape
    return parts.reshape(replicas * examples, *rest)
