"""Keras' loops on several workers: each reads its own rows of every batch.

A batch is then a tree of `OwnRows`. Datasets are distributed as in a loop of one's own, arrays are
indexed by the rows of a worker's replicas, loaders of PyTorch and Grain load those examples, and
the batches of a `PyDataset` with processes are computed in turn. What else Keras takes (generators)
computes whole batches, of which a step takes its rows.

In a group of workers that may change, that is so for datasets whose batches can be read again: a
step that the next group repeats is divided between its workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter

from unison.data import Shares
from unison.data.distribution.own_rows import BatchesOfOwnRows, OwnRows, rows_of
from unison.data.statistics import metered
from unison.errors import InvalidArgumentError
from unison.keras.batches_in_turn import BatchesInTurn, are_shared
from unison.keras.datasets import DatasetAdapter
from unison.keras.differing_data import compare_arrays
from unison.keras.grain_loaders import rows_of_grain
from unison.keras.torch_loaders import is_divisible, rows_of_loader
from unison.runtime.elastic.options import PER_REPLICA_BATCH
from unison.runtime.host_memory import may_regroup
from unison.runtime.process_group import all_gather_json
from unison.strategies import Strategy


def takes_rows_alone(strategy: Strategy) -> bool:
    """Whether a worker of this strategy takes its own rows of the batches of Keras' loops.

    Where batches grow and shrink with the number of workers, each has the whole batches.
    """
    may_change = strategy.group is not None or may_regroup()
    if may_change and strategy.elastic_options.keep == PER_REPLICA_BATCH:
        return False
    return strategy.group is not None or strategy.input_workers.num_workers > 1


def own_batches(epochs: Any, strategy: Strategy) -> Iterator[Any] | None:
    """Returns this worker's rows of the batches of a new pass; None if it needs whole batches.

    Args:
        epochs: Keras' `EpochIterator`.
        strategy: The strategy whose replicas get the batches.
    """
    adapter = epochs.data_adapter
    dataset = adapter.distributed if isinstance(adapter, DatasetAdapter) else None
    if strategy.group is not None and (dataset is None or not dataset.can_be_divided_again):
        return None  # the steps that the group does not complete are divided again
    if dataset is not None:
        if adapter.num_batches is None:
            _end_with_the_data(epochs)
        return _RowsOfDataset(adapter, dataset.own_batches())
    if are_shared(adapter):
        return BatchesInTurn(adapter, strategy)
    if isinstance(adapter, ArrayDataAdapter) and _are_dense(adapter._inputs):
        compare_arrays(adapter, keras.tree.flatten(adapter._inputs))
        return _rows_of_arrays(adapter, strategy)
    proportions = strategy.replica_shares.proportions  # as they are when the pass begins
    count = strategy.placement.num_replicas

    def shares_of_size(size: int) -> Shares:
        return Shares(size, count, proportions)

    replicas = _replicas_of(strategy)
    if isinstance(adapter, GrainDatasetAdapter):
        return rows_of_grain(adapter, shares_of_size, replicas)
    if is_divisible(getattr(adapter, "_dataloader", None)):
        return rows_of_loader(adapter, shares_of_size, replicas, strategy.input_workers.index)
    return None


def _replicas_of(strategy: Strategy) -> range:
    local = strategy.placement.local_replicas
    return range(local[0], local[-1] + 1)


class _RowsOfDataset(Iterator[Any]):
    """The batches of a Keras adapter, which can be skipped without being computed."""

    def __init__(self, adapter: DatasetAdapter, batches: BatchesOfOwnRows):
        self._adapter = adapter
        self._own = batches
        self._batches = adapter.checked(metered(batches))

    def __next__(self) -> Any:
        return next(self._batches)

    def leave(self) -> None:
        """Ends the wait for other workers, in any thread."""
        self._own.leave()

    def skip(self, count: int) -> None:
        self._own.skip(count)
        self._batches = self._adapter.checked(metered(self._own), is_empty=not count)


def _end_with_the_data(epochs: Any) -> None:
    """Lets every epoch end where its data ends, whatever the number of steps of earlier ones."""

    def forget_number() -> None:
        epochs._num_batches = None

    if epochs.steps_per_epoch is None:
        vars(epochs)["_interrupted_warning"] = forget_number  # called at the end of the data


def _are_dense(inputs: Any) -> bool:
    return all(isinstance(leaf, np.ndarray | jax.Array) for leaf in keras.tree.flatten(inputs))


def _rows_of_arrays(adapter: ArrayDataAdapter, strategy: Strategy) -> Iterator[Any]:
    """Yields this worker's rows of batches of arrays, in Keras' order."""
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    replicas = _replicas_of(strategy)

    def own_rows(sliceable: Any, indices: Any) -> OwnRows:
        is_slice = isinstance(indices, slice)
        examples = indices.stop - indices.start if is_slice else len(indices)
        proportions = strategy.replica_shares.proportions
        shares = Shares(examples, strategy.placement.num_replicas, proportions)
        own = shares.of(replicas)
        first = indices.start if is_slice else 0
        where = slice(first + own.start, first + own.stop) if is_slice else indices[own]
        rows = sliceable.convert_to_jax_compatible(sliceable[where])
        return OwnRows.of(rows, shares, replicas)

    return adapter._get_iterator(own_rows, inputs)


def example_of(batch: Any) -> Any:
    """Returns a batch with arrays in place of `OwnRows`, with this worker's rows repeated."""

    def whole(leaf: Any) -> Any:
        return rows_of(leaf, len(leaf)) if isinstance(leaf, OwnRows) else leaf

    return jax.tree.map(whole, batch)


def require_equal_shapes(leaves: Sequence[OwnRows]) -> None:
    """Raises an InvalidArgumentError on all workers if their rows have different shapes or dtypes.

    All workers call this when they meet a new shape. One that meets it alone waits for the others
    until the timeout.
    """
    own = [[list(leaf.shape), str(leaf.dtype)] for leaf in leaves]
    of_all = all_gather_json(own, "The shapes of a batch")
    for worker, said in enumerate(of_all):
        if said != of_all[0]:
            raise InvalidArgumentError(
                message="The rows of a batch must have the same shapes and dtypes on all workers. "
                f"Worker 0 has {of_all[0]}, worker {worker} has {said} (with the whole batch's "
                "number of examples). Pad the examples to one size."
            )


def skip_batches(batches: Iterator[Any], count: int) -> None:
    """Skips batches of a pass, which must have as many; they are not computed where that can be."""
    skip = getattr(batches, "skip", None)
    if skip is not None:
        skip(count)
        return
    for _ in range(count):
        next(batches)


def begin_at_epoch(epochs: Any, number: int) -> None:
    """Lets the next epoch of Keras' `EpochIterator` be one with a number, as its data may draw."""
    if are_shared(epochs.data_adapter):
        epochs.data_adapter.py_dataset.epochs += number
