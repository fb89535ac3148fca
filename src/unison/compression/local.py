"""Local steps between infrequent averages: local SGD and DiLoCo.

Only the weights are sent, and only every so many steps: in between, each replica updates its own
weights by its own gradients.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.collectives import AggregationMethod, ReduceOp, aggregate, options_in_scope
from unison.collectives.aggregation import parse_linear
from unison.compression.base import CompressionState, number_of_replicas, wide
from unison.runtime.placement import REPLICA_AXIS

logger = logging.getLogger("unison")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Lets the replicas train apart, and averages their weights every `every` steps.

    This is a different training, not another way to send gradients: options such as
    `CommunicationOptions(compresses=False)` do not switch it off.

    Attributes:
        every: The number of steps between two averages.
        warmup_steps: The number of first steps that are each followed by an average.
        outer_learning_rate: The step size from the weights of the last average to the new
            average.
        outer_momentum: The factor of the Nesterov momentum of this step; 0 for none.
    """

    every: int
    warmup_steps: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be 1 or more. Received: every={self.every}")
        if self.warmup_steps < 0:
            raise ValueError(
                f"warmup_steps must be 0 or more. Received: warmup_steps={self.warmup_steps}"
            )
        if self.outer_learning_rate <= 0:
            raise ValueError(
                "outer_learning_rate must be above 0. Received: "
                f"outer_learning_rate={self.outer_learning_rate}"
            )
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                "outer_momentum must be 0 or more, and below 1. Received: "
                f"outer_momentum={self.outer_momentum}"
            )

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether the new weights differ from the average."""
        return self.outer_learning_rate != 1 or self.outer_momentum != 0

    def init(self, params: Any) -> CompressionState:
        """Returns the state before the first step.

        Args:
            params: A tree of the weights.
        """
        common = {}
        if self.has_outer_optimizer:
            # In float32 at least: steps that are too small for the weights' dtype add up.
            weights = tuple(wide(jnp.asarray(leaf)) for leaf in jax.tree.leaves(params))
            common["anchor"] = weights
            common["velocity"] = tuple(map(jnp.zeros_like, weights))
        return CompressionState(jnp.zeros((), jnp.int32), {}, common)

    def own_gradients(
        self, gradients: Any, op: ReduceOp | str = ReduceOp.SUM, axis_name: str = REPLICA_AXIS
    ) -> Any:
        """Returns the gradients of a replica's own step.

        Args:
            gradients: The replica's contribution to the sum or mean of `op`.
            op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name. For a sum over n
                replicas, gradients are multiplied by n: an average after one step is then equal to
                a step by the sum.
            axis_name: The mesh axis of the replicas.
        """
        if parse_linear(op) is ReduceOp.MEAN:
            return gradients
        count = number_of_replicas(axis_name)
        return jax.tree.map(lambda gradient: gradient * count, gradients)

    def synchronized(
        self,
        before: Any,
        after: Any,
        state: CompressionState,
        method: AggregationMethod | int | str | None = None,
        axis_name: str = REPLICA_AXIS,
    ) -> tuple[Any, CompressionState]:
        """Averages the replicas' weights, if it is time.

        Args:
            before: The weights before this step.
            after: The weights after the replica's own update.
            state: The result of `init`, or of the previous step.
            method: The method by which the weights are averaged.
            axis_name: The mesh axis of the replicas.

        Returns:
            The weights with which to continue, and the new state.
        """
        method = AggregationMethod.parse(method)
        starting, structure = jax.tree.flatten(before)
        weights = jax.tree.leaves(after)
        step, common = state.step, state.of_all
        if not options_in_scope().compresses:
            logger.warning(
                "CommunicationOptions(compresses=False) does not switch local_sgd and diloco off: "
                "the replicas train apart. Give the optimizer no compression, or local_sgd(1)."
            )
        if self.has_outer_optimizer:
            # If weights were loaded since the last average, this round begins with them.
            common = {**common, "anchor": self._anchors(starting, state)}
        operands = (weights, common)
        weights, common = lax.cond(
            self._is_last(step),
            lambda weights, common: self._averaged(weights, common, method, axis_name),
            lambda weights, common: (weights, common),
            *operands,
        )
        new = CompressionState(step + 1, state.of_replica, common)
        return jax.tree.unflatten(structure, weights), new

    def _is_last(self, step: jax.Array) -> jax.Array:
        """Whether the weights are averaged after this step."""
        return (step < self.warmup_steps) | ((step + 1) % self.every == 0)

    def _anchors(
        self, starting: Sequence[jax.Array], state: CompressionState
    ) -> tuple[jax.Array, ...]:
        is_first = (state.step == 0) | self._is_last(state.step - 1)
        return tuple(
            jnp.where(is_first & (weight != anchor.astype(weight.dtype)), wide(weight), anchor)
            for weight, anchor in zip(starting, state.of_all["anchor"], strict=True)
        )

    def _averaged(
        self,
        weights: list[jax.Array],
        common: dict[str, tuple[jax.Array, ...]],
        method: AggregationMethod,
        axis_name: str,
    ) -> tuple[list[jax.Array], dict[str, tuple[jax.Array, ...]]]:
        means = weights
        if number_of_replicas(axis_name) > 1:
            averaged = aggregate(weights, method, ReduceOp.MEAN, axis_name)
            means = [mean.astype(w.dtype) for mean, w in zip(averaged, weights, strict=True)]
        if not self.has_outer_optimizer:
            return means, common
        anchors, velocities = [], []
        for mean, anchor, velocity in zip(means, common["anchor"], common["velocity"], strict=True):
            # The replicas began at the anchor, rounded to their weights' dtype.
            gradient = wide(anchor.astype(mean.dtype)) - wide(mean)
            velocity = self.outer_momentum * velocity + gradient
            direction = gradient + self.outer_momentum * velocity
            anchors.append(anchor - self.outer_learning_rate * direction)
            velocities.append(velocity)
        new = [anchor.astype(mean.dtype) for anchor, mean in zip(anchors, means, strict=True)]
        return new, {"anchor": tuple(anchors), "velocity": tuple(velocities)}


def local_sgd(every: int = 8, *, warmup_steps: int = 0) -> LocalTraining:
    """Averages the replicas' weights every so many steps; nothing is sent in between.

    With `every=1` and plain SGD, with or without momentum, it is equivalent to summing gradients.
    (Stich 2019, "Local SGD Converges Fast and Communicates Little".)

    Args:
        every: The number of steps between two averages.
        warmup_steps: The number of first steps that are each followed by an average.

    Raises:
        ValueError: `every` is less than 1.

    Examples:
        >>> from unison import compression
        >>> compression.local_sgd(every=4).has_outer_optimizer
        False
    """
    return LocalTraining(every=every, warmup_steps=warmup_steps)


def diloco(
    every: int = 16,
    *,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.5,
    warmup_steps: int = 0,
) -> LocalTraining:
    """Averages as `local_sgd`, and uses the change of the average as an outer gradient.

    With the weights a of the last average and the mean w of the replicas' weights, d = a - w,
    v = m v + d, and all continue with a - l (d + m v): Nesterov's momentum. In the long run they
    move l / (1 - m) times as far as the replicas: 1.4 times. a and v are stored in float32 at
    least. (Douillard et al. 2023, "DiLoCo", where
    `every` is 500 and m is 0.9: seven times as far, which is too much for the largest learning
    rates at which training is stable.)

    Args:
        every: The number of steps between two averages.
        outer_learning_rate: The factor l.
        outer_momentum: The factor m, 0 or more and below 1.
        warmup_steps: The number of first steps that are each followed by an average.

    Raises:
        ValueError: An argument is out of bounds.

    Examples:
        >>> from unison import compression
        >>> compression.diloco(every=100).outer_momentum
        0.5
    """
    return LocalTraining(
        every=every,
        outer_learning_rate=outer_learning_rate,
        outer_momentum=outer_momentum,
        warmup_steps=warmup_steps,
    )
