"""Grain's datasets and loaders in Keras' loops on several workers: each reads its own examples.

Grain is not imported: an object can be its only if the program has imported it. Which part of a
pipeline makes the batches is found in attributes that are not public, as Keras' own adapter does.
Where they are others, or the pipeline is, batches are read whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from unison.data import Shares
from unison.data.distribution.own_positions import OwnPositions
from unison.data.distribution.own_rows import OwnRows
from unison.errors import InvalidArgumentError
from unison.runtime.process_group import all_gather_json


def is_grain_loader(data: Any) -> bool:
    """Whether it is Grain's `DataLoader`."""
    return "grain" in sys.modules and isinstance(data, sys.modules["grain"].DataLoader)


def reads_a_shard(loader: Any) -> bool:
    """Whether the `ShardOptions` of a loader leave records to other workers."""
    options = getattr(loader, "_shard_options", None)
    return options is not None and options.shard_count > 1


class RowsOfGrain(Iterator[Any]):
    """A worker's rows of the batches of a pass, as trees of `OwnRows`.

    Args:
        pipeline: Grain's pipeline of the worker's examples, in batches.
        positions: The examples that it reads.
        replicas: The worker's replicas.
        whole: Grain's pipeline of whole batches.
    """

    def __init__(self, pipeline: Any, positions: OwnPositions, replicas: range, whole: Any):
        self._positions = positions
        self._replicas = replicas
        self._whole = whole
        self._pipeline = pipeline
        self._batches: Iterator[Any] | None = None
        self._number = 0

    def __next__(self) -> Any:
        if self._batches is None:  # Keras takes iterators that it never asks
            self._batches = iter(self._pipeline)
        if self._number == self._positions.num_batches:
            raise StopIteration
        shares = self._positions.shares_of(self._number)
        # Grain makes no batch without examples: another one shows its structure.
        has_rows = any(shares.counts[self._replicas.start : self._replicas.stop])
        batch = next(self._batches if has_rows else iter(self._whole))
        self._number += 1

        def own_rows(array: Any) -> OwnRows:
            return OwnRows.of(np.asarray(array), shares, self._replicas)

        return keras.tree.map_structure(own_rows, batch, none_is_leaf=False)


def rows_of_grain(
    adapter: Any, shares_of_size: Callable[[int], Shares], replicas: range
) -> RowsOfGrain | None:
    """Returns this worker's rows of the batches of a new pass; None if it needs whole batches.

    Args:
        adapter: Keras' adapter of a dataset or a loader of Grain.
        shares_of_size: Returns the shares of a batch of a size.
        replicas: The worker's replicas.

    Raises:
        InvalidArgumentError: The workers have other numbers of examples, or sizes of batches.
    """
    made = _own_pipeline(adapter._dataset, shares_of_size, replicas)
    _require_the_same(adapter._dataset, None if made is None else made[1])
    return None if made is None else RowsOfGrain(*made, replicas, adapter._dataset)


def _own_pipeline(
    data: Any, shares_of_size: Callable[[int], Shares], replicas: range
) -> tuple[Any, OwnPositions] | None:
    """Returns the pipeline of a worker's examples, and their positions; None if it has none."""
    grain = sys.modules["grain"]
    try:
        if isinstance(data, grain.DataLoader):
            return _own_loader(data, shares_of_size, replicas)
        found = _batches_and_examples(data)
        if found is None:
            return None
        batches, examples, read_options = found
        size, drops = batches._batch_size, batches._drop_remainder
        positions = OwnPositions(examples, size, shares_of_size, replicas, drop_remainder=drops)
    except (AttributeError, ValueError):
        return None
    own = grain.MapDataset.source(positions).batch(positions.own)
    return own.to_iter_dataset(read_options), positions


def _batches_and_examples(data: Any) -> tuple[Any, Any, Any] | None:
    """Returns the part of a pipeline that makes batches, its examples, and how they are read.

    Args:
        data: Examples by index that are batched; those that are iterated, before or after.
    """
    grain = sys.modules["grain"]
    iterated = []
    while isinstance(data, grain.IterDataset):
        iterated.append(data)
        (data,) = data.parents
    names = [type(each).__name__ for each in iterated]
    if names in ([], ["PrefetchIterDataset"]) and type(data).__name__ == "BatchMapDataset":
        batches, examples = data, data.parents[0]
    elif names == ["BatchIterDataset", "PrefetchIterDataset"]:
        batches, examples = iterated[0], data
    else:
        return None
    stacks = sys.modules[type(batches).__module__].make_batch
    if batches._batch_fn is not stacks or not _are_one_to_one(examples):
        return None
    if not iterated:
        return batches, examples, None
    reads = iterated[-1]
    return None if reads._allow_nones else (batches, examples, reads._read_options)


def _are_one_to_one(examples: Any) -> bool:
    """Whether all examples by index are there: none is left out, as far as it is known."""
    kind = type(examples)
    leaves_out = kind.__name__ in ("FilterMapDataset", "FlatMapMapDataset")
    is_known = kind.__module__.startswith("grain.") and not leaves_out
    return is_known and all(map(_are_one_to_one, examples.parents))


def _own_loader(
    loader: Any, shares_of_size: Callable[[int], Shares], replicas: range
) -> tuple[Any, OwnPositions] | None:
    grain = sys.modules["grain"]
    *maps, batch = loader._operations
    of_each = grain.transforms.Map, grain.transforms.RandomMap
    is_batched = isinstance(batch, grain.transforms.Batch) and batch.batch_fn is None
    has_length = hasattr(type(loader._sampler), "__len__")
    if reads_a_shard(loader) or not (is_batched and has_length):
        return None
    if not all(isinstance(each, of_each) for each in maps):
        return None
    options = loader.multiprocessing_options
    positions = OwnPositions(
        loader._sampler,
        batch.batch_size,
        shares_of_size,
        replicas,
        processes=max(options.num_workers, 1),
        drop_remainder=batch.drop_remainder,
    )
    own = grain.DataLoader(
        data_source=loader._data_source,
        sampler=positions,
        operations=[*maps, grain.transforms.Batch(positions.own)],
        worker_count=options.num_workers,
        worker_buffer_size=options.per_worker_buffer_size,
        shard_options=grain.sharding.NoSharding(),
        read_options=loader._read_options,
        enable_profiling=options.enable_profiling,
    )
    return own, positions


def _require_the_same(data: Any, positions: OwnPositions | None) -> None:
    """Raises an InvalidArgumentError on all workers unless they divide the same batches."""
    slices = [] if isinstance(data, sys.modules["grain"].DataLoader) else _slices_of(data)
    said = [None if positions is None else positions.described, slices]
    of_all = all_gather_json(said, "The batches of a Grain dataset")
    for worker, other in enumerate(of_all):
        if other != of_all[0]:
            raise InvalidArgumentError(
                message="All workers must be given Grain datasets of the same batches, of which "
                f"each reads its part. Worker 0 has {_described(*of_all[0])}, worker {worker} has "
                f"{_described(*other)}. For data of each worker's own, pass "
                "strategy.distribute_datasets_from_function(lambda context: "
                "Dataset.from_source(dataset))."
            )


def _slices_of(data: Any) -> list[str]:
    """Returns the slices (`data[worker::count]`) in a pipeline."""
    own = [str(data)] if type(data).__name__ == "SliceMapDataset" else []
    return own + [each for parent in data.parents for each in _slices_of(parent)]


def _described(batches: list[int] | None, slices: list[str]) -> str:
    said = "other data" if batches is None else f"{batches[0]} examples in batches of {batches[1]}"
    return ", of ".join([said, *slices])
