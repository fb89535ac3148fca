"""Unison: `Checkpoint.write`, as it is, asynchronous, and in Orbax's format."""

from __future__ import annotations

import jax

import unison
from benchmarks.contestants.checkpoints import Saving, arrays
from benchmarks.workloads import CheckpointWork
from unison.train import Checkpoint, CheckpointOptions


def at_once(work: CheckpointWork) -> Saving:
    return _build(work, CheckpointOptions())


def asynchronous(work: CheckpointWork) -> Saving:
    return _build(work, CheckpointOptions(enable_async=True))


def in_parts(work: CheckpointWork) -> Saving:
    return _build(work, CheckpointOptions(enable_async=True), "orbax")


def _build(work: CheckpointWork, options: CheckpointOptions, format: str = "archive") -> Saving:
    strategy = unison.OneDeviceStrategy(f"{work.device}:0")
    with strategy.scope():
        state = [unison.Variable(array) for array in arrays(work)]
    checkpoint = Checkpoint(format=format, state=state)

    def decay() -> None:
        for variable in state:
            variable.assign_sub(variable * 1e-4)

    def step() -> None:
        strategy.run(decay)
        jax.block_until_ready([variable.cell.stored() for variable in state])

    return Saving(
        work,
        f"unison {options.is_async} {format}",
        step,
        save=lambda path: checkpoint.write(path, options),
        wait=checkpoint.sync,
        versions={"jax": jax.__version__, "unison": unison.__version__},
    )
