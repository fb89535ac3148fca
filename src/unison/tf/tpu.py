"""`tf.tpu`: starting a TPU, and which of its cores compute which replica."""

from __future__ import annotations

import jax

from unison.runtime.cluster_resolvers import ClusterResolver, TPUClusterResolver
from unison.runtime.tpu.system import tpu_devices
from unison.runtime.tpu.topology import DeviceAssignment, Topology, topology_of
from unison.tf.missing import names_missing_from, namespace

__getattr__ = names_missing_from(__name__)


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Starts the TPU, joining the machines of its slice, and returns where its cores are.

    Args:
        cluster_resolver: Names the TPU. Default: a `TPUClusterResolver`.

    Raises:
        NoTPUError: There is no TPU; the message explains how to compile for one.

    TF: `tf.tpu.experimental.initialize_tpu_system`.
    """
    return topology_of(tpu_devices(cluster_resolver or TPUClusterResolver()))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Forgets compiled programs. The TPU itself is given back when the process ends.

    Args:
        cluster_resolver: Names the TPU. Default: a `TPUClusterResolver`.

    Raises:
        NoTPUError: There is no TPU here.

    TF: `tf.tpu.experimental.shutdown_tpu_system`.
    """
    tpu_devices(cluster_resolver or TPUClusterResolver())
    jax.clear_caches()


experimental = namespace(
    "unison.tf.tpu.experimental",
    DeviceAssignment=DeviceAssignment,
    Topology=Topology,
    initialize_tpu_system=initialize_tpu_system,
    shutdown_tpu_system=shutdown_tpu_system,
)
