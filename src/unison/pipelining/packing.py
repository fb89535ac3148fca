"""The parameters of stages as the rows of one array, which a mesh axis can divide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

#: The name of a variable with the packed parameters of stages.
PACKED = "pipeline_stages"

#: The size of a row of packed parameters is a multiple of this, so that other axes can divide it.
_MULTIPLE = 64


def pack_stages(parameters: Sequence[Any]) -> jax.Array:
    """Returns the parameters of stages as the rows of one array, which a mesh axis can divide.

    Args:
        parameters: A pytree of arrays of one dtype for each stage.

    Returns:
        An array of shape (stages, elements of the largest one, rounded up); rows are padded with
        zeros.

    Raises:
        ValueError: The dtypes differ.

    Examples:
        >>> import jax.numpy as jnp
        >>> pack_stages([{"w": jnp.ones((2, 3))}, {"w": jnp.ones(100)}]).shape
        (2, 128)
    """
    leaves = [jax.tree.leaves(of_stage) for of_stage in parameters]
    dtypes = {jnp.result_type(leaf) for of_stage in leaves for leaf in of_stage}
    if len(dtypes) != 1:
        raise ValueError(
            "Expected the parameters of all stages in one dtype. Received: "
            f"{sorted(map(str, dtypes))}"
        )
    rows = [jnp.concatenate([jnp.ravel(leaf) for leaf in own] or [jnp.zeros(0)]) for own in leaves]
    width = -(-max(row.size for row in rows) // _MULTIPLE) * _MULTIPLE
    return jnp.stack([jnp.pad(row, (0, width - row.size)) for row in rows]).astype(dtypes.pop())


def unpack_stage(row: jax.Array, like: Any) -> Any:
    """Returns the parameters in a row of `pack_stages`, as a tree of arrays shaped like `like`.

    Examples:
        >>> import jax.numpy as jnp
        >>> unpack_stage(jnp.arange(64.0), {"w": jnp.ones((2, 1))})["w"].tolist()
        [[0.0], [1.0]]
    """
    leaves, structure = jax.tree.flatten(like)
    start = 0
    parts = []
    for leaf in leaves:
        size = math.prod(leaf.shape)
        parts.append(lax.slice(row, (start,), (start + size,)).reshape(leaf.shape))
        start += size
    return jax.tree.unflatten(structure, parts)
