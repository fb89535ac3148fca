"""Compiles a function of one replica's values into one XLA program for all replicas."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import PartitionSpec

from unison.cells import Cell, Layout
from unison.collectives.communication import CommunicationOptions
from unison.interrupts import HeldCall
from unison.lowering.gathering import gathered_where_used
from unison.program import numerics
from unison.program.garbage import without_collection
from unison.runtime.elastic import ElasticProgram
from unison.runtime.placement import REPLICA_AXIS, WEIGHTS, Placement
from unison.runtime.private_jax import with_cache_misses
from unison.runtime.replica_function import PlacedProgram, ReplicaFunction

MIRRORED = PartitionSpec()
PER_REPLICA = PartitionSpec(REPLICA_AXIS)


#: The bytes of gradients that XLA puts into one all-reduce on GPUs, if nothing else is given.
_COMBINED_BYTES = 30 * 2**20


def compile_replicas(
    placement: Placement, part: ReplicaFunction, communication: CommunicationOptions
) -> Executable:
    """Returns a program that computes a function's part for all replicas of `placement`.

    XLA compiles it at its first call.

    Args:
        placement: The replicas' devices.
        part: The function. Per-replica values are passed and returned with their leading axis,
            which has size 1 in it.
        communication: On accelerators, XLA sums gradients up to `bytes_per_pack` at a time, if it
            is given.

    Returns:
        The program.
    """
    if placement.platform in _COMBINING:
        combining = _COMBINING[placement.platform]
        options = combining(communication.bytes_per_pack, placement.num_replicas)
        part = dataclasses.replace(part, compiler_options=options)
    if placement.zero >= WEIGHTS:
        part = dataclasses.replace(part, function=gathered_where_used(part.function))
    return Executable(placement.program(part), placement, part)


def _combining_on_gpus(bytes_per_pack: int, num_replicas: int) -> dict[str, Any]:
    """Returns XLA's options for the bytes of gradients that it puts into one collective on GPUs.

    XLA counts the results of a reduce-scatter, which are a replica's parts. By its default, as many
    parts as bytes of whole gradients, it would scatter all gradients together: behind nothing.

    Args:
        bytes_per_pack: The bytes of whole gradients; 0 for XLA's default.
        num_replicas: The number of replicas.
    """
    scattered = (bytes_per_pack or _COMBINED_BYTES) // num_replicas
    options = {"xla_gpu_reduce_scatter_combine_threshold_bytes": scattered}
    if bytes_per_pack:
        options["xla_gpu_all_reduce_combine_threshold_bytes"] = int(bytes_per_pack)
    return _without_flags_of_the_user(options, "XLA_FLAGS")


def _combining_on_tpus(bytes_per_pack: int, num_replicas: int) -> dict[str, Any]:
    """Returns XLA's options to sum so many bytes of gradients at a time on TPUs, beside products.

    By default it sums nearly all at once, while the core waits.
    """
    del num_replicas
    if not bytes_per_pack:
        return {}
    options = {
        "xla_jf_crs_combiner_threshold_in_bytes": int(bytes_per_pack),
        "xla_enable_async_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    }
    return _without_flags_of_the_user(options, "LIBTPU_INIT_ARGS")


#: The options for each platform.
_COMBINING = {"gpu": _combining_on_gpus, "tpu": _combining_on_tpus}


def _without_flags_of_the_user(options: dict[str, Any], variable: str) -> dict[str, Any]:
    """Returns the options that a variable does not have, over which they would prevail."""
    flags = os.environ.get(variable, "")
    return {name: value for name, value in options.items() if f"--{name}=" not in flags}


class Executable:
    """A compiled function of all replicas.

    It propagates XLA's errors; if memory was exhausted, with the sizes of the arguments added.

    Args:
        program: The program.
        placement: The replicas' devices.
        part: One replica's part of it.
    """

    def __init__(self, program: PlacedProgram, placement: Placement, part: ReplicaFunction):
        self._launch = program.launch
        #: None when the program has been lowered.
        self._lower = program.lower
        self._placement = placement
        self._part = part
        #: See `PlacedProgram`. Code that calls it passes errors to `explain`.
        self.jitted = program.jitted
        #: Holds signals where JAX's call of it is Python code; to be released after each call.
        self.held = HeldCall()
        if program.jitted is not None:
            self.jitted = with_cache_misses(program.jitted, self.held.around)

    def __call__(self, *args: Any) -> Any:
        try:
            # With several processes, JAX does the check: they could not all search for the cause.
            if self.jitted is not None and numerics.are_checked():
                return numerics.launch_checked(self._launch, args, self._part, self._placement)
            lower, self._lower = self._lower, None
            if lower is not None:
                without_collection(lambda: lower(*args))
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
