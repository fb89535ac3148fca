"""Compiles a function of one replica's values into one XLA program for all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from unison.cells import Cell, Layout
from unison.lowering.gathering import gathered_where_used
from unison.program import numerics
from unison.runtime.elastic import ElasticProgram
from unison.runtime.placement import REPLICA_AXIS, WEIGHTS, PlacedProgram, Placement, Unchanged

MIRRORED = PartitionSpec()
PER_REPLICA = PartitionSpec(REPLICA_AXIS)


def compile_replicas(
    placement: Placement,
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    donate: Sequence[int] = (),
    name: str = "a program",
    unchanged: Unchanged | None = None,
) -> Executable:
    """Compiles `function`, which computes one replica's part, for all replicas of `placement`.

    Args:
        placement: The replicas' devices.
        function: Maps this replica's values to this replica's results. Per-replica values are
            passed and returned with their leading axis, which has size 1 here.
        in_specs: The arguments' partition specs, as for `jax.shard_map`.
        out_specs: Those of the results.
        donate: The arguments whose buffers the program may reuse.
        name: The name of the program in messages.
        unchanged: The results of a program that has no effect; see `Placement.program`.

    Returns:
        The compiled function.
    """
    if placement.zero >= WEIGHTS:
        function = gathered_where_used(function)
    program = placement.program(function, in_specs, out_specs, donate, name, unchanged)
    return Executable(program, placement, function, in_specs)


class Executable:
    """A compiled function of all replicas.

    It propagates XLA's errors; if memory was exhausted, with the sizes of the arguments added.

    Args:
        program: The program.
        placement: The replicas' devices.
        function: One replica's part of it.
        in_specs: The arguments' partition specs.
    """

    def __init__(
        self,
        program: PlacedProgram,
        placement: Placement,
        function: Callable[..., Any],
        in_specs: Any,
    ):
        self._launch = program.launch
        self._placement = placement
        self._function, self._in_specs = function, in_specs
        #: See `PlacedProgram`. Code that calls it passes errors to `explain`.
        self.jitted = program.jitted

    def __call__(self, *args: Any) -> Any:
        try:
            # With several processes, JAX does the check: they could not all search for the cause.
            if self.jitted is not None and numerics.are_checked():
                return numerics.launch_checked(
                    self._launch, args, self._function, self._in_specs, self._placement
                )
            return self._launch(*args)
        except jax.errors.JaxRuntimeError as error:
            self.explain(error, args)
            raise

    def explain(self, error: jax.errors.JaxRuntimeError, args: Any) -> None:
        """Raises an error with the sizes of the arguments, if `error` reports exhausted memory."""
        # The second is the CPU client's wording, under the status INTERNAL.
        if any(sign in str(error) for sign in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise jax.errors.JaxRuntimeError(
                f"{error}\nThe program runs on {self._placement.num_replicas} replicas. "
                f"{_sizes(args)}"
            ) from error

    def prepare(self, num_replicas: int, *args: Any) -> None:
        """Compiles it for a group of a different size; see `ElasticProgram.prepare`."""
        assert isinstance(self._launch, ElasticProgram)
        self._launch.prepare(num_replicas, *args)


def _sizes(args: Any) -> str:
    """Describes how much memory the arguments of a program take, and which take the most."""
    arrays = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "nbytes")]
    largest = sorted(arrays, key=lambda array: -array.nbytes)[:5]
    total = sum(array.nbytes for array in arrays)
    listed = ", ".join(
        f"{array.dtype}{list(array.shape)} of {array.nbytes / 2**20:.1f} MiB" for array in largest
    )
    return (
        f"Its {len(arrays)} arguments take {total / 2**20:.1f} MiB. "
        f"The largest: {listed or 'none'}."
    )


def cell_spec(cell: Cell) -> PartitionSpec:
    """Returns the partition spec of the cell's stored array."""
    return PER_REPLICA if cell.layout is Layout.LOCAL else cell.division
