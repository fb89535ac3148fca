"""The steps of `fit` and of `run` beside an expert's: `python -m benchmarks.compiled_steps`.

All are compiled for devices that are not here, by XLA's compiler for them; nothing runs. What is
compared is what the device will do: memory, kernels, and the bytes in collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from benchmarks import by_hand
from benchmarks.networks import NAMES, Batch, Network, network
from unison.planning import StepPlan, gpu_compiler, plan_fit, plan_run, target
from unison.planning.collectives import collectives_of
from unison.planning.kernels import kernels_of
from unison.planning.overlap import hidden_share, overlaps_of
from unison.planning.step import described_target

TARGETS = ("h100:8", "h100:4x8", "v5e:2x4")

#: Where `make test` installs XLA's GPU compiler.
GPU_COMPILER = os.path.join(sys.prefix, "gpu-compiler")


class CompiledStep(NamedTuple):
    """What a compiled step does on each device.

    Attributes:
        temporaries: Bytes.
        aliased: Bytes of the results that are written where arguments were.
        collectives: Bytes that collectives combine.
        kernels: How many the device launches.
        hidden: The share of the collectives' bytes that has work to hide behind; None where
            collectives have no start and end.
        hlo: The program.
    """

    temporaries: int
    aliased: int
    collectives: int
    kernels: int
    hidden: float | None
    hlo: str

    @classmethod
    def of(cls, hlo: str, temporaries: int, aliased: int) -> Self:
        summed = sum(one.bytes * one.runs for one in collectives_of(hlo))
        hidden = hidden_share(overlaps_of(hlo))
        return cls(temporaries, aliased, summed, kernels_of(hlo), hidden, hlo)


def step_of_fit(network: Network, name: str) -> CompiledStep:
    """Returns the step of `fit` on a target."""
    import keras

    import unison

    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(network.POLICY)
    try:
        with target(name):
            strategy = unison.MirroredStrategy()
            with strategy.scope():
                model = network.model()
                model.compile(_optimizer(network.OPTIMIZER), network.loss())
            batch = network.batch(strategy.num_replicas_in_sync * network.EXAMPLES)
            plan = plan_fit(model, batch.x, batch.y, thorough=True)
    finally:
        keras.config.set_dtype_policy(policy)
    return _of_plan(plan)


def step_of_run(network: Network, name: str) -> CompiledStep:
    """Returns the step of a loop of one's own, by `strategy.run`, on a target."""
    import unison

    with target(name):
        strategy = unison.MirroredStrategy()
        with strategy.scope():
            weights = by_hand.of_shapes(lambda shape: _variable(shape, True), network.parameters())
            statistics = by_hand.of_shapes(
                lambda shape: _variable(shape, False), network.statistics()
            )
            optimizer = _own_optimizer(network.OPTIMIZER)
        count = strategy.num_replicas_in_sync

        def step(batch: Batch) -> Any:
            def loss(weights: Any) -> Any:
                old = jax.tree.map(lambda variable: variable.value(), statistics)
                losses, new = network.forward(weights, old, batch)
                return jnp.sum(losses) / (losses.size * count), new

            values = jax.tree.map(lambda variable: variable.value(), weights)
            (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(values)
            optimizer.apply(jax.tree.leaves(gradients), jax.tree.leaves(weights))
            jax.tree.map(lambda variable, value: variable.assign(value), statistics, new)
            return value

        batch = Batch(
            *(unison.PerReplica([part] * count) for part in network.batch(network.EXAMPLES))
        )
        plan = plan_run(strategy, step, [batch], thorough=True)
    return _of_plan(plan)


def _variable(shape: Sequence[int], is_trained: bool) -> Any:
    import unison

    if is_trained:
        return unison.Variable(jnp.zeros(shape))
    return unison.Variable(
        jnp.zeros(shape),
        trainable=False,
        synchronization=unison.VariableSynchronization.ON_READ,
        aggregation=unison.VariableAggregation.MEAN,
    )


def _own_optimizer(name: str) -> Any:
    import unison

    optimizers = {
        "sgd": lambda: unison.train.GradientDescent(0.01),
        "momentum": lambda: unison.train.Momentum(0.01, 0.9),
        "adam": lambda: unison.train.Adam(0.01),
    }
    return optimizers[name]()


def _of_plan(plan: StepPlan) -> CompiledStep:
    state = sum(plan.memory.state.values())
    return CompiledStep.of(plan.hlo, plan.memory.temporaries, state - plan.memory.results)


def _optimizer(name: str) -> Any:
    import keras

    if name == "adam":
        return keras.optimizers.Adam(0.01)
    return keras.optimizers.SGD(0.01, momentum=0.9 if name == "momentum" else 0.0)


def step_by_hand(network: Network, name: str) -> CompiledStep:
    """Returns the step that an expert writes."""
    devices = described_target(name)
    options = gpu_compiler.options() if devices[0].platform == "gpu" else None
    compiled = by_hand.lowered_step(network, devices).compile(options)
    memory: Any = compiled.memory_analysis()
    hlo = compiled.as_text() or ""
    return CompiledStep.of(hlo, memory.temp_size_in_bytes, memory.alias_size_in_bytes)


#: Whose steps are compared.
STEPS = {"fit": step_of_fit, "run": step_of_run, "by hand": step_by_hand}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled_steps", description=__doc__
    )
    add = parser.add_argument
    add("--network", action="append", choices=NAMES, help="only this one (repeatable)")
    add("--target", action="append", metavar="NAME", help=f"default: {', '.join(TARGETS)}")
    add("--hlo", type=pathlib.Path, metavar="FOLDER", help="write the programs there")
    add("--json", type=pathlib.Path, metavar="PATH", help="write the numbers there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault(gpu_compiler.VARIABLE, GPU_COMPILER)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    print("network      target     step     temporaries  collectives  kernels  hidden", flush=True)
    for name in options.network or NAMES:
        for where in options.target or TARGETS:
            for whose, step in STEPS.items():
                jax.clear_caches()
                compiled = step(network(name), where)
                print(_line(name, where, whose, compiled), flush=True)
                told = compiled._asdict()
                hlo = told.pop("hlo")
                found.setdefault(name, {}).setdefault(where, {})[whose] = told
                if options.hlo is not None:
                    options.hlo.mkdir(parents=True, exist_ok=True)
                    file = f"{name} {where} {whose}.hlo".replace(" ", "-").replace(":", "-")
                    (options.hlo / file).write_text(hlo)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


def _line(name: str, where: str, whose: str, step: CompiledStep) -> str:
    hidden = "" if step.hidden is None else f"{step.hidden:8.2f}"
    return (
        f"{name:<13}{where:<11}{whose:<9}{step.temporaries / 2**20:8.1f} MiB"
        f"{step.collectives / 2**20:9.2f} MiB{step.kernels:9d}{hidden}"
    )


if __name__ == "__main__":
    sys.exit(main())
