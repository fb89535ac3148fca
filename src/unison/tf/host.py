"""Tensors that are NumPy arrays: text, and values that are known while a program is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.identity_key import Reference
from unison.tf.tensor_spec import TensorShape, is_symbolic_size


class HostTensor(np.ndarray):
    """An array on the host, with the additional attributes of TensorFlow's tensors.

    `tf.shape(x)`, inside a compiled program, is one: its value is known where the program is
    traced, so that `tf.reshape(x, [tf.shape(x)[0], -1])` and Python's `if` and `range` work.
    NumPy's results for it are of this class as well; the result with an array of the program is
    an array of the program.
    """

    def __array_wrap__(
        self, array: np.ndarray, context: Any = None, return_scalar: bool = False
    ) -> Any:
        # NumPy would turn arrays without axes into scalars, which have no `.numpy()`.
        return array.view(type(self))

    def numpy(self) -> Any:
        """Returns an array of the caller's own, or the scalar."""
        return np.array(self.view(np.ndarray))[()]

    def get_shape(self) -> TensorShape:
        """Returns the shape as a `tf.TensorShape`."""
        return TensorShape(self.shape)

    def set_shape(self, shape: Any) -> None:
        """Checks that `shape` is compatible with the tensor's."""
        self.get_shape().assert_is_compatible_with(shape)

    def ref(self) -> Reference:
        """Returns a key for dictionaries and sets, equal for the same tensor only."""
        return Reference(self)

    def __getitem__(self, index: Any) -> Any:
        item = self.view(np.ndarray)[_on_host(index)]
        if isinstance(item, np.ndarray):
            return item.view(type(self))
        scalar = np.empty((), self.view(np.ndarray).dtype)
        scalar[()] = item
        return scalar.view(type(self))

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


class ShapeTensor(HostTensor):
    """An int32 tensor of sizes, of which some are symbols: an array of objects for NumPy.

    `tf.shape(x)` is one while Keras infers the shapes of a model whose inputs have unknown sizes:
    JAX then traces with symbols of `jax.export.symbolic_shape`. A single size is a number or a
    symbol, both of which shapes, slices and arithmetic take.
    """

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int32)

    def __getitem__(self, index: Any) -> Any:
        return without_axes(size_tensor(self.view(np.ndarray)[_on_host(index)]))

    def __jax_array__(self) -> jax.Array:
        flat = [jnp.asarray(size, np.int32) for size in self.view(np.ndarray).ravel()]
        return jnp.stack(flat).reshape(self.shape)

    def astype(self, dtype: Any, *args: Any, **options: Any) -> Any:
        """Returns the sizes: themselves, as integers, or as an array of the program."""
        if np.issubdtype(dtype, np.integer):
            return self
        return self.__jax_array__().astype(dtype)


def size_tensor(sizes: Any) -> HostTensor:
    """Returns a shape, or a single size, as a tensor that is known while a program is traced."""
    array = np.array(sizes, object)
    if any(map(is_symbolic_size, array.flat)):
        return array.view(ShapeTensor)
    return array.astype(np.int32).view(HostTensor)


def without_axes(size: HostTensor) -> Any:
    """Returns a single size that is a symbol as the symbol itself, which slices and shapes take."""
    return size.item() if isinstance(size, ShapeTensor) and not size.ndim else size


def _on_host(index: Any) -> Any:
    """Indices may be tensors; NumPy requires its own arrays."""
    if isinstance(index, tuple):
        return tuple(_on_host(part) for part in index)
    return np.asarray(index) if isinstance(index, jax.Array) else index
