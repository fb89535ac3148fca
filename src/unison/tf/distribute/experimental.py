"""`tf.distribute.experimental`."""

from __future__ import annotations

from unison.collectives import CommunicationImplementation, CommunicationOptions
from unison.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ParameterServerStrategy,
    Partitioner,
)
from unison.runtime.cluster_resolvers import ClusterResolver
from unison.runtime.tpu.topology import DeviceAssignment
from unison.strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    ValueContext,
)
from unison.strategies import TPUStrategy as _TPUStrategy
from unison.tf.distribute import coordinator
from unison.tf.missing import names_missing_from, namespace
from unison.train import PreemptionCheckpointHandler, TerminationConfig

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]

partitioners = namespace(
    f"{__name__}.partitioners",
    FixedShardsPartitioner=FixedShardsPartitioner,
    MaxSizePartitioner=MaxSizePartitioner,
    MinSizePartitioner=MinSizePartitioner,
    Partitioner=Partitioner,
)

#: The older name.
CollectiveCommunication = CommunicationImplementation

_HANDLER = "PreemptionCheckpointHandler learns by SIGTERM or a function of yours"

__getattr__ = names_missing_from(
    __name__,
    {
        "PreemptionWatcher": _HANDLER,
        "rpc": "use Ray actors (ray.remote)",
    },
)


def TPUStrategy(  # noqa: N802  # the name is TensorFlow's
    tpu_cluster_resolver: ClusterResolver | None = None,
    device_assignment: DeviceAssignment | None = None,
) -> _TPUStrategy:
    """Returns a `TPUStrategy`. TF: `tf.distribute.experimental.TPUStrategy`."""
    return _TPUStrategy(tpu_cluster_resolver, device_assignment)


def CollectiveHints(  # noqa: N802  # the name is TensorFlow's
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Returns `CommunicationOptions`. TF: `tf.distribute.experimental.CollectiveHints`."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)
