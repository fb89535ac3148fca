"""Operands of tensors that JAX refuses or narrows, and TensorFlow converts.

These are lists of numbers and tensors, and numbers beside tensors of 64 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from unison.runtime.precision import device_array, is_of_64_bits, placeable

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
        else:
            other = beside_64_bits(other, self.dtype)
        return operator(self, other)

    return extended


def beside_64_bits(value: Any, dtype: np.dtype) -> Any:
    """Returns the operand of an operation with a tensor of 64 bits, as exact as it is.

    JAX takes 32 bits of Python's and NumPy's numbers, outside of traced functions, and refuses
    integers that do not fit.

    Args:
        value: Any operand.
        dtype: The dtype of the tensor, of any number of bits.
    """
    if not is_of_64_bits(dtype):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return placeable(value)
    is_rounded = type(value) in (float, complex) and np.can_cast(type(value), dtype, "same_kind")
    is_large = type(value) is int and not -(2**31) <= value < 2**31
    return device_array(np.asarray(value, dtype)) if is_rounded or is_large else value
