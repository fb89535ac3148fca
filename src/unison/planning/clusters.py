"""Machines with devices that a step is planned for: from a name, or measured."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import jax

from unison.planning import gpu_compiler
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
from unison.runtime.tpu.slices import (
    SHAPES,
    Described,
    TPUSlice,
    describe_slice,
    description_of,
    remember_described,
)

#: The name of the devices of a measured cluster in a target.
MEASURED = "cpu"

#: The cluster of each described device.
_clusters: dict[jax.Device, Cluster] = {}

_NAME = re.compile(r"(?P<device>[\w.]+):(?:(?P<machines>\d+)x)?(?P<devices>\d+)")


class Cluster(NamedTuple):
    """Machines of the same devices.

    Attributes:
        name: `"h100:4x8"`.
        device: What computes a replica.
        machines: The number of machines.
        per_machine: Devices of each.
        inside: The link between devices of a machine, which each has.
        network: The link between machines, which the devices of a machine share.
        measured: For CPUs, the measurements of a machine, whose cores its devices share.
    """

    name: str
    device: Device
    machines: int
    per_machine: int
    inside: Link
    network: Link
    measured: Calibration | None = None

    @property
    def num_devices(self) -> int:
        return self.machines * self.per_machine

    @property
    def turns(self) -> float:
        """The number of devices that share a core: 1 unless there are fewer cores than devices."""
        return 1.0 if self.measured is None else self.measured.turns(self.per_machine)

    @property
    def sums_by_nccl(self) -> bool:
        """Whether its devices are GPUs, whose library for sums has options."""
        return self.device.name in names("devices", "gpu")

    @property
    def slowest_rate(self) -> float:
        """Bytes per second of the slowest link between its devices; infinite for one alone."""
        rates = [self.inside.rate] * (self.per_machine > 1)
        rates += [self.network.rate] * (self.machines > 1)
        return min(rates, default=math.inf)

    def of(self, num_devices: int) -> Cluster:
        """Returns the part with so many devices: whole machines, or one with fewer."""
        per_machine = min(num_devices, self.per_machine)
        part = self._replace(machines=-(-num_devices // per_machine), per_machine=per_machine)
        if self.measured is None:
            return part
        return part._replace(
            device=_part_of_machine(self.measured, per_machine),
            inside=self.measured.link_between(per_machine),
        )

    def of_replicas(self, cores: int) -> Cluster:
        """Returns one device of each replica of `cores` neighbours, with its part of the network.

        Each device sums its part of a replica's gradients with those of the other replicas, all at
        the same time.
        """
        together = min(cores, self.per_machine)
        per_machine = self.per_machine // together
        return self._replace(
            machines=self.num_devices // cores // per_machine,
            per_machine=per_machine,
            network=self.network._replace(rate=self.network.rate / together),
        )

    def sizes(self) -> list[int]:
        """Returns numbers of devices at which to look, up to all.

        Powers of two in a machine, then powers of two of machines.
        """
        powers = [2**power for power in range(self.num_devices.bit_length())]
        counts = {n for n in powers if n <= self.per_machine}
        counts |= {n * self.per_machine for n in powers if n <= self.machines}
        return sorted(counts | {self.num_devices})


def cluster_named(
    name: str, network: str | None = None, calibration: Calibration | None = None
) -> Cluster:
    """Returns the cluster of a name.

    Args:
        name: A device, and how many: `"h100:8"` is one machine of 8, `"h100:4x8"` are 4 of them,
            as is `"h100:32"`, since such machines mostly have 8. `"cpu:..."` are processes on
            machines such as the one that was measured.
        network: The link between machines, by its name in `hardware.toml`. Default: the one that
            such machines mostly have; machines that were measured have none.
        calibration: What was measured, for `"cpu:..."`.

    Raises:
        UnknownHardwareError: The device or link is unknown, or the name has another form; the
            message lists those that there are.

    Examples:
        >>> cluster = cluster_named("h100:32")
        >>> cluster.machines, cluster.inside.name, cluster.network.name
        (4, 'nvlink4', 'infiniband-8x400g')
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
                f"Planning for {name!r} needs a calibration of such a machine. Received: no "
                "calibration. Measure with `unison plan --calibrate FILE`, and give the file as "
                "--calibration FILE."
            )
        if machines > 1 and network is None:
            raise UnknownHardwareError(
                f"Planning for {name!r} needs the link between its machines: --network "
                f"LINK, one of {', '.join(names('links'))}. Received: none."
            )
        inside = calibration.link_between(devices)
        between = inside if network is None else link_named(network)
        device = _part_of_machine(calibration, devices)
        return Cluster(name, device, machines, devices, inside, between, calibration)
    usual_devices, usual_inside, usual_network = machine_of(found["device"])
    if found["machines"] is None and devices > usual_devices:
        machines, left = divmod(devices, usual_devices)
        if left:
            raise UnknownHardwareError(
                f"Expected whole machines, which mostly have {usual_devices} {found['device']}. "
                f"Received: {name!r}. Give the machines and the devices of each, such as "
                f'"{found["device"]}:{machines + 1}x{usual_devices}".'
            )
        devices = usual_devices
    return Cluster(
        name,
        device_named(found["device"]),
        machines,
        devices,
        link_named(usual_inside),
        link_named(network or usual_network),
    )


def cluster_of_slice(described: TPUSlice) -> Cluster:
    """Returns a TPU slice as a cluster: one machine, since its links do not end at machines."""
    link = links_between(described.generation)
    device = device_named(described.generation)
    return Cluster(described.name, device, 1, len(described.devices), link, link)


@functools.cache
def described_devices(cluster: Cluster) -> tuple[jax.Device, ...]:
    """Returns devices to compile for in the place of a cluster's, which do not run programs.

    Those of GPUs are GPUs if XLA's GPU compiler is installed (`gpu_compiler`), else CPUs.
    """
    found = None
    if cluster.measured is None:
        found = gpu_compiler.gpus(cluster.device.name, cluster.machines, cluster.per_machine)
    devices = tuple(described_cpus(cluster.num_devices) if found is None else found)
    platform = "gpu" if cluster.measured is None else "cpu"
    remember_described(Described(cluster.name, platform, devices))
    _clusters.update(dict.fromkeys(devices, cluster))
    return devices


def cluster_of(device: jax.Device) -> Cluster:
    """Returns the cluster or the TPU slice that a device was described with.

    Raises:
        UnknownHardwareError: It is part of a slice, and the rates of its devices are unknown.
    """
    described = description_of(device)
    assert described is not None
    known = _clusters.get(device)
    return cluster_of_slice(describe_slice(described.name)) if known is None else known


def _part_of_machine(measured: Calibration, processes: int) -> Device:
    """Returns the rates of each of a number of processes on a measured machine."""
    device = measured.device
    return device._replace(memory=device.memory / measured.turns(processes))
