"""The changes of `unison.tf` in other libraries, made when it is imported.

JAX's arrays get the methods that TensorFlow's tensors have beyond NumPy's, and slices whose bounds
a compiled program computes (`slicing`). JAX keeps a 64-bit dtype that is named (see
`unison.runtime.precision`), as TensorFlow does.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from unison.identity_key import Reference
from unison.tf.tensor_spec import TensorShape


def _numpy(self: Any) -> np.ndarray | np.generic:
    """Returns the value as a NumPy array of the caller's own, or a NumPy scalar.

    Of a value inside a program that is being compiled, it raises what Python's `if` on it would:
    a `tf.function` then runs step by step, and `strategy.run` says where it was.

    TF: `tf.Tensor.numpy`.
    """
    return np.array(self)[()]


def _get_shape(self: Any) -> TensorShape:
    """Returns the shape as a `tf.TensorShape`. TF: `tf.Tensor.get_shape`."""
    return TensorShape(self.shape)


def _set_shape(self: Any, shape: Any) -> None:
    """Checks that `shape` is compatible with the tensor's. TF: `tf.Tensor.set_shape`."""
    TensorShape(self.shape).assert_is_compatible_with(shape)


def _ref(self: Any) -> Reference:
    """Returns a key for dictionaries and sets, equal for the same tensor only.

    TF: `tf.Tensor.ref`.
    """
    return Reference(self)


def patch_jax() -> None:
    """Gives JAX's arrays, and its values inside traced programs, TensorFlow's methods."""
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    kinds: tuple[Any, ...] = (jax.Array, jax.core.Tracer)
    for kind in kinds:
        kind.numpy = _numpy
        kind.get_shape = _get_shape
        kind.set_shape = _set_shape
        kind.ref = _ref


def patch_indexing() -> None:
    """Extends the slices of JAX's arrays; `tensors` calls it, since what it needs takes longer."""
    from unison.runtime.private_jax import ArrayImpl
    from unison.tf.slicing import with_computed_bounds

    kinds: tuple[Any, ...] = (ArrayImpl, jax.core.Tracer)
    for kind in kinds:
        kind.__getitem__ = with_computed_bounds(kind.__getitem__)
