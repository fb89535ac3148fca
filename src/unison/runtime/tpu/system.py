"""The TPU that this process runs on: found, started, or said to be missing."""

from __future__ import annotations

import importlib.util

import jax

from unison.runtime import devices
from unison.runtime.cluster_resolvers import ClusterResolver, TPUClusterResolver
from unison.runtime.process_group import TIMEOUT, join_cluster
from unison.runtime.tpu.slices import describe_slice
from unison.runtime.tpu.topology import Topology, topology_of


class NoTPUError(RuntimeError):
    """This process has no TPU."""


def connect(resolver: ClusterResolver, timeout: float = TIMEOUT) -> None:
    """Makes this process one of those of its slice, and waits for the others.

    Of a slice of one machine, and where a step is only planned, there are no others.

    Args:
        resolver: Names the machines.
        timeout: Seconds to wait.

    Raises:
        RuntimeError: JAX has started already.
        UnavailableError: The others did not come.
    """
    if not devices.planned_devices():
        join_cluster(resolver.cluster_spec(), resolver.task_type, resolver.task_id, timeout)


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Starts the TPU, joining the machines of its slice, and tells where its cores are.

    Args:
        cluster_resolver: Names the TPU. Default: a `TPUClusterResolver`.

    Raises:
        NoTPUError: There is none here; the message says how to compile for one.

    TF: `tf.tpu.experimental.initialize_tpu_system`.
    """
    return topology_of(tpu_devices(cluster_resolver))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Forgets compiled programs. The TPU itself is given back when the process ends.

    Args:
        cluster_resolver: Names the TPU: this process's own, or one that is not there.

    Raises:
        NoTPUError: There is none here.

    TF: `tf.tpu.experimental.shutdown_tpu_system`.
    """
    tpu_devices(cluster_resolver)
    jax.clear_caches()


def tpu_devices(cluster_resolver: ClusterResolver | None = None) -> list[jax.Device]:
    """Returns the TPU cores that a resolver names, those of a machine together.

    Raises:
        NoTPUError: There is no TPU here.
    """
    planned = devices.planned_devices()
    if planned:
        return list(planned)
    resolver = TPUClusterResolver() if cluster_resolver is None else cluster_resolver
    connect(resolver)
    devices.prepare_backend()
    cores = _attached_cores()
    if not cores:
        raise _no_tpu(resolver)
    if getattr(resolver, "is_local", False):
        cores = [core for core in cores if core.process_index == jax.process_index()]
    return sorted(cores, key=lambda core: (core.process_index, core.id))


def devices_of_topology(topology: str) -> list[jax.Device]:
    """Returns devices to compile for: a slice's, or those of the target that is planned instead.

    Args:
        topology: The slice's name.

    Raises:
        UnknownSliceError: There is no such slice; the message lists those that there are.
        MissingTPULibraryError: libtpu, which compiles for TPUs, is not installed.
    """
    return list(devices.planned_devices() or describe_slice(topology).devices)


def _attached_cores() -> list[jax.Device]:
    try:
        return list(jax.devices("tpu"))
    except RuntimeError:  # there is no such backend
        return []


def _no_tpu(resolver: ClusterResolver) -> NoTPUError:
    there = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    library = "" if importlib.util.find_spec("libtpu") else " (first: pip install 'unison[tpu]')"
    return NoTPUError(
        f"Expected a TPU on this machine for {resolver!r}. Received: a process whose devices are "
        f"of the kind {there!r}. To train on a TPU, start this program on a Cloud TPU VM where "
        "unison[tpu] is installed. To compile it for one from here, and see the memory and the "
        "communication of its step, run `unison plan --target v5e:2x4 SCRIPT`, or make the "
        f'strategy as TPUStrategy(topology="v5e:2x4"){library}. To train on what is here, use '
        "MirroredStrategy()."
    )
