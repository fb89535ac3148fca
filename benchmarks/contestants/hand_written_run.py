"""A jitted `shard_map` that updates donated arrays: the least that such a call costs in JAX."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.contestants.calls import Calls, addends_of
from benchmarks.protocol import Contestant
from benchmarks.workloads import RunWork

_AXIS = "replica"


def build(work: RunWork) -> Contestant:
    count = jax.device_count()
    mesh = jax.make_mesh((count,), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    mirrored = NamedSharding(mesh, PartitionSpec())
    addends = jax.device_put(addends_of(count), NamedSharding(mesh, PartitionSpec(_AXIS)))
    variables = [jax.device_put(np.float32(0), mirrored) for _ in range(work.variables)]

    def update(variables: list[jax.Array], addend: jax.Array) -> list[jax.Array]:
        totals = lax.psum([addend[0] + index for index in range(len(variables))], _AXIS)
        return [variable + total for variable, total in zip(variables, totals, strict=True)]

    on_all = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(_AXIS)),
        out_specs=PartitionSpec(),
    )
    step = jax.jit(on_all, donate_argnums=0)

    def call() -> None:
        variables[:] = step(variables, addends)

    return Calls(
        work,
        count,
        call=call,
        totals=lambda: [float(variable) for variable in variables],
        versions={"jax": jax.__version__},
    )
