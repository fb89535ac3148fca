"""The gradient of max pooling without `select_and_scatter`.

XLA:CPU runs `select_and_scatter` as a scalar loop with a branch per window element. In the MNIST
CNN it was the largest part of the training step: 10.5 ms of some 16 at 32 images per device
(26x26x32, 2x2 windows; 35 to 80 ms at 128). The forms below are plain selects over strided slices,
which the compiler vectorizes: 0.22 ms and 1.3 ms. The forward `reduce_window` is not slow (0.22 ms)
and stays.

Both forms determine the winner of each window with the comparison that XLA would apply, in the same
order, so ties (the first of equal elements, row by row) and NaNs give the same element.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

Form = Callable[[jax.Array, jax.Array], jax.Array]

# Every window element becomes one slice of the program: beyond this many (global pooling) it
# compiles slowly.
_MAX_WINDOW = 32
# Windows per element: the compiler recomputes the winners for each. At 9 (3x3, stride 1) XLA's form
# is faster, 88 ms against 132; at 2.25 (3x3, stride 2) it takes 617 ms against 57.
_MAX_OVERLAP = 4


def faster_form(equation: JaxprEqn) -> Form | None:
    """Returns the faster form of a `select_and_scatter_add` equation, or None to keep XLA's.

    The form takes the cotangent, one element per window, and the pooled array.
    """
    select_prim, window_dimensions, window_strides, padding = (
        equation.params[name]
        for name in ("select_prim", "window_dimensions", "window_strides", "padding")
    )
    pooled: Any = equation.invars[1].aval
    is_float = jnp.issubdtype(pooled.dtype, jnp.floating)
    overlap = math.prod(window_dimensions) / math.prod(window_strides)
    if math.prod(window_dimensions) > _MAX_WINDOW or overlap > _MAX_OVERLAP or not is_float:
        return None
    spread = _spread_disjoint if window_dimensions == window_strides else _spread_overlapping

    def scatter(source: jax.Array, operand: jax.Array) -> jax.Array:
        worst = -jnp.inf if select_prim is lax.ge_p else jnp.inf
        padded = _pad(operand, worst, [(low, high, 0) for low, high in padding])
        winners = _winners(padded, source.shape, select_prim, window_dimensions, window_strides)
        gradient = spread(source, winners, padded.shape, window_dimensions, window_strides)
        return _pad(gradient, 0, [(-low, -high, 0) for low, high in padding])

    return scatter


def _winners(
    padded: jax.Array,
    windows: Sequence[int],
    select_prim: Any,
    window: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Returns, for each window, the row-major offset of the element that it selects, as int32."""
    candidates = []
    for offsets in _offsets(window):
        last = [o + s * (n - 1) + 1 for o, s, n in zip(offsets, strides, windows, strict=True)]
        candidates.append(lax.slice(padded, offsets, last, strides))
    best, winners = candidates[0], jnp.zeros(windows, jnp.int32)
    for k, candidate in enumerate(candidates[1:], start=1):
        keep = select_prim.bind(best, candidate)
        best, winners = jnp.where(keep, best, candidate), jnp.where(keep, winners, k)
    return winners


def _spread_disjoint(
    source: jax.Array,
    winners: jax.Array,
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Scatters when windows tile the array: one pass that compares each offset to the winner."""
    one_per_window = [n for size in source.shape for n in (size, 1)]
    offsets = lax.iota(jnp.int32, math.prod(window)).reshape([n for k in window for n in (1, k)])
    tiled = jnp.where(winners.reshape(one_per_window) == offsets, source.reshape(one_per_window), 0)
    tiled = tiled.reshape([n * k for n, k in zip(source.shape, window, strict=True)])
    return _pad(tiled, 0, [(0, n - t, 0) for n, t in zip(shape, tiled.shape, strict=True)])


def _spread_overlapping(
    source: jax.Array,
    winners: jax.Array,
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Scatters any windows: a sum with one dilated term per window offset."""
    terms = []
    for k, offsets in enumerate(_offsets(window)):
        config = [
            (o, n - (o + s * (m - 1) + 1), s - 1)
            for o, n, m, s in zip(offsets, shape, source.shape, strides, strict=True)
        ]
        terms.append(_pad(jnp.where(winners == k, source, 0), 0, config))
    return sum(terms[1:], terms[0])


def _offsets(window: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the offsets of a window's elements in row-major order."""
    return list(itertools.product(*map(range, window)))


def _pad(x: jax.Array, value: float, config: Sequence[tuple[int, int, int]]) -> jax.Array:
    return lax.pad(x, jnp.asarray(value, x.dtype), config)
