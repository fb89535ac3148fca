"""Reducing the components of a value with NumPy, outside of programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.collectives.operations import ReduceOp, mean_dtype
from unison.runtime.precision import device_dtype


def reduce_components(
    op: ReduceOp, parts: Sequence[Any], axis: int | Sequence[int] | None = None
) -> jax.Array:
    """Combines `parts` into one array.

    Args:
        op: The operation; `MEAN` divides by the true number of elements.
        parts: One array per replica, of one dtype; of equal shapes if `axis` is None.
        axis: An axis, or several, to reduce each part along as well.

    Returns:
        An array of the dtype of the parts; Booleans are counted by `SUM`, and the mean of integers
        is a floating-point number.

    Raises:
        ValueError: `axis` is not an axis of the parts, or there are no elements for a minimum or
            maximum.
    """
    arrays = [np.asarray(part) for part in parts]
    dtype = arrays[0].dtype
    combine = _COMBINE[op]
    if axis is None:
        count = len(arrays)
        total = combine(np.stack(arrays), 0, _wide_dtype(op, dtype))
    else:
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        counts = [_elements_along(array, axes) for array in arrays]
        count = sum(counts)
        if op in (ReduceOp.MIN, ReduceOp.MAX):  # replicas without elements do not contribute
            arrays = [array for array, n in zip(arrays, counts, strict=True) if n] or arrays
        reduced = [combine(array, axes, _wide_dtype(op, dtype)) for array in arrays]
        total = combine(np.stack(reduced), 0, _wide_dtype(op, dtype))
    result_dtype = sum_dtype(dtype) if op is ReduceOp.SUM else dtype
    if op is ReduceOp.MEAN:
        total, result_dtype = total / count, mean_dtype(dtype)
    return on_device(total.astype(result_dtype))


def on_device(array: np.ndarray) -> jax.Array:
    """Returns `array` as an array on a device, with 64 bits if JAX supports them."""
    return jnp.asarray(array, dtype=device_dtype(array.dtype))


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype of a sum: Booleans are counted, other values keep their dtype."""
    return jnp.int32 if dtype == jnp.bool_ else dtype


_COMBINE: dict[ReduceOp, Callable[[np.ndarray, Any, Any], np.ndarray]] = {
    ReduceOp.SUM: lambda array, axis, wide: array.sum(axis, dtype=wide),
    ReduceOp.MEAN: lambda array, axis, wide: array.sum(axis, dtype=wide),
    ReduceOp.PROD: lambda array, axis, wide: array.prod(axis, dtype=wide),
    ReduceOp.MIN: lambda array, axis, wide: array.min(axis),
    ReduceOp.MAX: lambda array, axis, wide: array.max(axis),
}


def _wide_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Returns the dtype to compute in: NumPy adds float16 in float16, where sums may overflow."""
    if op is ReduceOp.MEAN:
        return np.result_type(dtype, np.float64)
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if is_half else np.dtype(sum_dtype(dtype))


def _elements_along(array: np.ndarray, axes: Sequence[int]) -> int:
    for axis in axes:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                "reduce takes an axis of the components, or None to combine them as they are. "
                f"Received: axis={axis}, a component of shape {array.shape}"
            )
    return math.prod(array.shape[axis] for axis in axes)
