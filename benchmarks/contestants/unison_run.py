"""Unison: `strategy.run` of a function that updates variables."""

from __future__ import annotations

from typing import Any

import jax

import unison
from benchmarks.contestants.calls import Calls, addends_of
from benchmarks.contestants.unison_devices import mirrored_strategy
from benchmarks.protocol import Contestant
from benchmarks.workloads import RunWork


def build(work: RunWork) -> Contestant:
    strategy = mirrored_strategy(work)
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [
            unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
            for _ in range(work.variables)
        ]
    addends = strategy.experimental_distribute_values_from_function(
        lambda context: addends_of(count)[context.replica_id_in_sync_group]
    )

    def update(addend: Any) -> None:
        for index, variable in enumerate(variables):
            variable.assign_add(addend + index)

    return Calls(
        work,
        count,
        call=lambda: strategy.run(update, args=(addends,)),
        totals=lambda: [float(variable) for variable in variables],
        versions={"jax": jax.__version__, "unison": unison.__version__},
    )
