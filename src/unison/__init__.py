"""Unison: TensorFlow's distribution system on JAX.

Strategies run one program on several replicas; variables know how their copies relate; Keras
models built in a strategy's scope train on all of its devices. `unison.tf` is the drop-in face
for tf.distribute programs.

Importing this package starts no backend and changes nothing in another library.
"""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from unison import (
    compression,
    elastic,
    monitoring,
    parameter_server,
    profiling,
    saving,
    testing,
    train,
)
from unison.cells import VariableAggregation, VariableSynchronization
from unison.collectives import (
    AggregationMethod,
    CommunicationOptions,
    ReduceOp,
    aggregate,
    all_gather,
    all_reduce,
    broadcast,
    reduce,
)
from unison.data.dataset import when_made
from unison.functions import Function
from unison.module import Module
from unison.parameter_server import ParameterServerStrategy
from unison.runtime import logs
from unison.runtime.devices import set_logical_cpu_devices
from unison.runtime.elastic import is_elastic_worker
from unison.runtime.launching.functions import watch_by
from unison.slices import IndexedSlices
from unison.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    ModelParallelStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ReplicaContext,
    Strategy,
    TPUStrategy,
    ValueContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from unison.strategies.base import observe_scopes
from unison.strategies.keras_additions import when_keras_is_imported
from unison.strategies.observing import strategy_observers
from unison.values import Mirrored, PerReplica
from unison.variables import Variable

__version__ = "0.1.0"

__all__ = [
    "AggregationMethod",
    "CentralStorageStrategy",
    "CommunicationOptions",
    "Function",
    "IndexedSlices",
    "Mirrored",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "Module",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "TPUStrategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "aggregate",
    "all_gather",
    "all_reduce",
    "broadcast",
    "compression",
    "elastic",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "monitoring",
    "parameter_server",
    "profiling",
    "reduce",
    "saving",
    "set_logical_cpu_devices",
    "testing",
    "train",
]


class _KerasOnDemand:
    """Brings in `unison.keras` with the first scope of a program that uses Keras."""

    def opened(self) -> None:
        if "keras" in sys.modules:
            importlib.import_module("unison.keras")

    def closed(self) -> None:
        fails_anyway = sys.exc_info()[0] is not None
        if "keras" in sys.modules and "unison.keras" not in sys.modules and not fails_anyway:
            raise RuntimeError(
                "Keras was imported for the first time inside strategy.scope(), too late for the "
                "strategy to see what was built there. Import keras before the scope is entered."
            )


def _add_to_keras() -> None:
    """Brings backups, whole files and elastic loops to Keras, once `unison.keras` is there."""
    importlib.import_module("unison.train.keras_backup")
    importlib.import_module("unison.saving.keras_files")
    if is_elastic_worker():
        importlib.import_module("unison.train.keras_elastic")


def _let_keras_take_datasets() -> None:
    """Brings in Keras' loops over datasets, with the first dataset of a program that uses Keras."""
    backend = getattr(sys.modules.get("keras"), "backend", None)
    if backend is not None and backend.backend() == "jax":
        when_made.remove(_let_keras_take_datasets)
        importlib.import_module("unison.keras.datasets").teach_keras()


def _watched(program: str, kind: str, workers: Sequence[str]) -> Any:
    """Lets others watch a job; what that takes is imported then."""
    launcher = importlib.import_module("unison.monitoring.launcher")
    return launcher.Monitored(program, kind, workers)


with contextlib.suppress(ValueError):  # who makes a strategy or gives a command is told
    logs.show_what_is_asked_for()
watch_by(_watched)
observe_scopes(_KerasOnDemand())
when_keras_is_imported(_add_to_keras)
when_made.append(_let_keras_take_datasets)
strategy_observers.append(monitoring.start_if_asked)
