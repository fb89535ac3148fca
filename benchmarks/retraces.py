"""What a retrace costs: a step that gets a new batch size, beside plain `jax.jit`.

    python -m benchmarks.retraces [--rounds 20] [--layers 3] [--json PATH]

A small Keras model with Adam trains on two logical CPU devices: in `strategy.run` with a gradient
tape, in `fit` (`train_on_batch`), and in a step written by hand with `jax.value_and_grad`,
`jax.lax.psum` and `stateless_apply` under `jax.jit(jax.shard_map(...))`. Each round gives all of
them a batch size that is new to them, one after the other. What is not XLA's compiling is Python:
tracing, passes over the trace, lowering to StableHLO, the call.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("UNISON_CPU_DEVICES", "2")

import jax
import jax.monitoring
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import unison.tf as tf

_FEATURES = 20
_WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the ratios there")
    options = parser.parse_args()
    clock = _Clock()
    jax.monitoring.register_event_duration_secs_listener(clock.on_duration)
    steps = {
        "jax.jit": written_by_hand(options.layers),
        "run": step_of_run(options.layers),
        "fit": step_of_fit(options.layers),
    }
    python: dict[str, list[float]] = {name: [] for name in steps}
    xla: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(_WARM_UP + options.rounds):
        for name, step in steps.items():
            examples = 2 * (number + 2)
            x = np.ones((examples, _FEATURES), np.float32)
            y = np.ones((examples, 1), np.float32)
            clock.start()
            step(x, y)
            if number >= _WARM_UP:
                python[name].append(clock.python_seconds())
                xla[name].append(clock.xla_seconds)
    print(f"{'':8} {'XLA, s':>8} {'Python, ms of CPU':>18} {'least':>6}   Python, to jax.jit")
    ratios = {}
    for name in steps:
        pairs = zip(python[name], python["jax.jit"], strict=True)
        ratios[name] = statistics.median(own / plain for own, plain in pairs)
        of_python = 1e3 * statistics.median(python[name])
        print(
            f"{name:8} {statistics.median(xla[name]):8.3f} {of_python:18.1f} "
            f"{1e3 * min(python[name]):6.1f}   {ratios[name]:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(ratios) + "\n")


class _Clock:
    """Tells XLA's part of a retrace from Python's, by the events that JAX reports.

    Python's is processor time of this thread: other processes do not count.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.xla_seconds = 0.0
        self._in_xla = 0.0
        self._lowered = self._began = time.thread_time()

    def on_duration(self, event: str, seconds: float, **_: object) -> None:
        if event.endswith("jaxpr_to_mlir_module_duration"):
            self._lowered = time.thread_time()
        elif event.endswith("backend_compile_duration"):
            self.xla_seconds += seconds
            self._in_xla += time.thread_time() - self._lowered

    def python_seconds(self) -> float:
        return time.thread_time() - self._began - self._in_xla


def small_model(layers: int) -> keras.Model:
    hidden = [keras.layers.Dense(32, activation="relu") for _ in range(layers - 1)]
    return keras.Sequential([keras.Input((_FEATURES,)), *hidden, keras.layers.Dense(1)])


def written_by_hand(layers: int) -> Callable[[np.ndarray, np.ndarray], None]:
    mesh = Mesh(np.array(tf.distribute.MirroredStrategy().placement.devices), ("replica",))
    everywhere, divided = PartitionSpec(), PartitionSpec("replica")
    model = small_model(layers)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    state = jax.device_put(
        (
            [variable.value for variable in model.trainable_variables],
            [variable.value for variable in optimizer.variables],
        ),
        NamedSharding(mesh, everywhere),
    )

    def loss_of(weights: list, x: jax.Array, y: jax.Array) -> jax.Array:
        predicted, _ = model.stateless_call(weights, [], x, training=True)
        return jnp.mean((predicted - y) ** 2)

    def step(state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        weights, slots = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
        gradients = jax.lax.psum(gradients, "replica")
        return optimizer.stateless_apply(slots, gradients, weights), loss[None]

    compiled = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everywhere, divided, divided),
            out_specs=(everywhere, divided),
            check_vma=False,
        )
    )

    def run(x: np.ndarray, y: np.ndarray) -> None:
        _, loss = compiled(state, *jax.device_put((x, y), NamedSharding(mesh, divided)))
        loss.block_until_ready()

    return run


def step_of_run(layers: int) -> Callable[[np.ndarray, np.ndarray], None]:
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = small_model(layers)
        optimizer = tf.keras.optimizers.Adam()

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def run(x: np.ndarray, y: np.ndarray) -> None:
        def part(values: np.ndarray) -> object:
            return strategy.experimental_distribute_values_from_function(
                lambda context: np.array_split(values, 2)[context.replica_id_in_sync_group]
            )

        losses = strategy.run(step, (part(x), part(y)))
        jax.block_until_ready(strategy.experimental_local_results(losses))

    return run


def step_of_fit(layers: int) -> Callable[[np.ndarray, np.ndarray], None]:
    with tf.distribute.MirroredStrategy().scope():
        model = small_model(layers)
        model.compile(optimizer="adam", loss="mse")

    def run(x: np.ndarray, y: np.ndarray) -> None:
        model.train_on_batch(x, y)

    return run


if __name__ == "__main__":
    main()
