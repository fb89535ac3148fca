"""`tf.distribute.experimental`."""

from __future__ import annotations

from unison.collectives import CommunicationImplementation, CommunicationOptions
from unison.strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    ValueContext,
)
from unison.tf.missing import names_missing_from

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]

#: The older name.
CollectiveCommunication = CommunicationImplementation

NO_PARAMETER_SERVERS = (
    "MirroredStrategy, and MultiWorkerMirroredStrategy on one worker, keep a copy of each "
    "variable on each device"
)
ON_TPUS = "MirroredStrategy() trains on all accelerators of this machine, TPUs included"
_KERAS_BACKUP = "use keras.callbacks.BackupAndRestore, and restart the program"

__getattr__ = names_missing_from(
    __name__,
    {
        "ParameterServerStrategy": NO_PARAMETER_SERVERS,
        "PreemptionCheckpointHandler": _KERAS_BACKUP,
        "PreemptionWatcher": _KERAS_BACKUP,
        "TPUStrategy": ON_TPUS,
        "TerminationConfig": _KERAS_BACKUP,
        "coordinator": NO_PARAMETER_SERVERS,
        "partitioners": "variables are not divided: each device has a whole copy",
        "rpc": "use Ray actors (ray.remote)",
    },
)


def CollectiveHints(  # noqa: N802  # the name is TensorFlow's
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Returns `CommunicationOptions`. TF: `tf.distribute.experimental.CollectiveHints`."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)
