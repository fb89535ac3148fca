"""Strategies and the contexts that say where a thread is."""

from unison.strategies.base import Strategy, ValueContext
from unison.strategies.central_storage import CentralStorageStrategy
from unison.strategies.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from unison.strategies.mirrored import MirroredStrategy
from unison.strategies.model_parallel import ModelParallelStrategy
from unison.strategies.multi_worker import MultiWorkerMirroredStrategy
from unison.strategies.one_device import OneDeviceStrategy
from unison.strategies.tpu import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ReplicaContext",
    "Strategy",
    "TPUStrategy",
    "ValueContext",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
