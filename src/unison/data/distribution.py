"""Batches for the replicas: every global batch of an iterable, divided by `Shares`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unison.data.shares import Shares
from unison.runtime.placement import Placement
from unison.values import PerReplica


class DistributedBatches:
    """The batches of `source`, each with a `PerReplica` for every array.

    A batch of n examples is divided into contiguous chunks of ceil(n / replicas); the last
    replicas may get fewer, or none. With one replica the batches come as they are. It can be
    iterated as often as the source, and has the source's length if that has one.

    Args:
        source: An iterable of global batches: pytrees of arrays with one number of examples along
            their first axes.
        placement: The replicas' devices.

    Raises:
        TypeError: `source` is not an iterable of batches.
        ValueError: While iterating: the arrays of a batch differ in their number of examples.
    """

    def __init__(self, source: Iterable[Any], placement: Placement):
        if isinstance(source, np.ndarray | jax.Array | str | bytes | dict | tuple):
            raise TypeError(
                "Expected an iterable of batches: a list, a generator, a Keras PyDataset. "
                f"Received: {type(source).__name__}, which would be cut along its first axis. "
                "Yield the batches that the replicas are to share."
            )
        if not isinstance(source, Iterable):
            raise TypeError(
                "Expected an iterable of batches: a list, a generator, a Keras PyDataset. "
                f"Received: {source!r}"
            )
        self._source = source
        self._placement = placement

    def __iter__(self) -> Iterator[Any]:
        for batch in self._source:
            yield distribute_batch(batch, self._placement)

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # raises TypeError where it has none


def distribute_batch(batch: Any, placement: Placement) -> Any:
    """Returns the tree of `batch` with a `PerReplica` of the replicas' chunks for every array.

    Raises:
        ValueError: The arrays have no or different numbers of examples along their first axes.
    """
    if placement.num_replicas == 1:
        return batch
    leaves, structure = jax.tree.flatten(batch)
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
    if not arrays:
        return batch
    shares = Shares(count_examples(arrays), placement.num_replicas)
    return jax.tree.unflatten(structure, [_divide(array, shares, placement) for array in arrays])


def count_examples(arrays: Sequence[Any]) -> int:
    """Returns the number of examples of a batch, which all of its arrays must have.

    Raises:
        ValueError: They have not.
    """
    sizes = {array.shape[0] if array.ndim else None for array in arrays}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            "All arrays of a batch must have the same number of examples along their first axis. "
            f"Received shapes: {[array.shape for array in arrays]}"
        )
    return arrays[0].shape[0]


def _divide(array: Any, shares: Shares, placement: Placement) -> PerReplica:
    if shares.are_even and shares.examples:
        stacked = array.reshape(shares.num_replicas, shares.chunk, *array.shape[1:])
        return PerReplica.from_stacked(placement.spread(stacked), placement)
    starts = [replica * shares.chunk for replica in range(shares.num_replicas)]
    return PerReplica([array[start : start + shares.chunk] for start in starts])
