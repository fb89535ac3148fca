"""The hand-written program: `jax.distributed`, one jitted `shard_map`, one all-reduce a step.

All gradients travel in one buffer. It is filled by `dynamic_update_slice`: into a concatenation
XLA's CPU compiler fuses the sums that make bias gradients, and computes them for every element.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import cluster, training_examples
from benchmarks.contestants.training import Training
from benchmarks.protocol import Contestant
from benchmarks.workloads import TrainingWork

_AXIS = "replica"
_OPTIMIZER = optax.adam(training_examples.RATE, eps=training_examples.EPSILON)
_BY_REPLICA, _EVERYWHERE = PartitionSpec(_AXIS), PartitionSpec()


def build(work: TrainingWork) -> Contestant:
    own = cluster.from_environment()
    mesh = joined_mesh(own)
    by_replica = NamedSharding(mesh, _BY_REPLICA)
    batches = [
        tuple(jax.make_array_from_process_local_data(by_replica, part) for part in batch)
        for batch in training_examples.batches_of(work, own.rank)
    ]
    parameters = training_examples.initial_parameters(work)
    state = jax.device_put(
        (parameters, _OPTIMIZER.init(parameters)), NamedSharding(mesh, _EVERYWHERE)
    )
    step = _compiled_step(work, mesh)

    def train() -> None:
        nonlocal state
        for batch in batches:
            state = step(*state, *batch)
        jax.block_until_ready(state)

    def current() -> list[np.ndarray]:
        return [parameter.addressable_data(0) for parameter in state[0]]

    return Training(work, train, current, {"jax": jax.__version__, "optax": optax.__version__})


def joined_mesh(own: cluster.Cluster) -> jax.sharding.Mesh:
    """Makes this process one of JAX's, and returns the mesh of all."""
    if own.size > 1:
        jax.distributed.initialize(own.addresses[0], own.size, own.rank)
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((own.size,), (_AXIS,), axis_types=auto)


def _compiled_step(work: TrainingWork, mesh: jax.sharding.Mesh) -> Any:
    def step(parameters: Any, optimizer: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                _logits(parameters, images), labels
            )
            return losses.sum() / work.batch

        gradients = _summed(jax.grad(loss)(parameters))
        updates, optimizer = _OPTIMIZER.update(gradients, optimizer)
        return optax.apply_updates(parameters, updates), optimizer

    on_all = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(_EVERYWHERE, _EVERYWHERE, _BY_REPLICA, _BY_REPLICA),
        out_specs=_EVERYWHERE,
        check_vma=False,
    )
    return jax.jit(on_all, donate_argnums=(0, 1))


def _logits(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
    *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
    for kernel, bias in hidden:
        x = jax.nn.relu(x @ kernel + bias)
    return x @ last[0] + last[1]


def _summed(gradients: list[jax.Array]) -> list[jax.Array]:
    buffer = jnp.zeros(sum(gradient.size for gradient in gradients))
    starts = np.cumsum([0, *(gradient.size for gradient in gradients)]).tolist()
    for start, gradient in zip(starts, gradients, strict=False):
        buffer = lax.dynamic_update_slice(buffer, gradient.reshape(-1), (start,))
    total = lax.psum(buffer, _AXIS)
    return [
        total[start : start + gradient.size].reshape(gradient.shape)
        for start, gradient in zip(starts, gradients, strict=False)
    ]
