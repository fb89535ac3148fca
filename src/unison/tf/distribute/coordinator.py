"""`tf.distribute.coordinator`."""

from unison.parameter_server import (
    ClusterCoordinator,
    RemoteValue,
    current_worker_index,
)
from unison.parameter_server import PerWorkerDataset as PerWorkerValues
from unison.tf.missing import names_missing_from

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = current_worker_index

__getattr__ = names_missing_from(__name__)
