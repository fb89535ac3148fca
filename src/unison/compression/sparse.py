"""The largest elements only: top-k sparsification with error feedback and momentum correction."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from unison.collectives.packing import share_buffers
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
        fraction: The fraction of each tensor that is sent.
        ramp_steps: The steps after the warm-up in which the fraction falls from a quarter to that.
    """

    fraction: float
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"fraction must be above 0 and at most 1. Received: fraction={self.fraction}"
            )
        if self.ramp_steps < 0:
            raise ValueError(
                f"ramp_steps must be 0 or more. Received: ramp_steps={self.ramp_steps}"
            )

    @property
    def steps_until_settled(self) -> int:
        return self.warmup_steps + self.ramp_steps

    def settled(self) -> TopK:
        return dataclasses.replace(self, warmup_steps=0, ramp_steps=0)

    def _own_state(self, tensors: Sequence[jax.Array]) -> Kinds:
        return {"residual": tuple(tensors)}

    def _compressed(
        self, tensors: list[jax.Array], state: CompressionState, exchange: Exchange
    ) -> tuple[list[jax.Array], Kinds, Kinds]:
        earlier = self._earlier_fractions() if self.ramp_steps else []
        stages = [
            functools.partial(self._sent, fraction, tensors, state, exchange.axis_name)
            for fraction in (*earlier, self.fraction)
        ]
        steps = state.step - self.warmup_steps
        stage = steps * len(earlier) // max(1, self.ramp_steps)
        return lax.switch(stage, stages)  # which uses the last for all larger ones

    def _earlier_fractions(self) -> list[float]:
        """Returns a quarter, a quarter of that, and so on, down to the fraction."""
        fractions = [0.25]
        while fractions[-1] > self.fraction:
            fractions.append(fractions[-1] / 4)
        return fractions[:-1]

    def _sent(
        self, fraction: float, tensors: list[jax.Array], state: CompressionState, axis_name: str
    ) -> tuple[list[jax.Array], Kinds, Kinds]:
        """Sends a fraction of the residuals; has the results of `_compressed`."""
        kept = state.of_replica["residual"]
        waiting = [
            (residual + tensor).reshape(-1) for residual, tensor in zip(kept, tensors, strict=True)
        ]
        chosen = [
            _places_of_largest(vector, max(1, math.ceil(fraction * vector.size)))
            for vector in waiting
        ]
        sums = _sums_of_chosen(waiting, chosen, axis_name)
        residuals = [
            vector.at[places].set(0, unique_indices=True)
            for vector, places in zip(waiting, chosen, strict=True)
        ]
        own: Kinds = {"residual": _shaped(residuals, tensors)}
        if self.momentum and self.fraction < 1:
            # The momentum of sent elements is reset (DGC's momentum factor masking).
            velocities = [
                tensor.reshape(-1).at[places].set(0, unique_indices=True)
                for tensor, places in zip(tensors, chosen, strict=True)
            ]
            own["velocity"] = _shaped(velocities, tensors)
        return list(_shaped(sums, tensors)), own, {}


def topk(
    fraction: float = 0.01,
    *,
    momentum: float = 0.9,
    clipnorm: float | None = None,
    rule: Rule = LARGE_MATRICES,
    warmup_steps: int = 0,
    ramp_steps: int = 0,
) -> TopK:
    """Sends the largest elements of each tensor, with their indices.

    Each replica sends the momentum of its gradients: v = m v + g, r = r + v; the largest of r are
    sent, and r and v restart there at 0. Other elements are kept (error feedback). Use an optimizer
    without momentum, such as plain SGD in place of SGD with momentum m; with another, such as
    Adam, give `momentum=0`. (Lin et al. 2018, "Deep Gradient Compression"; there the fraction is
    0.001.)

    Every replica receives the elements of all: the bytes grow with the number of replicas.

    Args:
        fraction: The fraction of each tensor that is sent, above 0 and at most 1.
        momentum: The factor m, 0 or more and below 1. 0: the gradients themselves are sent.
        clipnorm: The maximum Euclidean norm of a sum of gradients. Each of n
            replicas clips its contribution by `clipnorm` / sqrt(n), before the momentum:
            instead of an optimizer's clipping, which would also clip delayed elements.
        rule: Selects the tensors to compress.
        warmup_steps: The number of first steps without compression.
        ramp_steps: In this number of steps after the warm-up, the fraction falls to its value: 1/4
            of each tensor is sent, then 1/16, and so on, for the same number of steps each.

    Raises:
        ValueError: An argument is out of bounds.

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
    return TopK(
        fraction=fraction,
        momentum=momentum,
        clipnorm=clipnorm,
        rule=rule,
        warmup_steps=warmup_steps,
        ramp_steps=ramp_steps,
    )


def _places_of_largest(vector: jax.Array, count: int) -> jax.Array:
    """Returns the indices of the `count` largest absolute values; NaN is larger than any."""
    return lax.top_k(jnp.abs(vector), count)[1]


def _sums_of_chosen(
    vectors: list[jax.Array], chosen: list[jax.Array], axis_name: str
) -> list[jax.Array]:
    """Returns the sums over the replicas of `vectors`, with zeros outside the `chosen` indices."""
    sums = list(vectors)
    for indices in share_buffers(vectors, math.inf):
        group = [vectors[index] for index in indices]
        totals = _sums_of_a_dtype(group, [chosen[index] for index in indices], axis_name)
        for index, total in zip(indices, totals, strict=True):
            sums[index] = total
    return sums


def _sums_of_a_dtype(
    vectors: list[jax.Array], chosen: list[jax.Array], axis_name: str
) -> list[jax.Array]:
    """Like `_sums_of_chosen`, in one all-gather: the numbers, as integers, with their indices."""
    dtype = vectors[0].dtype
    numbers = jnp.concatenate(
        [vector[places] for vector, places in zip(vectors, chosen, strict=True)]
    )
    words = lax.bitcast_convert_type(numbers, jnp.int32).reshape(-1)
    gathered = lax.all_gather(jnp.concatenate([*chosen, words]), axis_name)
    all_places, all_words = gathered[:, : numbers.size], gathered[:, numbers.size :]
    pairs = all_words.reshape(len(gathered), numbers.size, -1)
    all_numbers = lax.bitcast_convert_type(pairs if pairs.shape[-1] > 1 else pairs[..., 0], dtype)
    ends = list(itertools.accumulate(places.size for places in chosen))[:-1]

    def with_those_of(sender: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        return [
            total.at[places].add(own, unique_indices=True)
            for total, places, own in zip(
                sums,
                jnp.split(all_places[sender], ends),
                jnp.split(all_numbers[sender], ends),
                strict=True,
            )
        ]

    # One replica after another, so that the order of addition is the same everywhere; in a loop,
    # so that the program is as long for many as for two.
    return lax.fori_loop(0, len(gathered), with_those_of, [jnp.zeros_like(v) for v in vectors])


def _shaped(vectors: Sequence[jax.Array], like: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(vector.reshape(tensor.shape) for vector, tensor in zip(vectors, like, strict=True))
