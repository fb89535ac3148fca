"""`tf.experimental.numpy`: NumPy's functions of tensors, which are those of `jax.numpy`.

Lists are arguments, as in NumPy. What NumPy would make 64 bits wide is 32 bits wide, as elsewhere
in JAX, unless an argument or `dtype=` says otherwise.
"""

from __future__ import annotations

import functools
import inspect
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

#: The names of parameters that are arrays, in the functions of `jax.numpy`.
_ARRAYS = frozenset(
    "A a a1 a2 a_max a_min arr array ary b c condition default f fill_value indices m max min "
    "obj operand p p1 p2 q reps repeats start stop u v values weights x x1 x2 xp y".split()
)

#: The names of those that are several arrays.
_SEVERAL_ARRAYS = frozenset("args arrays choicelist condlist operands tup xi".split())

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
    globals()[name] = found = _taking_lists(found) if is_function else found
    return found


def __dir__() -> list[str]:
    return [*__all__, *public_names("tf.experimental.numpy")]


def _taking_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of `jax.numpy` that takes lists where it takes arrays."""
    signature = inspect.signature(function)
    var_positional = inspect.Parameter.VAR_POSITIONAL

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        start_devices()
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        for name, value in bound.arguments.items():
            is_variadic = signature.parameters[name].kind is var_positional
            if name in _SEVERAL_ARRAYS and isinstance(value, list | tuple):
                bound.arguments[name] = (tuple if is_variadic else list)(map(_array, value))
            elif name in _ARRAYS:
                bound.arguments[name] = _array(value)
        return function(*bound.args, **bound.kwargs)

    return called


def _array(value: Any) -> Any:
    return convert_to_tensor(value) if isinstance(value, list | tuple) else value
