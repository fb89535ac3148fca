"""Sums over the replicas of one process: `python -m benchmarks.sums [--replicas 2] [--rounds 11]`.

A step updates weights by the mean over logical CPU devices: in `strategy.run`, and by hand with
`jax.lax.pmean` of the list under `jax.jit(jax.shard_map(...))`. Each round lets one run after the
other, with the time of a first call, which compiles, beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

#: The number of weights, and their shape.
_SHAPES = [
    (1, (10,)),
    (4, (32, 32)),
    (20, (32, 32)),
    (100, (32, 32)),
    (20, (128, 128)),
    (100, (128, 128)),
    (6, (784, 512)),
    (4, (2048, 2048)),
]

_SECONDS_OF_A_ROUND = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sums", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    os.environ["UNISON_CPU_DEVICES"] = str(options.replicas)
    print("| weights | us a step | by hand | ratio | s to compile | by hand |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count, shape in _SHAPES:
        steps = [step(count, shape, options.replicas) for step in (of_run, by_hand)]
        compiling = [seconds_of(step, 1) for step in steps]
        repeats = max(1, int(_SECONDS_OF_A_ROUND / seconds_of(steps[1], 3)))
        rounds = [[seconds_of(step, repeats) for step in steps] for _ in range(options.rounds)]
        own, other = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(hand / run for run, hand in rounds)
        print(
            f"| {count} x {list(shape)} | {1e6 * own:,.0f} | {1e6 * other:,.0f} | {ratio:.2f} "
            f"| {compiling[0]:.2f} | {compiling[1]:.2f} |",
            flush=True,
        )


def seconds_of(step: Callable[[int], None], repeats: int) -> float:
    began = time.perf_counter()
    step(repeats)
    return (time.perf_counter() - began) / repeats


def of_run(count: int, shape: tuple[int, ...], replicas: int) -> Callable[[int], None]:
    import jax
    import jax.numpy as jnp

    import unison

    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        weights = [
            unison.Variable(np.ones(shape, np.float32), aggregation="mean") for _ in range(count)
        ]
    x = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(8))

    def update(x: jax.Array) -> None:
        for weight in weights:
            weight.assign_add(-0.01 * jnp.tanh(weight.value() * x.sum()))

    def step(repeats: int) -> None:
        for _ in range(repeats):
            strategy.run(update, (x,))
        jax.block_until_ready(weights[0].value())

    return step


def by_hand(count: int, shape: tuple[int, ...], replicas: int) -> Callable[[int], None]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((replicas,), ("replica",))
    everywhere, divided = PartitionSpec(), PartitionSpec("replica")
    x = jax.device_put(np.ones((replicas, 8), np.float32), NamedSharding(mesh, divided))
    weights = jax.device_put([np.ones(shape, np.float32)] * count, NamedSharding(mesh, everywhere))

    def update(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        updates = [-0.01 * jnp.tanh(weight * x.sum()) for weight in weights]
        means = jax.lax.pmean(updates, "replica")
        return [weight + mean for weight, mean in zip(weights, means, strict=True)]

    compiled = jax.jit(
        jax.shard_map(
            update, mesh=mesh, in_specs=(everywhere, divided), out_specs=everywhere, check_vma=False
        ),
        donate_argnums=0,
    )

    def step(repeats: int) -> None:
        nonlocal weights
        for _ in range(repeats):
            weights = compiled(weights, x)
        jax.block_until_ready(weights)

    return step


if __name__ == "__main__":
    main()
