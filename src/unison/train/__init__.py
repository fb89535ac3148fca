"""Saving the state of a program and bringing it back, and optimizers."""

from unison.train.checkpoint import Checkpoint
from unison.train.compression import compressed, compression_report, with_compression
from unison.train.latest import CheckpointState, get_checkpoint_state, latest_checkpoint
from unison.train.manager import CheckpointManager
from unison.train.optimizers import (
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    GradientDescent,
    Momentum,
    Optimizer,
    RMSProp,
    aggregated,
    with_aggregation,
)
from unison.train.options import CheckpointOptions
from unison.train.preemption import PreemptionCheckpointHandler, TerminationConfig
from unison.train.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
from unison.train.watching import checkpoints_iterator
from unison.train.weights import load_weights, save_weights

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointState",
    "Ftrl",
    "GradientDescent",
    "Momentum",
    "Optimizer",
    "PreemptionCheckpointHandler",
    "RMSProp",
    "TerminationConfig",
    "aggregated",
    "checkpoints_iterator",
    "compressed",
    "compression_report",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
    "load_weights",
    "save_weights",
    "with_aggregation",
    "with_compression",
]
