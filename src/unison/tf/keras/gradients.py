"""Functions of Keras' backend with the gradients that they have on TensorFlow.

Layers, losses and regularizers compute by them. On JAX, a zero vector that `UnitNormalization`
meets makes weights NaN (see `vanishing`), and an absolute value of 0 has a gradient (see `ties`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from keras.src import backend
from keras.src.backend.jax import linalg, math, numpy

from unison.tf import ties, vanishing

#: Keras' modules, and the functions of them that are replaced: how many of their arguments are
#: tensors, and what computes them.
_FUNCTIONS: tuple[tuple[Any, str, int, Callable[..., jax.Array]], ...] = (
    (numpy, "sqrt", 1, vanishing.sqrt),
    (numpy, "std", 1, vanishing.standard_deviation),
    (numpy, "reciprocal", 1, vanishing.reciprocal),
    (math, "rsqrt", 1, vanishing.rsqrt),
    (linalg, "norm", 1, vanishing.norm),
    (numpy, "absolute", 1, ties.magnitude),
    (numpy, "maximum", 2, ties.larger),
    (numpy, "minimum", 2, ties.smaller),
    (numpy, "clip", 1, ties.clipped),
)


def take_gradients_of_tensorflow() -> None:
    """Replaces the functions in Keras' backend, for real numbers."""
    for module, name, tensors, ours in _FUNCTIONS:
        setattr(module, name, _of_reals(ours, tensors, getattr(module, name)))


def _of_reals(
    ours: Callable[..., Any], tensors: int, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        operands = [backend.convert_to_tensor(operand) for operand in args[:tensors]]
        if len(operands) == tensors and all(map(_is_real, operands)):
            return ours(*operands, *args[tensors:], **kwargs)
        return original(*args, **kwargs)

    return function


def _is_real(tensor: Any) -> bool:
    return isinstance(tensor, jax.Array) and jnp.issubdtype(tensor.dtype, jnp.floating)
