"""The largest elements only: top-k sparsification with error feedback and momentum correction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from unison.compression.base import (
    Compression,
    CompressionState,
    Exchange,
    Kinds,
)
from unison.compression.rules import LARGE_MATRICES, Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """Sends the elements of a tensor with the largest absolute values; see `topk`.

    Attributes:
        fraction: How much of each tensor is sent.
    """

    fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"fraction must be above 0 and at most 1. Received: fraction={self.fraction}"
            )

    def _own_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        return {"residual": tuple(tensors)}

    def _compressed(
        self, tensors: list[jax.Array], state: CompressionState, exchange: Exchange
    ) -> tuple[list[jax.Array], Kinds, Kinds]:
        kept = state.of_replica["residual"]
        waiting = [
            (residual + tensor).reshape(-1) for residual, tensor in zip(kept, tensors, strict=True)
        ]
        chosen = [_places_of_largest(vector, self._count(vector.size)) for vector in waiting]
        sums = _sums_of_chosen(waiting, chosen, exchange.axis_name)
        residuals = [
            vector.at[places].set(0, unique_indices=True)
            for vector, places in zip(waiting, chosen, strict=True)
        ]
        own: Kinds = {"residual": _shaped(residuals, tensors)}
        if self.momentum and self.fraction < 1:
            # What is sent has had its momentum (DGC's momentum factor masking).
            velocities = [
                tensor.reshape(-1).at[places].set(0, unique_indices=True)
                for tensor, places in zip(tensors, chosen, strict=True)
            ]
            own["velocity"] = _shaped(velocities, tensors)
        return list(_shaped(sums, tensors)), own, {}

    def _count(self, size: int) -> int:
        return max(1, math.ceil(self.fraction * size))


def topk(
    fraction: float = 0.01,
    *,
    momentum: float = 0.9,
    rule: Rule = LARGE_MATRICES,
    warmup_steps: int = 0,
) -> TopK:
    """Sends the largest elements of each tensor, each with its place.

    Each replica sends the momentum of its gradients: v = m v + g, r = r + v; the largest of r are
    sent, and r and v start anew there. What is not sent is kept (error feedback). Use an optimizer
    without momentum, such as plain SGD in the place of SGD with momentum m; with another, such as
    Adam, give `momentum=0`. (Lin et al. 2018, "Deep Gradient Compression"; there the fraction is
    0.001.)

    Every replica gets the elements of all: the bytes grow with the number of replicas.

    Args:
        fraction: How much of each tensor is sent, above 0 and at most 1.
        momentum: The factor m, 0 or more and below 1. 0: the gradients themselves are sent.
        rule: Decides what is compressed.
        warmup_steps: So many steps are sent without loss at first.

    Raises:
        ValueError: The fraction or the momentum is out of bounds.

    Examples:
        >>> import numpy as np, unison
        >>> from unison import compression
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> largest = compression.topk(0.25, rule=compression.everything)
        >>> def step(gradient):
        ...     return largest.apply(gradient, largest.init(gradient))
        >>> gradients = unison.PerReplica([np.float32([1, 2, 3, 4]), np.float32([5, 1, 1, 1])])
        >>> sums, state = strategy.run(step, (gradients,))
        >>> sums.values[0]
        Array([5., 0., 0., 4.], dtype=float32)
        >>> state.of_replica["residual"][0].values[0]
        Array([1., 2., 3., 0.], dtype=float32)
    """
    return TopK(fraction=fraction, momentum=momentum, rule=rule, warmup_steps=warmup_steps)


def _places_of_largest(vector: jax.Array, count: int) -> jax.Array:
    """Returns the places of the `count` largest absolute values; NaN is larger than any."""
    return lax.top_k(jnp.abs(vector), count)[1]


def _sums_of_chosen(
    vectors: list[jax.Array], chosen: list[jax.Array], axis_name: str
) -> list[jax.Array]:
    """Returns the sums over the replicas of `vectors` with zeros but at the `chosen` places.

    All of a dtype travel in one all-gather, the numbers as integers beside their places.
    """
    sums = [jnp.zeros_like(vector) for vector in vectors]
    for dtype in sorted({vector.dtype for vector in vectors}, key=str):
        group = [index for index, vector in enumerate(vectors) if vector.dtype == dtype]
        numbers = jnp.concatenate([vectors[index][chosen[index]] for index in group])
        places = jnp.concatenate([chosen[index] for index in group])
        words = lax.bitcast_convert_type(numbers, jnp.int32).reshape(-1)
        gathered = lax.all_gather(jnp.concatenate([places, words]), axis_name)
        all_places, all_words = gathered[:, : places.size], gathered[:, places.size :]
        pairs = all_words.reshape(len(gathered), places.size, -1)
        all_numbers = lax.bitcast_convert_type(
            pairs if pairs.shape[-1] > 1 else pairs[..., 0], dtype
        )
        start = 0
        for index in group:
            end = start + chosen[index].size
            # One replica after the other, so that the order of addition is the same everywhere.
            for sender in range(len(gathered)):
                sums[index] = (
                    sums[index]
                    .at[all_places[sender, start:end]]
                    .add(all_numbers[sender, start:end], unique_indices=True)
                )
            start = end
    return sums


def _shaped(vectors: Sequence[jax.Array], like: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(vector.reshape(tensor.shape) for vector, tensor in zip(vectors, like, strict=True))
