"""Collective operations inside a replica program."""

from unison.collectives.aggregation import aggregate
from unison.collectives.communication import (
    Communication,
    CommunicationImplementation,
    CommunicationOptions,
    communicating,
    options_in_scope,
)
from unison.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from unison.collectives.method import AggregationMethod
from unison.collectives.operations import (
    ReduceOp,
    adding_by,
    all_gather,
    all_reduce,
    broadcast,
    reduce,
    sum_over_replicas,
)
from unison.collectives.packing import all_reduce_packed

__all__ = [
    "AggregationMethod",
    "Communication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "adding_by",
    "aggregate",
    "all_gather",
    "all_reduce",
    "all_reduce_packed",
    "broadcast",
    "communicating",
    "options_in_scope",
    "reduce",
    "sum_over_replicas",
]
