"""`tf.tpu`: starting a TPU, and which of its cores compute which replica."""

from __future__ import annotations

from unison.runtime.tpu.system import initialize_tpu_system, shutdown_tpu_system
from unison.runtime.tpu.topology import DeviceAssignment, Topology
from unison.tf.missing import names_missing_from, namespace

__getattr__ = names_missing_from(__name__)

experimental = namespace(
    "unison.tf.tpu.experimental",
    DeviceAssignment=DeviceAssignment,
    Topology=Topology,
    initialize_tpu_system=initialize_tpu_system,
    shutdown_tpu_system=shutdown_tpu_system,
)
