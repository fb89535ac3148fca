"""What a program will be called with when one of the workers is lost, as far as can be foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unison.program.arguments import Ragged, Stacked, Static, Whole
from unison.runtime.elastic import ElasticPlacement
from unison.runtime.elastic.options import PER_REPLICA_BATCH


def described_for(
    num_replicas: int, descriptions: Sequence[Any], placement: ElasticPlacement
) -> tuple[Any, ...] | None:
    """Returns what arguments like these will be in a group of another size.

    What has rows on each replica is taken for a part of a batch, which is divided between those
    that there will be; or as many rows stay on each, if the batches of replicas are to stay.

    Args:
        num_replicas: How many replicas there will be.
        descriptions: The arguments.
        placement: The replicas that there are.

    Returns:
        Their descriptions; None where nobody can know.
    """
    found = [_described(num_replicas, description, placement) for description in descriptions]
    return None if None in found else tuple(found)


def _described(num_replicas: int, description: Any, placement: ElasticPlacement) -> Any:
    if isinstance(description, Stacked):
        shapes: Sequence[tuple[int, ...]] = [description.shape[1:]] * placement.num_replicas
    elif isinstance(description, Ragged):
        shapes = description.shapes
    else:
        return description
    if len({shape[1:] for shape in shapes}) > 1:
        return None
    shape = shapes[0]
    expected = [shape] * num_replicas
    if shape and placement.group.options.keep != PER_REPLICA_BATCH:
        rows = sum(rows for rows, *_ in shapes)
        chunk = -(-rows // num_replicas)
        left = [max(rows - place * chunk, 0) for place in range(num_replicas)]
        expected = [(min(chunk, more), *shape[1:]) for more in left]
    if num_replicas == 1:
        return Whole(expected[0], description.dtype)
    if len(set(expected)) > 1:
        return Ragged(tuple(expected), description.dtype)
    return Stacked((len(placement.local_devices), *expected[0]), description.dtype)


def shapes_of(descriptions: Sequence[Any], count: int) -> list[jax.ShapeDtypeStruct | None]:
    """Returns what a program gets for each of its arguments; None for those that are part of it.

    Args:
        descriptions: The arguments.
        count: How many of the replicas are this worker's.
    """

    def shape_of(described: Any) -> jax.ShapeDtypeStruct | None:
        if isinstance(described, Static):
            return None
        if isinstance(described, Whole):
            return jax.ShapeDtypeStruct(
                described.shape, described.dtype, weak_type=described.weak_type
            )
        if isinstance(described, Stacked):
            return jax.ShapeDtypeStruct(described.shape, described.dtype)
        largest = tuple(int(size) for size in np.max(described.shapes, axis=0))
        return jax.ShapeDtypeStruct((count, *largest), described.dtype)

    return [shape_of(described) for described in descriptions]
