"""`DistributedDataset`: batches for the replicas of a strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from unison.data.dataset import Dataset
from unison.data.iterators import ElementIterator, require_python
from unison.data.leaves import dtype_of, shape_of
from unison.data.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    options_of,
)
from unison.data.plan import INFINITE
from unison.data.prefetching import ReadAhead
from unison.data.replica_batches import (
    BatchesInTurn,
    DividedBatches,
    IterableBatches,
    OwnBatches,
    Parts,
    RegroupedExamples,
    ReplicaBatches,
    Step,
)
from unison.runtime.placement import Placement
from unison.runtime.precision import device_array
from unison.values import PerReplica, is_numeric

#: The policies that divide the stream of examples, whatever the batches.
_OVER_BATCHES = (AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT)


class DistributedDataset:
    """Batches with a `PerReplica` for every array; with one replica, with the arrays themselves.

    It can be iterated over as often as its source can. Batches of datasets are put on the
    replicas' devices by a thread, ahead of time.

    Args:
        source: Where the batches come from.
        placement: The replicas' devices.
        options: How the batches get there.

    TF: `tf.distribute.DistributedDataset`.
    """

    def __init__(self, source: ReplicaBatches, placement: Placement, options: InputOptions):
        self._source = source
        self._placement = placement
        self._options = options

    def __iter__(self) -> DistributedIterator:
        require_python("Iterating over a distributed dataset")
        batches: Iterator[Any] = map(self._placed, self._source.steps())
        if self._options.experimental_fetch_to_device and self._source.is_of_datasets:
            batches = _read_ahead(batches, self._options.experimental_per_replica_buffer_size)
        return DistributedIterator(batches, lambda: self.element_spec, self._source.optional)

    @property
    def element_spec(self) -> Any:
        """What a batch is: a `PerReplicaSpec` for every array; of one replica, the array's spec.

        Raises:
            TypeError: The source is an iterable that does not tell.
        """
        signature = self._source.signature.map(self._source.shown_spec)
        count = self._placement.num_replicas
        if count > 1:
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
        """Returns the last state of a function of a state and every batch."""
        return functools.reduce(reduce_func, self, initial_state)

    def global_batches(self) -> Iterator[Any]:
        """Yields the batches of all replicas together, on the host."""
        for step in self._source.steps():
            yield step.pack([_united(parts) for parts in step.parts])

    def _placed(self, step: Step) -> Any:
        return step.pack([self._placed_leaf(parts) for parts in step.parts])

    def _placed_leaf(self, parts: Parts) -> Any:
        devices = self._placement.devices
        if len(devices) == 1 and not self._source.is_of_datasets:
            return parts[0]
        fetches = self._options.experimental_fetch_to_device
        if not fetches or not is_numeric(dtype_of(parts[0])):
            shown = [self._source.shown(part) for part in parts]
            return shown[0] if len(devices) == 1 else PerReplica(shown)
        if len(devices) == 1:
            return jax.device_put(_as_array(parts[0]), devices[0])
        if isinstance(parts, list) and len({shape_of(part) for part in parts}) == 1:
            parts = np.stack(parts)
        if isinstance(parts, list):
            pairs = zip(parts, devices, strict=True)
            return PerReplica([jax.device_put(_as_array(part), to) for part, to in pairs])
        return PerReplica.from_stacked(self._placement.spread(_as_array(parts)), self._placement)


class DistributedIterator(ElementIterator):
    """The batches of a `DistributedDataset`, one after the other.

    TF: `tf.distribute.DistributedIterator`.
    """


@dataclasses.dataclass(frozen=True)
class PerReplicaSpec:
    """What a `PerReplica` value is: the specs of its components.

    TF: `PerReplicaSpec`.
    """

    value_specs: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.value_specs))})"


def distribute_dataset(
    dataset: Iterable[Any], placement: Placement, options: InputOptions | None = None
) -> DistributedDataset:
    """Returns the global batches of a dataset, each divided between the replicas.

    Raises:
        TypeError: `dataset` is no iterable of batches.
        NotImplementedError: The options ask for a dataset of every replica's own.
    """
    options = options or InputOptions()
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`."
        )
    count = placement.num_replicas
    source: ReplicaBatches
    if not isinstance(dataset, Dataset):
        source = IterableBatches(dataset, count)
    else:
        plan = dataset.plan
        size = plan.batch_size
        if size is None or options_of(plan).auto_shard_policy not in _OVER_BATCHES:
            source = DividedBatches(dataset, count)
        else:
            source = RegroupedExamples(dataset, count, size)
    return DistributedDataset(source, placement, options)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    placement: Placement,
    options: InputOptions | None = None,
) -> DistributedDataset:
    """Returns the batches of the datasets that a function makes; each replica gets whole ones.

    Args:
        dataset_fn: Makes the dataset whose batches the replicas take in turn. With
            `InputReplicationMode.PER_REPLICA`, called for each replica's own.
        placement: The replicas' devices.
        options: How the batches get there.

    Raises:
        TypeError: The function returns no dataset.
        ValueError: The options contradict each other.
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
    count = placement.num_replicas
    context = InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=count)
    datasets = [dataset_fn(context) for _ in range(count if is_own else 1)]
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"The dataset function must return a Dataset. Received: {dataset!r} of type "
                f"{type(dataset).__name__}"
            )
    source = OwnBatches(datasets) if is_own else BatchesInTurn(datasets[0], count)
    return DistributedDataset(source, placement, options)


def _as_array(value: Any) -> Any:
    """Returns an array as it can be placed: of NumPy's, 64 bits would be cut."""
    if isinstance(value, jax.Array) or value.dtype.itemsize < 8:
        return value
    return device_array(np.asarray(value))


def _united(parts: Parts) -> np.ndarray:
    if isinstance(parts, list):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return parts.reshape(-1, *parts.shape[2:])


def _read_ahead(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Yields the batches, which a thread reads; `size` of them, and at least one, may wait."""
    ahead = ReadAhead(lambda: next(batches, None), max(size, 1))
    while (batch := ahead.get()) is not None:
        yield batch
