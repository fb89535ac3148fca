"""Small steps run together, as one program: launching a step costs more than its computation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.runtime.placement import Placement
from unison.runtime.planned import PlannedPlacement

#: A step of fewer floating-point operations than this (on one replica) takes less time than its
#: launch, on a CPU.
_WORTH_STARTING = 5e8
_MOST_GROUPED_STEPS = 16

#: The most bytes, of one replica, that are stacked for a group. To copy a megabyte takes as long as
#: to launch a step: a larger batch is better passed on as it is.
_MOST_STACKED_BYTES = 4 << 20

#: The number of timed executions of a program on accelerators; the first one, which compiles, is
#: not among them.
_TIMED = 3

#: XLA's option with which runs must not differ, as groups do from single steps by round-off.
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def group_size_of(operations: int, batch_bytes: int, placement: Placement) -> int:
    """Returns the number of steps that run as one program on CPUs; elsewhere, one at first.

    Args:
        operations: The floating-point operations of a step, on one replica.
        batch_bytes: The size of a replica's batch.
        placement: The replicas' devices.
    """
    if isinstance(placement, PlannedPlacement) or not placement.is_host:
        return 1
    steps = math.ceil(_WORTH_STARTING / max(operations, 1))
    return max(1, min(steps, _MOST_GROUPED_STEPS, _MOST_STACKED_BYTES // max(batch_bytes, 1)))


def is_measured(placement: Placement) -> bool:
    """Whether the first steps are timed, to find out whether steps should run together."""
    if placement.is_host or isinstance(placement, PlannedPlacement):
        return False
    return _MOST_GROUPED_STEPS > 1 and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", "")


class Trial:
    """Times executions of a program on accelerators, each launched alone and awaited.

    Groups of steps are worth it where launching a step takes longer than computing it. Whether they
    are faster is then measured as well.

    Args:
        launch: The seconds that the launch of a single step takes, if the program is a group.
    """

    def __init__(self, launch: float | None = None):
        self._launch_of_single = launch
        self._executions = -1
        self._launch = self._wait = self._total = math.inf

    def note(self, launch: float, wait: float) -> None:
        """Takes note of the seconds of a launch, and of those that its results took from then."""
        self._executions += 1
        if self._executions:
            self._launch = min(self._launch, launch)
            self._wait = min(self._wait, wait)
            self._total = min(self._total, launch + wait)

    @property
    def is_over(self) -> bool:
        return self._executions >= _TIMED

    @property
    def launch(self) -> float:
        """The seconds that a launch takes."""
        return self._launch

    def group_size(self) -> int:
        """Returns the number of steps for which the devices compute as long as a launch takes."""
        if self._wait >= self._launch:
            return 1
        steps = math.ceil(self._launch / max(self._wait, self._launch / _MOST_GROUPED_STEPS))
        return min(steps, _MOST_GROUPED_STEPS)

    def pays_off(self, group_size: int) -> bool:
        """Whether a step of a group takes less time than the launch of a single step."""
        assert self._launch_of_single is not None
        return self._total / group_size < self._launch_of_single


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
