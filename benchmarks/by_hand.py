"""Training steps as an expert writes them in plain JAX: data parallelism by `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.networks import Batch, Network

_RATE, _MOMENTUM = 0.01, 0.9
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-7

_WHOLE, _DIVIDED = PartitionSpec(), PartitionSpec("replica")


def _sgd(weights: Any, gradients: Any, slots: Any, step: Any) -> tuple[Any, Any]:
    return jax.tree.map(lambda w, g: w - _RATE * g, weights, gradients), slots


def _momentum(weights: Any, gradients: Any, slots: Any, step: Any) -> tuple[Any, Any]:
    (moved,) = slots
    moved = jax.tree.map(lambda m, g: _MOMENTUM * m - _RATE * g, moved, gradients)
    return jax.tree.map(jnp.add, weights, moved), (moved,)


def _adam(weights: Any, gradients: Any, slots: Any, step: Any) -> tuple[Any, Any]:
    first, second = slots
    done = step.astype("float32") + 1
    rate = _RATE * jnp.sqrt(1 - _BETA_2**done) / (1 - _BETA_1**done)
    first = jax.tree.map(lambda m, g: m + (g - m) * (1 - _BETA_1), first, gradients)
    second = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - _BETA_2), second, gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - rate * m / (jnp.sqrt(v) + _EPSILON), weights, first, second
    )
    return weights, (first, second)


#: The update of each optimizer as Keras defines it, and the number of its values for each weight.
OPTIMIZERS = {"sgd": (_sgd, 0), "momentum": (_momentum, 1), "adam": (_adam, 2)}


def lowered_step(network: Network, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """Returns a training step of a network on devices that need not be here."""
    mesh = Mesh(np.array(devices), ("replica",))
    update, num_slots = OPTIMIZERS[network.OPTIMIZER]
    count = len(devices)

    def step(weights: Any, slots: Any, statistics: Any, done: Any, batch: Batch) -> Any:
        def loss(weights: Any) -> Any:
            losses, new = network.forward(weights, statistics, batch)
            return jnp.sum(losses) / (losses.size * count), new

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        value, gradients = jax.lax.psum((value, gradients), "replica")
        new = jax.lax.pmean(new, "replica")
        weights, slots = update(weights, gradients, slots, done)
        return weights, slots, new, done + 1, value

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(_WHOLE, _WHOLE, _WHOLE, _WHOLE, _DIVIDED),
        out_specs=_WHOLE,
        check_vma=False,
    )

    def shaped(shape: Sequence[int], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def whole(shapes: Any) -> Any:
        return of_shapes(lambda shape: shaped(shape, "float32", _WHOLE), shapes)

    weights = whole(network.parameters())
    batch = jax.tree.map(
        lambda leaf: shaped(leaf.shape, leaf.dtype, _DIVIDED),
        network.batch(count * network.EXAMPLES),
    )
    return jax.jit(mapped, donate_argnums=(0, 1, 2, 3)).lower(
        weights,
        (weights,) * num_slots,
        whole(network.statistics()),
        shaped((), "int32", _WHOLE),
        batch,
    )


def of_shapes(make: Callable[[tuple[int, ...]], Any], shapes: Any) -> Any:
    """Returns a pytree of shapes with what `make` returns for each."""
    return jax.tree.map(make, shapes, is_leaf=is_shape)


def bytes_of(shapes: Any) -> int:
    """Returns the bytes of float32 arrays with the shapes of a pytree."""
    return sum(jax.tree.leaves(of_shapes(lambda shape: 4 * math.prod(shape), shapes)))


def is_shape(node: Any) -> bool:
    """Whether a node of a pytree of shapes is one."""
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)
