"""`tf.experimental.numpy`: NumPy's functions of tensors, which are those of `jax.numpy`.

Lists are arguments, as in NumPy. What NumPy would make 64 bits wide is 32 bits wide, as elsewhere
in JAX, unless an argument or `dtype=` says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from unison.tf.experimental import numpy_random as random
from unison.tf.missing import names_missing_from, public_names
from unison.tf.tensors import convert_to_tensor, start_devices

newaxis = None

#: TensorFlow's names that JAX has under others.
_OTHER_NAMES: dict[str, Any] = {
    "asanyarray": jnp.asarray,
    "ascontiguousarray": jnp.asarray,
    "fix": jnp.trunc,
    "flatten": jnp.ravel,
    "ndarray": jax.Array,
}

#: Functions whose first argument is a shape, a number, a dtype or a formula, rather than an array.
_TAKE_NO_ARRAY_FIRST = frozenset(
    "arange can_cast diag_indices einsum empty eye finfo full geomspace identity iinfo isscalar "
    "issubdtype linspace logspace ones promote_types result_type tri zeros".split()
)

#: Functions of lists of arrays.
_TAKE_LISTS_OF_ARRAYS = frozenset("concatenate dstack hstack select stack vstack".split())

#: Functions whose second argument is an array, too.
_TAKE_TWO = frozenset(
    "add allclose append arctan2 array_equal bitwise_and bitwise_or bitwise_xor cross divide "
    "divmod dot equal float_power floor_divide gcd greater greater_equal heaviside hypot inner "
    "isclose kron lcm less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor "
    "matmul maximum minimum mod multiply nextafter not_equal outer polyval power remainder select "
    "subtract take take_along_axis tensordot true_divide vdot".split()
)

__all__ = ["experimental_enable_numpy_behavior", "newaxis", "random"]  # and what __getattr__ finds

_missing = names_missing_from(__name__)


def experimental_enable_numpy_behavior(
    prefer_float32: bool = False, dtype_conversion_mode: str = "legacy"
) -> None:
    """Does nothing: tensors have NumPy's methods, indices and promotion of dtypes.

    Args:
        prefer_float32: Without effect: numbers of Python are 32 bits wide.
        dtype_conversion_mode: "legacy". The others concern promotions that TensorFlow refuses.

    Raises:
        ValueError: Another mode.

    TF: `tf.experimental.numpy.experimental_enable_numpy_behavior`.
    """
    if dtype_conversion_mode != "legacy":
        raise ValueError(
            "dtypes are promoted as in jax.numpy. Received: "
            f"dtype_conversion_mode={dtype_conversion_mode!r}. Use 'legacy', or "
            "jax.numpy_dtype_promotion('strict') for errors where dtypes differ."
        )


def __getattr__(name: str) -> Any:
    if name in _OTHER_NAMES:
        found = _OTHER_NAMES[name]
    elif name in public_names("tf.experimental.numpy"):
        found = getattr(jnp, name, None)
    else:
        found = None
    if found is None:
        return _missing(name)
    is_function = callable(found) and not isinstance(found, type) and not hasattr(found, "dtype")
    globals()[name] = found = _taking_lists(name, found) if is_function else found
    return found


def __dir__() -> list[str]:
    return [*__all__, *public_names("tf.experimental.numpy")]


def _taking_lists(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of `jax.numpy` that takes lists where it takes arrays."""
    count = _number_of_arrays(name)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        start_devices()
        if name in _TAKE_LISTS_OF_ARRAYS:
            arrays = [list(map(_array, arg)) for arg in args[:count]]
        else:
            arrays = list(map(_array, args[:count]))
        return function(*arrays, *args[len(arrays) :], **kwargs)

    return called


def _number_of_arrays(name: str) -> int | None:
    """Returns how many of a function's first arguments are arrays, or lists of them; None: all."""
    if name in ("meshgrid", "ix_", "broadcast_arrays"):
        return None
    if name in _TAKE_NO_ARRAY_FIRST:
        return 0
    return {"where": 3, "clip": 3}.get(name, 2 if name in _TAKE_TWO else 1)


def _array(value: Any) -> Any:
    return convert_to_tensor(value) if isinstance(value, list | tuple) else value
