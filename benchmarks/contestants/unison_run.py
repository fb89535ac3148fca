"""Unison: `strategy.run` of a function that updates variables."""

from __future__ import annotations

from typing import Any

import jax

import unison
from benchmarks.contestants.calls import ADDENDS, Calls
from benchmarks.protocol import Contestant
from benchmarks.workloads import REPLICAS, RunWork


def build(work: RunWork) -> Contestant:
    unison.set_logical_cpu_devices(REPLICAS)
    strategy = unison.MirroredStrategy()
    with strategy.scope():
        variables = [
            unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
            for _ in range(work.variables)
        ]
    addends = strategy.experimental_distribute_values_from_function(
        lambda context: ADDENDS[context.replica_id_in_sync_group]
    )

    def update(addend: Any) -> None:
        for index, variable in enumerate(variables):
            variable.assign_add(addend + index)

    return Calls(
        work,
        call=lambda: strategy.run(update, args=(addends,)),
        totals=lambda: [float(variable) for variable in variables],
        versions={"jax": jax.__version__, "unison": unison.__version__},
    )
