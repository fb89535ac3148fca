"""Slices of an array along its first axis, and updates of some elements of an array.

`IndexedSlices` are the gradient of an embedding lookup: the rows that were used, and their indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.array_utils import normalize_axis_index

from unison.errors import InvalidArgumentError
from unison.runtime.private_jax import constant_value
from unison.unsupported import UnsupportedMember


@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Slices of an array, by their indices along its first axis; an index may occur repeatedly.

    Args:
        values: The slices, stacked along the first axis.
        indices: The index of every slice; integers of the shape of the first axes of `values`.
        dense_shape: The shape of the array that they are slices of, if known.

    Examples:
        >>> import jax.numpy as jnp
        >>> slices = IndexedSlices(jnp.array([1.0, 2.0]), jnp.array([2, 0]), dense_shape=(3,))
        >>> slices.dense().tolist()
        [2.0, 0.0, 1.0]

    TF: `tf.IndexedSlices`.
    """

    __slots__ = ("_dense_shape", "_indices", "_values")

    consumers = UnsupportedMember("there are no graphs: values do not know what uses them")
    device = UnsupportedMember("use slices.values.devices()")
    graph = UnsupportedMember("there are no graphs")
    name = UnsupportedMember("arrays have no names")
    op = UnsupportedMember("there are no graphs: values do not know what made them")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None):
        self._values = values
        self._indices = indices
        self._dense_shape = None if dense_shape is None else _sizes(dense_shape)

    @property
    def values(self) -> Any:
        return self._values

    @property
    def indices(self) -> Any:
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        return self._dense_shape

    shape = dense_shape

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self._values)

    def dense(self) -> jax.Array:
        """Returns an array of `dense_shape` with the slices added at their indices to zeros.

        Raises:
            ValueError: `dense_shape` is not known.
        """
        if self._dense_shape is None:
            raise ValueError(
                "IndexedSlices without a dense_shape cannot become an array. "
                f"Received: {self!r}. Pass dense_shape=, or use variable.scatter_add(slices)."
            )
        zeros = jnp.zeros(self._dense_shape, self.dtype)
        return updated(zeros, "add", self._values, row_index(zeros, self._indices))

    def __jax_array__(self) -> jax.Array:
        return self.dense()

    def __neg__(self) -> IndexedSlices:
        return IndexedSlices(-jnp.asarray(self._values), self._indices, self._dense_shape)

    def __repr__(self) -> str:
        shape = "" if self._dense_shape is None else f", dense_shape={self._dense_shape}"
        return f"IndexedSlices(indices={self._indices}, values={self._values}{shape})"

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
        return (self._values, self._indices), self._dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: Sequence[Any]
    ) -> IndexedSlices:
        values, indices = children
        return cls(values, indices, dense_shape)


#: An index in JAX's and NumPy's form: one array of indices for each of the first axes.
Index = tuple[Any, ...]

#: The methods of `array.at[index]`, by operation.
_METHODS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "max": "max",
    "min": "min",
    "update": "set",
}


def updated(array: jax.Array, how: str, values: Any, index: Index) -> jax.Array:
    """Returns `array` with the elements at `index` updated by `values`.

    Updates with a repeated index are applied in sequence.

    Args:
        array: The array.
        how: `"add"`, `"sub"`, `"mul"`, `"div"`, `"max"`, `"min"`, or `"update"` to replace.
        values: The values of the update, of the elements' shape or broadcast to it.
        index: From `row_index`, `batch_index` or `nd_index`.
    """
    values = jnp.asarray(values, dtype=array.dtype)
    if how == "div" and not jnp.issubdtype(array.dtype, jnp.inexact):
        return _divided(array, values, index)
    update = getattr(array.at[index], _METHODS[how])
    # Negative indices do not count from the end, and indices outside the array are ignored.
    return update(values, mode="drop", wrap_negative_indices=False)


def _divided(array: jax.Array, values: jax.Array, index: Index) -> jax.Array:
    """Returns integers divided by `values`, rounded towards zero after each division.

    JAX would divide only once, by the product of the divisors of a repeated index, as floats.
    """
    places = jnp.broadcast_arrays(*index)
    rows = array.shape[len(index) :]
    divisors = jnp.broadcast_to(values, (*places[0].shape, *rows))
    divisors = divisors.reshape(places[0].size, *rows)
    flat = [place.reshape(-1) for place in places]

    def divide(step: jax.Array, divided: jax.Array) -> jax.Array:
        place = tuple(axis[step] for axis in flat)
        at = divided.at[place]
        quotient = lax.div(at.get(wrap_negative_indices=False), divisors[step])
        return at.set(quotient, mode="drop", wrap_negative_indices=False)

    return lax.fori_loop(0, len(divisors), divide, array)


def row_index(array: jax.Array, indices: Any) -> Index:
    """Returns the index of the rows of `array` at `indices`.

    Raises:
        InvalidArgumentError: An index is known to be outside the array.
    """
    return _checked(array, (_integers(indices),))


def batch_index(array: jax.Array, indices: Any) -> Index:
    """Returns the index whose element `[b..., i]` is `[b..., indices[b..., i]]` of `array`.

    Raises:
        InvalidArgumentError: An index is known to be outside the array.
    """
    indices = _integers(indices)
    batch = [jnp.arange(size) for size in indices.shape[:-1]]
    grid = jnp.meshgrid(*batch, indexing="ij") if batch else []
    return _checked(array, (*(axis[..., None] for axis in grid), indices))


def take(array: jax.Array, indices: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns what `jnp.take` does, as a function of `array` also where there are no indices.

    JAX returns a constant there. On a replica without examples, a sum over the replicas behind it
    would have no gradient, and be left out of the sums of the gradients of the others.
    """
    if indices.size or axis is None or not jnp.issubdtype(indices.dtype, jnp.integer):
        return jnp.take(array, indices, axis=axis)
    axis = normalize_axis_index(axis, array.ndim)
    none = lax.slice_in_dim(array, 0, 0, axis=axis)
    return none.reshape((*array.shape[:axis], *indices.shape, *array.shape[axis + 1 :]))


def nd_index(array: jax.Array, indices: Any) -> Index:
    """Returns the index given by the last axis of `indices`: one entry for each leading axis.

    Raises:
        InvalidArgumentError: An index is known to be outside the array.
    """
    indices = _integers(indices)
    return _checked(array, tuple(indices[..., axis] for axis in range(indices.shape[-1])))


def _sizes(shape: Any) -> tuple[int, ...]:
    """Returns a shape, also one that is a tensor, as numbers."""
    if isinstance(shape, jax.core.Tracer):
        known = constant_value(shape)
        shape = shape if known is None else known
    return tuple(int(size) for size in np.asarray(shape))


def _integers(indices: Any) -> Any:
    if isinstance(indices, jax.Array):
        return indices
    return np.asarray(indices, dtype=None if np.size(indices) else np.int32)


def _checked(array: jax.Array, index: Index) -> Index:
    for axis, indices in enumerate(index):
        if isinstance(indices, jax.core.Tracer):  # known only when the program runs
            continue
        known, size = np.asarray(indices), array.shape[axis]
        outside = known[(known < 0) | (known >= size)]
        if outside.size:
            raise InvalidArgumentError(
                message=f"Index {outside.flat[0]} is outside axis {axis} of an array of shape "
                f"{array.shape}: expected 0 to {size - 1}."
            )
    return index
