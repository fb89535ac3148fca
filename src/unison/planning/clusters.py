"""Machines with devices that a step is planned for: from a name, or measured."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import jax

from unison.planning.calibration import Calibration
from unison.planning.hardware import (
    Device,
    Link,
    UnknownHardwareError,
    device_named,
    link_named,
    links_between,
    machine_of,
    names,
)
from unison.runtime.private_jax import described_cpus
from unison.runtime.tpu.slices import SHAPES, TPUSlice, describe_slice, remember_described

#: What the devices of a measured cluster are called in the name of a target.
MEASURED = "cpu"

#: The clusters of which devices were described, by name, and those devices.
_described: dict[str, tuple[Cluster, list[jax.Device]]] = {}

_NAME = re.compile(r"(?P<device>[\w.]+):(?:(?P<machines>\d+)x)?(?P<devices>\d+)")


class Cluster(NamedTuple):
    """Machines of the same devices.

    Attributes:
        name: `"h100:4x8"`.
        device: What computes a replica.
        machines: How many there are.
        per_machine: Devices of each.
        inside: The link between devices of a machine, which each has.
        network: The link between machines, which the devices of a machine share.
        cores: Of CPUs, the cores that the devices of a machine share; None if each has its own.
    """

    name: str
    device: Device
    machines: int
    per_machine: int
    inside: Link
    network: Link
    cores: int | None = None

    @property
    def num_devices(self) -> int:
        return self.machines * self.per_machine

    @property
    def slowest_rate(self) -> float:
        """Bytes per second of the slowest link between its devices; infinite for one alone."""
        rates = [self.inside.rate] * (self.per_machine > 1)
        rates += [self.network.rate] * (self.machines > 1)
        return min(rates, default=math.inf)

    def of(self, num_devices: int) -> Cluster:
        """Returns the part with so many devices: whole machines, or one with fewer."""
        per_machine = min(num_devices, self.per_machine)
        return self._replace(machines=-(-num_devices // per_machine), per_machine=per_machine)

    def sizes(self) -> list[int]:
        """Returns numbers of devices at which to look: powers of two and machines, up to all."""
        counts = {2**power for power in range(self.num_devices.bit_length())}
        whole = {n for n in counts if n <= self.per_machine or n % self.per_machine == 0}
        return sorted({n for n in whole if n <= self.num_devices} | {self.num_devices})


def cluster_named(
    name: str, network: str | None = None, calibration: Calibration | None = None
) -> Cluster:
    """Returns the cluster of a name.

    Args:
        name: A device, and how many: `"h100:8"` is one machine of 8, `"h100:4x8"` are 4 of them.
            `"cpu:..."` are processes on machines such as the one that was measured.
        network: The link between machines, by its name in `hardware.toml`. Default: the one that
            such machines mostly have.
        calibration: What was measured, for `"cpu:..."`.

    Raises:
        UnknownHardwareError: There is no such device or link, or the name has another form; the
            message lists those that there are.

    Examples:
        >>> cluster = cluster_named("h100:4x8")
        >>> cluster.num_devices, cluster.inside.name, cluster.network.name
        (32, 'nvlink4', 'infiniband-8x400g')
    """
    found = _NAME.fullmatch(name)
    known = names("devices", "gpu")
    if found is None or found["device"] not in (*known, MEASURED):
        slices = "; ".join(f"{kind}: {', '.join(shapes)}" for kind, shapes in SHAPES.items())
        raise UnknownHardwareError(
            'Expected a target as "device:count" or "device:machines x devices", such as "h100:8" '
            f'or "h100:4x8", with a device of {", ".join([*known, MEASURED])}; or a TPU slice '
            f"({slices}). Received: {name!r}."
        )
    machines, devices = int(found["machines"] or 1), int(found["devices"])
    if not machines * devices:
        raise UnknownHardwareError(f"Expected one device or more. Received: {name!r}.")
    if found["device"] == MEASURED:
        if calibration is None:
            raise UnknownHardwareError(
                f"Expected what was measured on a machine, to plan for {name!r}. Received: no "
                "calibration. Measure with `unison plan --calibrate FILE`, and give the file as "
                "--calibration FILE."
            )
        link = calibration.link if network is None else link_named(network)
        return Cluster(
            name, calibration.device, machines, devices, calibration.link, link, calibration.cores
        )
    _, inside, usual_network = machine_of(found["device"])
    return Cluster(
        name,
        device_named(found["device"]),
        machines,
        devices,
        link_named(inside),
        link_named(network or usual_network),
    )


def cluster_of_slice(described: TPUSlice) -> Cluster:
    """Returns a TPU slice as a cluster: one machine, since its links do not end at machines."""
    link = links_between(described.generation)
    device = device_named(described.generation)
    return Cluster(described.name, device, 1, len(described.devices), link, link)


def described_devices(cluster: Cluster) -> list[jax.Device]:
    """Returns devices to compile for in the place of a cluster's: CPUs, which do not run either."""
    known = _described.get(cluster.name)
    if known is None or known[0] != cluster:
        known = cluster, described_cpus(cluster.num_devices)
        remember_described(cluster.name, known[1])
        _described[cluster.name] = known
    return known[1]


def cluster_of_target(target: str) -> Cluster:
    """Returns the cluster or the TPU slice of a target whose devices were described."""
    known = _described.get(target)
    return cluster_of_slice(describe_slice(target)) if known is None else known[0]
