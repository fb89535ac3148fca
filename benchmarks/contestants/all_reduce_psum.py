"""What one writes by hand: `psum` in a jitted `shard_map`."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import cluster
from benchmarks.contestants.all_reduce import AllReduce, array_of, check
from benchmarks.contestants.training_hand_written import joined_mesh
from benchmarks.protocol import Contestant
from benchmarks.workloads import AllReduceWork


def build(work: AllReduceWork) -> Contestant:
    own = cluster.from_environment()
    mesh = joined_mesh(own)
    [axis] = mesh.axis_names
    spec = PartitionSpec(axis)
    array = jax.make_array_from_process_local_data(
        NamedSharding(mesh, spec), array_of(work, own.rank)
    )
    summed = jax.jit(
        jax.shard_map(lambda value: lax.psum(value, axis), mesh=mesh, in_specs=spec, out_specs=spec)
    )

    def call() -> jax.Array:
        return summed(array).block_until_ready()

    check(work, call().addressable_data(0))
    return AllReduce(work, call, {"jax": jax.__version__})
