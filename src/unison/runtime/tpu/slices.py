"""TPU slices by name, described by libtpu, with or without a TPU on this machine.

A slice is a block of chips, such as `"v5e:2x4"`. From its name libtpu creates devices that programs
can be compiled for, but not run on: `unison.runtime.planned` uses them.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import math
from typing import Any, NamedTuple

import jax

from unison.runtime.environment import environment

_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
_LARGE_CUBES = ("8x16x16", "16x16x16")

#: The shapes of the slices that Google Cloud offers, by generation. v4 is missing: a chip appears
#: as one device, but libtpu describes it as two.
SHAPES = {
    "v2": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
    "v5e": _SQUARES,
    "v5p": (*_CUBES, *_LARGE_CUBES),
    "v6e": _SQUARES,
    "tpu7x": (*_CUBES, *_LARGE_CUBES),
}

#: Most machines have four chips; a smaller slice is a single machine.
_CHIPS_OF_A_MACHINE = (2, 2, 1)

#: Environment variables for libtpu on a machine without a TPU: settings that it would otherwise
#: request over the network, or whose absence it would log to standard error and to files; and one
#: that keeps it from locking a TPU.
WITHOUT_A_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
}


class MissingTPULibraryError(ImportError):
    """The library that compiles for TPUs is not installed."""


class UnknownSliceError(ValueError):
    """No TPU slice has this name."""


class TPUSlice(NamedTuple):
    """A TPU slice that programs can be compiled for.

    Attributes:
        name: The generation and the chips along each axis: `"v5e:2x4"`.
        devices: Its devices in the order of their machines. They cannot run programs.
    """

    name: str
    devices: tuple[jax.Device, ...]

    @property
    def generation(self) -> str:
        return self.name.partition(":")[0]

    @property
    def num_chips(self) -> int:
        """The number of chips; in some generations, a chip is two devices."""
        return math.prod(_shape_of(self.name))

    @property
    def num_machines(self) -> int:
        return 1 + max(device.process_index for device in self.devices)


class Described(NamedTuple):
    """The target that a described device belongs to.

    Attributes:
        name: The slice, or the cluster: `"v5e:2x4"`.
        platform: The platform of its devices: `"tpu"`, `"gpu"` or `"cpu"`. CPUs stand for GPUs.
        devices: All its devices.
    """

    name: str
    platform: str
    devices: tuple[jax.Device, ...]


#: The targets, by described device.
_described: dict[jax.Device, Described] = {}


@functools.cache
def describe_slice(name: str) -> TPUSlice:
    """Returns the slice with a name.

    Args:
        name: A generation and a shape: `"v5e:2x4"`.

    Raises:
        UnknownSliceError: There is no such slice; the message lists the known ones.
        MissingTPULibraryError: libtpu is not installed.
    """
    _check_name(name)
    if importlib.util.find_spec("libtpu") is None:
        raise MissingTPULibraryError(
            f"Compiling for TPU slice {name!r} needs libtpu, which is not installed. "
            "Install the extra: pip install 'unison[tpu]' (Linux on x86_64 only)."
        )
    from jax.experimental import topologies

    shape = _shape_of(name)
    bounds = _CHIPS_OF_A_MACHINE
    if any(chips % bound for chips, bound in zip(shape, bounds, strict=True)):
        bounds = shape
    with environment(WITHOUT_A_TPU):
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=list(bounds)
        )
    described_devices: list[Any] = described.devices
    devices = sorted(described_devices, key=lambda device: (device.process_index, device.id))
    remember_described(Described(name, "tpu", tuple(devices)))
    return TPUSlice(name, tuple(devices))


def remember_described(described: Described) -> None:
    """Registers a described target, so that `description_of` finds it by its devices."""
    _described.update(dict.fromkeys(described.devices, described))


def description_of(device: jax.Device) -> Described | None:
    """Returns the target of a described device; None for a real device."""
    return _described.get(device)


def _check_name(name: str) -> None:
    known = [f"{kind}:{shape}" for kind, shapes in SHAPES.items() for shape in shapes]
    if name in known:
        return
    listed = "; ".join(f"{kind}: {', '.join(shapes)}" for kind, shapes in SHAPES.items())
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownSliceError(
        f'Expected a TPU slice as "generation:shape", such as "v5e:2x4". Received: {name!r}.{hint} '
        f"The shapes of each generation are: {listed}."
    )


def _shape_of(name: str) -> tuple[int, int, int]:
    """Returns the chips along the three axes; a two-dimensional slice has one along the third."""
    x, y, *z = (int(size) for size in name.partition(":")[2].split("x"))
    return (x, y, z[0] if z else 1)
