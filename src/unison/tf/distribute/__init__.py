"""`tf.distribute`: strategies, their contexts and what goes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from unison.collectives import ReduceOp
from unison.strategies import (
    MirroredStrategy,
    OneDeviceStrategy,
    ReplicaContext,
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from unison.strategies.base import StrategyExtended
from unison.tf.distribute import experimental
from unison.tf.distribute.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from unison.tf.missing import names_missing_from
from unison.values import DistributedValues

__all__ = [
    "CrossDeviceOps",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "experimental",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

_ON_ONE_MACHINE = "on one machine, MirroredStrategy() trains on all accelerators, TPUs included"

__getattr__ = names_missing_from(
    __name__,
    {
        "MultiWorkerMirroredStrategy": _ON_ONE_MACHINE,
        "ParameterServerStrategy": _ON_ONE_MACHINE,
        "TPUStrategy": _ON_ONE_MACHINE,
        "CentralStorageStrategy": "MirroredStrategy keeps a copy of each variable on each device",
        "DistributedDataset": (
            "strategy.experimental_distribute_dataset takes any iterable of batches"
        ),
    },
)


class RunOptions(NamedTuple):
    """Options of `strategy.run`; accepted, without effect: shapes may always differ.

    TF: `tf.distribute.RunOptions`.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
