"""The maximum and the minimum of the replicas' values, with gradients.

JAX has the operations without differentiation rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def maximum(value: jax.Array, axis_name: str) -> jax.Array:
    """Returns the elementwise maximum over the replicas; its gradient goes to its holders."""
    return _extremum(lax.pmax, value, axis_name)


def minimum(value: jax.Array, axis_name: str) -> jax.Array:
    """Returns the elementwise minimum over the replicas; its gradient goes to its holders."""
    return _extremum(lax.pmin, value, axis_name)


def _extremum(reduce: Callable[..., Any], value: jax.Array, axis_name: str) -> jax.Array:
    if value.dtype == jnp.bool_:
        return reduce(value.astype(jnp.uint8), axis_name).astype(jnp.bool_)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return reduce(value, axis_name)

    @jax.custom_jvp
    def extremum(value: jax.Array) -> jax.Array:
        return reduce(value, axis_name)

    @extremum.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (value,), (tangent,) = primals, tangents
        found = extremum(value)
        holds = (value == found).astype(value.dtype)
        return found, lax.psum(holds / lax.psum(holds, axis_name) * tangent, axis_name)

    return extremum(value)
