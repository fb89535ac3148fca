"""The TPU that this process runs on: found, started, or reported as missing."""

from __future__ import annotations

import importlib.util

import jax

from unison.runtime import devices
from unison.runtime.cluster_resolvers.resolver import ClusterResolver
from unison.runtime.process_group import TIMEOUT, join_cluster
from unison.runtime.tpu.slices import describe_slice


class NoTPUError(RuntimeError):
    """This process has no TPU."""


def connect(resolver: ClusterResolver, timeout: float = TIMEOUT) -> None:
    """Joins this process to the others of its slice, and waits for them.

    Does nothing for a slice of a single machine, and if a step is only planned.

    Args:
        resolver: The resolver of the machines.
        timeout: Seconds to wait.

    Raises:
        RuntimeError: JAX's backend is already running.
        UnavailableError: Other processes did not join.
    """
    if not devices.planned_devices():
        join_cluster(resolver.cluster_spec(), resolver.task_type, resolver.task_id, timeout)


def tpu_devices(resolver: ClusterResolver) -> list[jax.Device]:
    """Starts the TPU of a resolver, and joins the machines of its slice.

    Returns:
        Its cores; those of a machine are contiguous.

    Raises:
        NoTPUError: This process has no TPU.
    """
    planned = devices.planned_devices()
    if planned:
        return list(planned)
    connect(resolver)
    devices.prepare_backend()
    cores = _attached_cores()
    if not cores:
        raise _no_tpu(resolver)
    if getattr(resolver, "is_local", False):
        cores = [core for core in cores if core.process_index == jax.process_index()]
    return sorted(cores, key=lambda core: (core.process_index, core.id))


def devices_of_topology(topology: str) -> list[jax.Device]:
    """Returns devices to compile for: a slice's, or those of the planned target instead.

    Args:
        topology: The slice's name.

    Raises:
        UnknownSliceError: There is no such slice; the message lists the known ones.
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
