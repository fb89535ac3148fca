"""Small steps run together, as one program: launching a step costs more than its computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from unison.lowering.flops import count_flops
from unison.runtime.placement import Placement
from unison.runtime.planned import PlannedPlacement

#: A step of fewer floating-point operations than this (on one replica) takes less time than its
#: launch. Measured on CPU; an accelerator launches a step as quickly and computes it much faster.
_WORTH_STARTING = {"cpu": 5e8}
_WORTH_STARTING_ELSEWHERE = 1e11
_MOST_GROUPED_STEPS = 16


def group_size_of(step: ClosedJaxpr, placement: Placement) -> int:
    """Returns the number of steps that should run as one program; for a planned step, one."""
    if isinstance(placement, PlannedPlacement):
        return 1
    worth_starting = _WORTH_STARTING.get(placement.platform, _WORTH_STARTING_ELSEWHERE)
    steps = math.ceil(worth_starting / max(count_flops(step.jaxpr), 1))
    return min(steps, _MOST_GROUPED_STEPS)


def grouped(
    step: Callable[..., Any], donated: list[int], read_only: list[int], written: list[int]
) -> Callable[..., Any]:
    """Returns a program that runs `step` for `count` of a stack of batches, sequentially.

    The number is an input, so that one program serves groups of any size, and a step
    gives the same result, bit for bit, in groups of any size.
    """

    def program(
        donated_state: list, read_only_state: list, stacked: list, count: jax.Array
    ) -> tuple[Any, list]:
        before = dict(zip([*donated, *read_only], [*donated_state, *read_only_state], strict=True))

        def run(position: jax.Array, carry: tuple[Any, list]) -> tuple[Any, list]:
            now = before | dict(zip(written, carry[1], strict=True))
            batch = [lax.dynamic_index_in_dim(x[0], position, keepdims=False) for x in stacked]
            return step([now[i] for i in donated], [now[i] for i in read_only], batch)

        new = [before[i] for i in written]
        shapes, _ = jax.eval_shape(run, jnp.int32(0), (None, new))
        nothing = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), shapes)
        return lax.fori_loop(0, count, run, (nothing, new))

    return program


def stacking(program: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a grouped program that takes a list of batches, which it stacks on the devices."""

    def of_batches(
        donated_state: list, read_only_state: list, batches: list[list], count: jax.Array
    ) -> tuple[Any, list]:
        stacked = [jnp.stack(leaves)[None] for leaves in zip(*batches, strict=True)]
        return program(donated_state, read_only_state, stacked, count)

    return of_batches
