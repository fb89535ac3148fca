"""Operands of tensors that JAX refuses and TensorFlow converts: lists of numbers and tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_Operator = Callable[[Any, Any], Any]

_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul".split()

#: Operators whose other operand may be a list.
TAKE_LISTS = [
    *(f"__{name}__" for name in _ARITHMETIC),
    *(f"__r{name}__" for name in _ARITHMETIC),
    *(f"__{name}__" for name in "and rand or ror xor rxor lt le gt ge eq ne".split()),
]


def taking_lists(operator: _Operator, as_tensor: Callable[[Any, Any], Any]) -> _Operator:
    """Returns an operator of arrays, extended by lists and tuples, which get the array's dtype.

    A list that this dtype cannot hold is a TypeError, as in TensorFlow.

    Args:
        operator: The operator.
        as_tensor: Converts a list to an array of a dtype.
    """
    # JAX itself compares arrays with tuples.
    takes_tuples = operator.__name__ not in ("__eq__", "__ne__")

    @functools.wraps(operator)
    def extended(self: Any, other: Any) -> Any:
        if type(other) is list or (takes_tuples and type(other) is tuple):
            other = as_tensor(other, self.dtype)
        return operator(self, other)

    return extended
