"""`tf.compat.v1.train`: the optimizers, the global step, and the names of `tf.train`."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from unison.cells import VariableAggregation
from unison.strategies import Strategy, get_strategy
from unison.tf.compat.v1.optimizers import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    Optimizer,
    RMSPropOptimizer,
)
from unison.tf.missing import names_missing_from, public_names
from unison.tf.variables import Variable

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "create_global_step",
    "get_global_step",
    "get_or_create_global_step",
    "global_step",
]

_SCHEDULES = (
    "use a schedule of tf.keras.optimizers.schedules, as learning_rate=lambda: schedule(step)"
)

_missing = names_missing_from(
    __name__,
    {
        **dict.fromkeys(
            "cosine_decay cosine_decay_restarts exponential_decay inverse_time_decay "
            "natural_exp_decay piecewise_constant piecewise_constant_decay "
            "polynomial_decay".split(),
            _SCHEDULES,
        ),
        "MonitoredTrainingSession": "call strategy.run in a Python loop",
        "Saver": "use tf.train.Checkpoint and tf.train.CheckpointManager",
        "Server": "use tf.distribute.MultiWorkerMirroredStrategy, which connects the workers",
        "SyncReplicasOptimizer": "optimizers sum gradients over the replicas of a strategy",
    },
)


def __getattr__(name: str) -> Any:
    if name in public_names("tf.compat.v1.train") and name in public_names("tf.train"):
        return getattr(sys.modules["unison.tf"].train, name)
    return _missing(name)


#: Of every strategy that has one.
_global_steps: weakref.WeakKeyDictionary[Strategy, Variable] = weakref.WeakKeyDictionary()


def get_global_step(graph: None = None) -> Variable | None:
    """Returns the global step of the current strategy; None if it does not exist.

    TF: `tf.compat.v1.train.get_global_step`.
    """
    del graph
    return _global_steps.get(get_strategy())


def create_global_step(graph: None = None) -> Variable:
    """Creates the global step of the current strategy: an int64 variable that is 0.

    Raises:
        ValueError: It exists.

    TF: `tf.compat.v1.train.create_global_step`.
    """
    if get_global_step(graph) is not None:
        raise ValueError("The global step exists already: use get_or_create_global_step().")
    step = Variable(
        0,
        trainable=False,
        name="global_step",
        dtype=np.int64,
        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
    )
    _global_steps[get_strategy()] = step
    return step


def get_or_create_global_step(graph: None = None) -> Variable:
    """Returns the global step of the current strategy; creates it if it does not exist.

    TF: `tf.compat.v1.train.get_or_create_global_step`.
    """
    step = get_global_step(graph)
    return create_global_step(graph) if step is None else step


def global_step(sess: None, global_step_tensor: Any) -> int:
    """Returns the value of a global step. TF: `tf.compat.v1.train.global_step`."""
    del sess
    return int(global_step_tensor)
