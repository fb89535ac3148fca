"""`tf.sparse`: the tensors that `tf.io.parse_example` makes of features of any length."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.tf import dtypes
from unison.tf.missing import names_missing_from
from unison.tf.tensor_spec import TensorShape
from unison.tf.tensors import convert_to_tensor
from unison.tf.text import StringTensor
from unison.unsupported import UnsupportedMember

__getattr__ = names_missing_from(__name__)


class _Parts(NamedTuple):
    indices: Any
    values: Any
    dense_shape: Any


class SparseTensor(_Parts):
    """A tensor of which only some values are stored.

    It is a named tuple of three tensors, and in a dataset a structure of them.

    Attributes:
        indices: Where the values are, int64 of shape [number of values, number of axes].
        values: The values.
        dense_shape: The shape of the tensor, int64.

    Examples:
        >>> tensor = SparseTensor([[0, 1], [1, 0]], [5, 6], [2, 2])
        >>> to_dense(tensor).tolist()
        [[0, 5], [6, 0]]

    TF: `tf.sparse.SparseTensor`.
    """

    __slots__ = ()

    consumers = UnsupportedMember("there are no graphs: values do not know what uses them")
    graph = UnsupportedMember("there are no graphs")
    op = UnsupportedMember("there are no graphs: values do not know what made them")
    eval = UnsupportedMember("use tf.sparse.to_dense(tensor).numpy()")
    set_shape = UnsupportedMember("the shape is that of dense_shape: pass it to SparseTensor")

    def __new__(cls, indices: Any, values: Any, dense_shape: Any) -> SparseTensor:
        # Traced values, and placeholders of tensors (a spec, JAX's placeholders), are unchanged.
        if isinstance(indices, list | tuple | np.ndarray):
            indices = convert_to_tensor(indices, dtypes.int64)
        if isinstance(values, list | tuple | np.ndarray):
            values = convert_to_tensor(values)
        if isinstance(dense_shape, list | tuple | np.ndarray):
            dense_shape = convert_to_tensor(dense_shape, dtypes.int64)
        return super().__new__(cls, indices, values, dense_shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def shape(self) -> TensorShape:
        """The shape of the tensor; sizes are None where it is traced."""
        if isinstance(self.dense_shape, jax.core.Tracer):
            return TensorShape([None] * self.dense_shape.shape[0])
        return TensorShape([int(size) for size in np.asarray(self.dense_shape)])

    def get_shape(self) -> TensorShape:
        return self.shape

    def with_values(self, new_values: Any) -> SparseTensor:
        """Returns the tensor with other values at the same indices.

        TF: `tf.sparse.SparseTensor.with_values`.
        """
        return SparseTensor(self.indices, new_values, self.dense_shape)

    @classmethod
    def from_value(cls, sparse_tensor_value: Any) -> SparseTensor:
        """Returns a sparse tensor of anything with its three attributes.

        TF: `tf.sparse.SparseTensor.from_value`.
        """
        given = sparse_tensor_value
        return cls(given.indices, given.values, given.dense_shape)


def to_dense(
    sp_input: SparseTensor,
    default_value: Any = None,
    validate_indices: bool = True,
    name: str | None = None,
) -> Any:
    """Returns a sparse tensor as one that has all values.

    Args:
        sp_input: The sparse tensor. Its shape must be known: not that of a traced one.
        default_value: What it has where `sp_input` has no value. Default: 0, or empty text.
        validate_indices: Whether indices that are out of order, or appear twice, are errors.
        name: Without effect.

    Raises:
        InvalidArgumentError: An index is out of bounds; or, see `validate_indices`.

    TF: `tf.sparse.to_dense`.
    """
    if isinstance(sp_input.dense_shape, jax.core.Tracer):
        needs_python("tf.sparse.to_dense of a tensor whose shape is not known")
        raise ValueError("tf.sparse.to_dense needs a shape that is known where it is traced.")
    sizes = tuple(np.asarray(sp_input.dense_shape).tolist())
    if not isinstance(sp_input.indices, jax.core.Tracer):
        _check(np.asarray(sp_input.indices), sizes, validate_indices)
    if isinstance(sp_input.values, StringTensor):
        text = StringTensor("" if default_value is None else default_value)
        dense = np.full(sizes, text.item(), object)
        dense[tuple(np.asarray(sp_input.indices).T)] = sp_input.values.view(np.ndarray)
        return StringTensor(dense)
    values = jnp.asarray(sp_input.values)
    filled = jnp.full(sizes, 0 if default_value is None else default_value, values.dtype)
    return filled.at[tuple(sp_input.indices.T)].set(values)


def from_dense(tensor: Any, name: str | None = None) -> SparseTensor:
    """Returns the values that are not 0, or empty text, as a sparse tensor.

    TF: `tf.sparse.from_dense`.
    """
    needs_python("tf.sparse.from_dense")
    dense = convert_to_tensor(tensor)
    array = np.asarray(dense)
    where = np.argwhere(array != (b"" if isinstance(dense, StringTensor) else 0))
    values = array[tuple(where.T)]
    kept = StringTensor(values) if isinstance(dense, StringTensor) else values
    return SparseTensor(where, kept, np.array(array.shape, np.int64))


def reorder(sp_input: SparseTensor, name: str | None = None) -> SparseTensor:
    """Returns the same sparse tensor with its indices in order. TF: `tf.sparse.reorder`."""
    needs_python("tf.sparse.reorder")
    indices = np.asarray(sp_input.indices)
    order = np.lexsort(indices.T[::-1])
    return SparseTensor(indices[order], sp_input.values[order], sp_input.dense_shape)


def _check(indices: np.ndarray, sizes: tuple[int, ...], must_be_in_order: bool) -> None:
    is_out = ((indices < 0) | (indices >= np.array(sizes))).any(1)
    if is_out.any():
        index = int(np.argmax(is_out))
        raise InvalidArgumentError(
            message=f"indices[{index}] = {indices[index].tolist()} is out of bounds: need "
            f"0 <= index < {list(sizes)}"
        )
    if not must_be_in_order or len(indices) < 2:
        return
    flat = np.ravel_multi_index(tuple(indices.T), sizes)
    is_wrong = np.diff(flat) <= 0
    if is_wrong.any():
        index = int(np.argmax(is_wrong)) + 1
        what = "repeated" if flat[index] == flat[index - 1] else "out of order"
        raise InvalidArgumentError(
            message=f"indices[{index}] = {indices[index].tolist()} is {what}. Many sparse ops "
            "require sorted indices. Use `tf.sparse.reorder` to create a correctly ordered copy."
        )
