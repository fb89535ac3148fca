"""Gradients forward, along the computation: `tf.autodiff.ForwardAccumulator`."""

from __future__ import annotations

from typing import Any

import jax

from unison.interrupts import begin_block, end_block
from unison.runtime.private_jax import Pushing
from unison.tf import nest
from unison.tf.tape import UnconnectedGradients, filled, parse_unconnected
from unison.tf.tensors import convert_to_tensor, is_variable
from unison.tf.variable_reads import do_not_observe_reads, observe_reads


class ForwardAccumulator:
    """Computes directional derivatives while the block runs (forward mode).

    Args:
        primals: A tensor or variable to differentiate by, or a nest of them.
        tangents: The direction: a nest like `primals`.

    Raises:
        ValueError: `primals` and `tangents` differ in structure or shape.

    Examples:
        >>> import unison.tf as tf
        >>> x = tf.constant(3.0)
        >>> with tf.autodiff.ForwardAccumulator(x, tf.constant(2.0)) as accumulator:
        ...     y = x * x
        >>> accumulator.jvp(y)
        Array(12., dtype=float32)

    TF: `tf.autodiff.ForwardAccumulator`.
    """

    def __init__(self, primals: Any, tangents: Any):
        nest.assert_same_structure(primals, tangents)
        self._pushing: Pushing | None = None
        self._is_on = False
        pairs = zip(nest.flatten(primals), nest.flatten(tangents), strict=True)
        self._pairs = [(primal, convert_to_tensor(tangent)) for primal, tangent in pairs]
        for primal, tangent in self._pairs:
            if tuple(primal.shape) != tuple(tangent.shape):
                raise ValueError(
                    "A tangent must have the shape of its primal. Received: shapes "
                    f"{tuple(tangent.shape)} and {tuple(primal.shape)}"
                )

    def __enter__(self) -> ForwardAccumulator:
        if self._is_on:
            raise ValueError("The accumulator is at work already: its block was entered twice.")
        if self._pushing is None:
            self._pushing = Pushing()
        for primal, tangent in self._pairs:
            if not is_variable(primal):
                self._pushing.follow(primal, tangent)
        begin_block(self._begin, self._end)
        return self

    def __exit__(self, *failure: Any) -> None:
        end_block(self._end)

    def _begin(self) -> None:
        assert self._pushing is not None
        self._is_on = True
        self._pushing.switch_on()
        observe_reads(self._note_read)

    def _end(self) -> None:
        if self._is_on and self._pushing is not None:
            do_not_observe_reads(self._note_read)
            self._pushing.switch_off()
            self._is_on = False

    def jvp(
        self,
        primals: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the derivatives of `primals`, which the block computed, in the direction.

        Raises:
            ValueError: The block has not been entered.
        """
        unconnected = parse_unconnected(unconnected_gradients)
        if self._pushing is None:
            raise ValueError("Enter the accumulator's block before jvp is called.")
        pushing = self._pushing
        return nest.map_structure(
            lambda primal: filled(pushing.tangent_of(primal), primal, unconnected), primals
        )

    def _note_read(self, variable: Any, value: jax.Array) -> jax.Array:
        assert self._pushing is not None
        tangents = (tangent for primal, tangent in self._pairs if primal is variable)
        return self._pushing.follow(value, next(tangents, None))
