"""Unison's `ParameterServerStrategy` and `ClusterCoordinator`; run as a program, it serves."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from typing import Any

import jax
import jax.numpy as jnp

import unison
from benchmarks.contestants.parameter_servers import (
    Scheduling,
    end_with_coordinator,
    start_others,
)
from benchmarks.protocol import Contestant
from benchmarks.server_loads import LOADS, RATE, Dense, endless_batches
from benchmarks.workloads import ServerWork
from unison.net.secret import KEY_VARIABLE, new_key
from unison.parameter_server import (
    ClusterCoordinator,
    MinSizePartitioner,
    ParameterServerStrategy,
)
from unison.parameter_server.serving import main as serve
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver


def build(work: ServerWork) -> Contestant:
    os.environ[KEY_VARIABLE] = new_key()
    job = start_others("parameter_servers_unison", work)
    served = {name: job.cluster[name] for name in ("worker", "ps")}
    divided = MinSizePartitioner(max_shards=work.servers) if work.servers > 1 else None
    strategy = ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(served)), divided)
    coordinator = ClusterCoordinator(strategy)
    load = LOADS[work.load]
    with strategy.scope():
        variables = [unison.Variable(value) for value in load.parameters()]
    loss_of = _loss_of_classes if isinstance(load, Dense) else _loss_of_rows

    def replica(examples: Any, targets: Any) -> Any:
        values = [variable.value() for variable in variables]
        loss, gradients = jax.value_and_grad(loss_of)(values, examples, targets)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        return loss

    def step(iterator: Any) -> Any:
        return strategy.run(replica, args=next(iterator))

    def totals() -> tuple[int, float, float]:
        found = [answer.fields for answer in strategy.store.ask_all("status").values()]
        moved = sum(status["sent_bytes"] + status["received_bytes"] for status in found)
        busy = max(status["busy_seconds"] for status in found)  # they work at the same time
        return moved, coordinator.waited_seconds, busy

    batches = coordinator.create_per_worker_dataset(functools.partial(endless_batches, work))
    versions = {name: importlib.metadata.version(name) for name in ("unison", "jax")}
    return Scheduling(work, job, coordinator, step, iter(batches), versions, totals)


def _loss_of_classes(values: list[Any], images: Any, labels: Any) -> Any:
    x = images
    layers = list(zip(values[::2], values[1::2], strict=True))
    for kernel, bias in layers[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = layers[-1]
    logits = jax.nn.log_softmax(x @ kernel + bias)
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def _loss_of_rows(values: list[Any], ids: Any, targets: Any) -> Any:
    table, kernel = values
    return ((table[ids].mean(axis=1) @ kernel - targets) ** 2).mean()


if __name__ == "__main__":
    end_with_coordinator()
    serve()
