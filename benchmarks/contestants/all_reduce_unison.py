"""Unison: `all_reduce` of a replica's value, in `strategy.run`."""

from __future__ import annotations

import jax

import unison
from benchmarks.contestants.all_reduce import AllReduce, array_of, check
from benchmarks.protocol import Contestant
from benchmarks.workloads import AllReduceWork


def build(work: AllReduceWork) -> Contestant:
    strategy = unison.MultiWorkerMirroredStrategy()
    values = strategy.experimental_distribute_values_from_function(
        lambda context: jax.device_put(array_of(work, context.replica_id_in_sync_group))
    )

    def summed(value: jax.Array) -> jax.Array:
        return unison.get_replica_context().all_reduce("SUM", value)

    def call() -> jax.Array:
        [total] = strategy.experimental_local_results(strategy.run(summed, (values,)))
        return total.block_until_ready()

    check(work, call())
    return AllReduce(work, call, {"jax": jax.__version__, "unison": unison.__version__})
