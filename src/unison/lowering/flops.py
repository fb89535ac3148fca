"""Counts the operations of a traced function, from its matrix products and convolutions."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def count_flops(jaxpr: Jaxpr) -> int:
    """Returns the floating-point operations of the products and convolutions in `jaxpr`.

    The body of a `scan` counts as often as it runs; that of a `while` loop, and each branch of a
    conditional, once: then, this is only a rough estimate.
    """
    return sum(_flops_of(equation) for equation in jaxpr.eqns)


def _flops_of(equation: JaxprEqn) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = _shape(equation.invars[0])
        return 2 * _size(equation.outvars[0]) * math.prod(left[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        outputs = _shape(equation.invars[1])[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * _size(equation.outvars[0]) * _size(equation.invars[1]) // outputs
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    return times * sum(count_flops(inner) for inner in jaxprs_in_params(equation.params))


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _size(atom: Any) -> int:
    return math.prod(_shape(atom))
