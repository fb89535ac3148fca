"""The dtypes of arrays for which 64 bits are requested.

JAX makes 32-bit arrays unless told otherwise. With its option `jax_explicit_x64_dtypes` set to
"allow", as `unison.tf` sets it, an explicitly named 64-bit dtype is kept, while Python numbers
still become 32 bits: TensorFlow's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def keeps_explicit_64_bits() -> bool:
    """Returns whether an explicitly named 64-bit dtype is kept."""
    options: Any = jax.config  # its options are attributes that JAX does not declare
    return options.jax_enable_x64 or options.jax_explicit_x64_dtypes.name == "ALLOW"


def device_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of a device array for which `dtype` is requested by name."""
    wanted = jnp.dtype(dtype)
    return wanted if keeps_explicit_64_bits() else jnp.dtype(jax.dtypes.canonicalize_dtype(wanted))


def device_array(value: Any) -> jax.Array:
    """Returns a NumPy value as an array on the default device, with its dtype if JAX keeps that."""
    return jnp.asarray(np.asarray(value), dtype=device_dtype(value.dtype))


def placeable(value: Any) -> Any:
    """Returns a NumPy value of 64 bits as an array that keeps them when it is placed on devices.

    JAX narrows NumPy's own; they do not name their dtype. Other values are returned as they are.
    """
    is_wide = isinstance(value, np.ndarray | np.generic) and is_of_64_bits(value.dtype)
    return device_array(value) if is_wide and keeps_explicit_64_bits() else value


def is_of_64_bits(dtype: np.dtype) -> bool:
    """Whether these are numbers of 64 bits or more, complex numbers of two such included."""
    return dtype.itemsize >= 8 and dtype.kind in "iufc"


def array_type(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """Returns an abstract array for tracing a function (a `jax.ShapeDtypeStruct` would lose 64
    bits).
    """
    return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)
