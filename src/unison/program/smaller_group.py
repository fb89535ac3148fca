"""Predicts the arguments that a program will get when one of the workers is lost."""

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
    """Returns the descriptions that such arguments will have in a group of a different size.

    An argument with rows on each replica is assumed to be part of a batch, which is divided among
    the replicas of that group; or the rows per replica are kept, if the per-replica batch size is.

    Args:
        num_replicas: The number of replicas of that group.
        descriptions: The arguments.
        placement: The current replicas.

    Returns:
        Their descriptions; None if they cannot be predicted.
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
    """Returns the shape and dtype of each argument of a program; None for static ones.

    Args:
        descriptions: The arguments.
        count: The number of this worker's replicas.
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
