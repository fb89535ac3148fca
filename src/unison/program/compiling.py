"""A function of one replica's values as one XLA program for all replicas."""

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
        function: Maps this replica's values to this replica's results. Per-replica values come
            and go with their leading axis, here of size 1, still on.
        in_specs: The arguments' partition specs, as for `jax.shard_map`.
        out_specs: Those of the results.
        donate: The arguments whose buffers the program may reuse.
        name: What the program is called in messages.
        unchanged: What the results are of a program without effect; see `Placement.program`.

    Returns:
        The compiled function.
    """
    if placement.zero >= WEIGHTS:
        function = gathered_where_used(function)
    program = placement.program(function, in_specs, out_specs, donate, name, unchanged)
    return Executable(program, placement, function, in_specs)


class Executable:
    """A compiled function of all replicas.

    It passes on XLA's errors; where memory was exhausted, with the sizes of the arguments.

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
        #: See `PlacedProgram`. What calls it passes errors to `explain`.
        self.jitted = program.jitted

    def __call__(self, *args: Any) -> Any:
        try:
            # Where several processes launch it, JAX checks: they could not all look for the cause.
            if self.jitted is not None and numerics.are_checked():
                return numerics.launch_checked(
                    self._launch, args, self._function, self._in_specs, self._placement
                )
            return self._launch(*args)
        except jax.errors.JaxRuntimeError as error:
            self.explain(error, args)
            raise

    def explain(self, error: jax.errors.JaxRuntimeError, args: Any) -> None:
        """Raises an error that says by what memory was exhausted, if `error` says that it was."""
        # The second is how the CPU client says it, under the status INTERNAL.
        if any(sign in str(error) for sign in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise jax.errors.JaxRuntimeError(
                f"{error}\nThe program runs on {self._placement.num_replicas} replicas. "
                f"{_sizes(args)}"
            ) from error

    def prepare(self, num_replicas: int, *args: Any) -> None:
        """Compiles it for a group of another size; see `ElasticProgram.prepare`."""
        assert isinstance(self._launch, ElasticProgram)
        self._launch.prepare(num_replicas, *args)


def _sizes(args: Any) -> str:
    """Says how much memory the arguments of a program take, and which take most."""
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
    """How the cell's stored array is partitioned."""
    return PER_REPLICA if cell.layout is Layout.LOCAL else cell.division
