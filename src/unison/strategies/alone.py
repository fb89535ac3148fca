"""Refuses to train alone in a process of a multi-process job, unless that is requested.

Otherwise each process would train its own copy of the model on all of the data, and all would write
to the same checkpoint.
"""

from __future__ import annotations

import os

import jax

from unison.runtime import process_group
from unison.runtime.cluster_resolvers.launchers import Launch, launched_among_others
from unison.runtime.cluster_resolvers.ray_train import ray_train_launch
from unison.runtime.elastic.environment import VARIABLE as ELASTIC
from unison.runtime.private_jax import initialized_processes

#: The environment variable that makes this process train alone, however it was started.
VARIABLE = "UNISON_ALONE"


def require_no_others(strategy: str) -> None:
    """Raises an error in a process of a multi-process job, for a strategy that ignores the others.

    Call it after JAX has started. If this process has already joined the others, through another
    strategy, there is no error.

    Args:
        strategy: The name of its class.

    Raises:
        RuntimeError: There are other processes, and this one was not configured to train alone.
        ValueError: `UNISON_ALONE` is neither 0 nor 1.
    """
    if is_requested() or process_group.is_elastic() or process_group.has_joined():
        return
    launch = _launch()
    if launch is None:
        return
    raise RuntimeError(
        "Expected a strategy that trains with the other processes of this job. Received: "
        f"{strategy}, which ignores them, in {launch}. Each process would train a model of its "
        f"own. {_remedy(strategy)} If that is intended, as in a sweep, set "
        f"{VARIABLE}=1, or use OneDeviceStrategy."
    )


def _remedy(strategy: str) -> str:
    if strategy != "MultiWorkerMirroredStrategy":
        return (
            "Use MultiWorkerMirroredStrategy, which finds them, or start one process for all "
            "devices: unison run -n 1."
        )
    return (
        "What was found does not describe them: set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
        "JAX_PROCESS_ID for each process, describe them in TF_CONFIG or by a "
        "SimpleClusterResolver, or start the program by `unison run`."
    )


def is_requested() -> bool:
    """Returns whether `UNISON_ALONE` makes this process train alone.

    Raises:
        ValueError: It is neither 0 nor 1.
    """
    said = os.environ.get(VARIABLE, "0")
    if said not in ("", "0", "1"):
        raise ValueError(f"Expected 0 or 1 for the variable {VARIABLE}. Received: {said!r}")
    return said == "1"


def _launch() -> Launch | None:
    """Returns how this process was started as one of several; None if there is no sign of that."""
    initialized = initialized_processes()
    if initialized is not None and initialized[0] > 1:
        return Launch("jax.distributed.initialize", {}, *initialized)
    if ELASTIC in os.environ:
        return Launch("unison run --min-workers", {ELASTIC: os.environ[ELASTIC]})
    launch = ray_train_launch() or launched_among_others(os.environ)
    if launch is None and jax.process_count() > 1:  # the machines of a TPU slice
        launch = Launch("JAX's backend", {}, jax.process_count(), jax.process_index())
    return launch
