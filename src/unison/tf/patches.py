"""What `unison.tf` adds to other libraries, done when it is imported: `jax.Array.numpy()`."""

from __future__ import annotations

import jax
import numpy as np


def _numpy(self: jax.Array) -> np.ndarray | np.generic:
    """Returns the value as a NumPy array of the caller's own, or a NumPy scalar.

    TF: `tf.Tensor.numpy`.
    """
    return np.array(self)[()]


def patch_arrays() -> None:
    """Gives `jax.Array`s TensorFlow's `.numpy()`.

    Values inside a traced program have no `.numpy()`, as graph tensors of TensorFlow have none.
    """
    jax.Array.numpy = _numpy  # type: ignore[attr-defined]
