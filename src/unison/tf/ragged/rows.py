"""Rows of tensors and ragged tensors, selected and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.errors import InvalidArgumentError
from unison.tf.dispatch import implementations
from unison.tf.ragged.partitions import Splits, lengths_of, ranges
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.text import StringTensor


def implements(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the implementation of operations for ragged arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            implementations[name] = function
        return function

    return register


def select(values: Any, indices: Any, most: int | None = None) -> Any:
    """Returns the rows of a tensor, or of a ragged one, at indices.

    Args:
        values: The tensor.
        indices: A vector, NumPy's or traced; the rows of `NOWHERE` are zeros, or empty.
        most: In a program, the most values that the rows of a ragged tensor have; default: as many
            as there are, if no row is selected twice.
    """
    if isinstance(values, RaggedTensor):
        splits = values.partitions[0]
        starts, lengths = (at(part, indices) for part in (splits[:-1], lengths_of(splits)))
        inner = values.inner
        places, own_splits = ranges(starts, lengths, inner.shape[0] if most is None else most)
        selected = select(inner, places)
        return around(selected, own_splits, values.uniform_lengths[0])
    if isinstance(values, StringTensor):
        return values[np.asarray(indices)]
    if isinstance(indices, np.ndarray):
        return values[indices]
    return at(values, indices)


def at(values: Any, indices: Any) -> Any:
    """Returns the rows of an array at indices; zeros for those that are out of range."""
    if isinstance(values, np.ndarray) and isinstance(indices, np.ndarray):
        return values[indices]
    if values.shape[0] == 0:
        # Of the values, so that the gradients by them are zeros.
        nothing = jnp.sum(values, axis=0, dtype=values.dtype)
        return jnp.broadcast_to(nothing, (indices.shape[0], *values.shape[1:]))
    if isinstance(values, np.ndarray):
        values = jnp.asarray(values, values.dtype)
    return values.at[indices].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def around(values: Any, splits: Splits, uniform: int | None = None) -> RaggedTensor:
    """Returns the rows of a tensor, or of a ragged one, that splits determine, unchecked."""
    if isinstance(values, RaggedTensor):
        return RaggedTensor.of(
            values.flat,
            (splits, *values.partitions),
            (uniform, *values.uniform_lengths),
        )
    return RaggedTensor.of(values, (splits,), (uniform,))


def joined(parts: Sequence[Any]) -> tuple[Any, list[int]]:
    """Returns tensors, all dense or all ragged, one after the other, and where each begins.

    In a program, the padding of a part stays between it and the next one.
    """
    counts = [part.shape[0] for part in parts]
    starts = [0, *np.cumsum(counts).tolist()]
    if not is_ragged(parts[0]):
        if isinstance(parts[0], StringTensor):
            return StringTensor(np.concatenate([part.numpy() for part in parts])), starts
        return jnp.concatenate(parts), starts
    inner, firsts = joined([part.inner for part in parts])
    splits = [part.partitions[0] for part in parts]
    limits = [own[1:] + first for own, first in zip(splits, firsts, strict=False)]
    if all(isinstance(own, np.ndarray) for own in splits):
        whole = np.concatenate([splits[0][:1], *limits])
        return around(inner, whole), starts
    begins = jnp.concatenate([own[:-1] + first for own, first in zip(splits, firsts, strict=False)])
    lengths = jnp.concatenate([lengths_of(own) for own in splits])
    places, whole = ranges(begins, lengths, inner.shape[0])
    return around(select(inner, places), whole), starts


def match_splits_dtypes(tensors: Sequence[RaggedTensor]) -> None:
    """Raises ValueError if ragged tensors have splits of different dtypes."""
    found = {np.dtype(tensor.partitions[0].dtype) for tensor in tensors}
    if len(found) > 1:
        raise ValueError(
            "Input RaggedTensors have mismatched row_splits dtypes; use "
            "RaggedTensor.with_row_splits_dtype() to convert them to compatible dtypes."
        )


def check_range(indices: Any, size: int, what: str) -> None:
    """Raises if known indices are out of range."""
    if isinstance(indices, jax.core.Tracer):
        return
    array = np.asarray(indices)
    outside = (array < 0) | (array >= size)
    if outside.any():
        raise InvalidArgumentError(message=f"{what}: {array[outside][0]} is not in [0, {size})")
