"""TensorFlow's `ParameterServerStrategy` and `ClusterCoordinator`; run as a program, it serves."""

from __future__ import annotations

from typing import Any

import tensorflow as tf  # noqa: TID251 -- a peer, in processes of its own

from benchmarks.contestants.parameter_servers import (
    Scheduling,
    end_with_coordinator,
    start_others,
)
from benchmarks.protocol import Contestant
from benchmarks.server_loads import LOADS, RATE, Dense, batches_of
from benchmarks.workloads import ServerWork


def build(work: ServerWork) -> Contestant:
    job = start_others("parameter_servers_tf", work)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(job.cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    load = LOADS[work.load]
    with strategy.scope():
        variables = [tf.Variable(value) for value in load.parameters()]
    loss_of = _loss_of_classes if isinstance(load, Dense) else _loss_of_rows

    def replica(examples: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, examples, targets)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                change = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                variable.scatter_sub(change)
            else:
                variable.assign_sub(RATE * gradient)
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica, args=next(iterator))

    batches = batches_of(work)
    examples, targets = (tf.stack([batch[part] for batch in batches]) for part in (0, 1))

    def dataset(context: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((examples, targets)).repeat().prefetch(2)

    @tf.function
    def per_worker() -> Any:
        return strategy.distribute_datasets_from_function(dataset)

    iterator = iter(coordinator.create_per_worker_dataset(per_worker))
    return Scheduling(work, job, coordinator, step, iterator, {"tensorflow": tf.__version__})


def _loss_of_classes(variables: list[Any], images: Any, labels: Any) -> Any:
    x = images
    layers = list(zip(variables[::2], variables[1::2], strict=True))
    for kernel, bias in layers[:-1]:
        x = tf.nn.relu(x @ kernel + bias)
    kernel, bias = layers[-1]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ kernel + bias)
    return tf.reduce_mean(losses)


def _loss_of_rows(variables: list[Any], ids: Any, targets: Any) -> Any:
    table, kernel = variables
    means = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
    return tf.reduce_mean((means @ kernel - targets) ** 2)


def _serve() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()


if __name__ == "__main__":
    end_with_coordinator()
    _serve()
