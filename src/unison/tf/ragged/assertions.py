"""Assertions about the values of two tensors, of which one is ragged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from unison.tf.ragged.elementwise import elementwise
from unison.tf.ragged.reductions import is_value
from unison.tf.ragged.rows import implements
from unison.tf.ragged.tensor import is_ragged
from unison.tf.tensors import convert_to_tensor

#: The assertions, and two numbers of which each holds.
_HOLD = {
    "assert_equal": (0, 0),
    "assert_none_equal": (0, 1),
    "assert_less": (0, 1),
    "assert_less_equal": (0, 1),
    "assert_greater": (1, 0),
    "assert_greater_equal": (1, 0),
}


@implements(*(f"tf.debugging.{name}" for name in _HOLD))
def compare(operation: Callable[..., Any], x: Any, y: Any, *args: Any, **kwargs: Any) -> None:
    """Raises unless the rows are equally long, and a comparison of their values holds."""
    among = [tensor for tensor in (x, y) if is_ragged(tensor)]
    if not among:
        raise ValueError(
            f"tf.debugging.{operation.__name__} compares tensors, not structures or specifications "
            f"of ragged ones. Received: {x!r} and {y!r}"
        )
    ragged = max(among, key=lambda tensor: tensor.ragged_rank)
    are_values = is_value(ragged)

    def compared(*values: Any) -> Any:
        if are_values is None:
            operation(*values, *args, **kwargs)
            return values[0]
        # Padding, of which nothing is asserted, is replaced by numbers of which it is true.
        mask = are_values.reshape(-1, *(1,) * (ragged.flat.ndim - 1))
        pairs = zip(map(convert_to_tensor, values), _HOLD[operation.__name__], strict=True)
        operation(*(jnp.where(mask, value, number) for value, number in pairs), *args, **kwargs)
        return values[0]

    elementwise(compared, x, y)
