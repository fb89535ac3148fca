"""Orbax: its asynchronous checkpointer, beside a step that reuses the state's memory."""

from __future__ import annotations

import importlib.metadata

import jax
import orbax.checkpoint as ocp

from benchmarks.contestants.checkpoints import Saving, arrays
from benchmarks.workloads import CheckpointWork


def build(work: CheckpointWork) -> Saving:
    state = [jax.numpy.array(array) for array in arrays(work)]
    decay = jax.jit(lambda state: [array - array * 1e-4 for array in state], donate_argnums=0)
    checkpointer = ocp.StandardCheckpointer()

    def step() -> None:
        state[:] = decay(state)
        jax.block_until_ready(state)

    return Saving(
        work,
        "orbax",
        step,
        save=lambda path: checkpointer.save(path, state),
        wait=checkpointer.wait_until_finished,
        versions={
            "jax": jax.__version__,
            "orbax": importlib.metadata.version("orbax-checkpoint"),
        },
    )
