"""TensorFlow: `strategy.run` of a function that updates variables, in a graph or from Python."""

from __future__ import annotations

from typing import Any

import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks.contestants import tensorflow_devices
from benchmarks.contestants.calls import Calls, addends_of
from benchmarks.protocol import Contestant
from benchmarks.workloads import RunWork


def build(work: RunWork, in_function: bool) -> Contestant:
    """Builds the contestant; `in_function` wraps the call of `run` into a `tf.function`."""
    strategy = tensorflow_devices.mirrored_strategy(work)
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [
            tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM) for _ in range(work.variables)
        ]
    addends = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(addends_of(count)[context.replica_id_in_sync_group])
    )

    def update(addend: Any) -> None:
        for index, variable in enumerate(variables):
            variable.assign_add(addend + index)

    def run(addend: Any) -> None:
        strategy.run(update, args=(addend,))

    step = tf.function(run) if in_function else run
    return Calls(
        work,
        count,
        call=lambda: step(addends),
        totals=lambda: [float(variable.numpy()) for variable in variables],
        versions=tensorflow_devices.versions(),
    )
