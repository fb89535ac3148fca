"""The ways to name a device, and the `jax.Device`s that they stand for.

TensorFlow's device strings ("CPU:0", "/gpu:1", "/job:worker/replica:0/task:1/device:GPU:0"), a
`jax.Device`, an object with a TF-like `name` (`tf.config.LogicalDevice`), or a count of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax

from unison.runtime import devices as runtime_devices
from unison.runtime.devices import CPU_DEVICES_VARIABLE, DeviceCountError
from unison.runtime.tpu.slices import description_of


class NamedDevice(Protocol):
    """An object with a TF device name, such as `tf.config.LogicalDevice`."""

    @property
    def name(self) -> str: ...


DeviceLike: TypeAlias = str | jax.Device | NamedDevice


class UnknownDeviceError(ValueError):
    """A device name that does not match a device of this job."""


class ParsedDevice(NamedTuple):
    """The parts of a device string; `task` is None where the string names none."""

    job: str | None
    task: int | None
    device_type: str
    ordinal: int


_DEVICE_STRING = re.compile(
    r"(?:/job:(?P<job>[A-Za-z]\w*))?(?:/replica:0)?(?:/task:(?P<task>\d+))?"
    r"(?:/device:|/)?(?!(?:job|replica|task):)(?P<type>[A-Za-z]+)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)
_JOBS = (None, "localhost", "worker")
_PLATFORMS = {"CPU": "cpu", "GPU": "gpu", "TPU": "tpu"}
_TYPES = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "rocm": "GPU", "tpu": "TPU"}


def parse(name: str) -> ParsedDevice:
    """Parses a device string. Does not start a backend.

    Raises:
        UnknownDeviceError: it is not a device string.

    >>> parse("GPU")
    ParsedDevice(job=None, task=None, device_type='GPU', ordinal=0)
    >>> parse("/job:worker/replica:0/task:1/device:cpu:3")
    ParsedDevice(job='worker', task=1, device_type='CPU', ordinal=3)
    """
    match = _DEVICE_STRING.fullmatch(name.strip())
    if match is None:
        raise UnknownDeviceError(
            'Expected a device string such as "GPU:1", "/cpu:0" or '
            f'"/job:worker/replica:0/task:0/device:CPU:0". Received: {name!r}.'
        )
    task = match["task"]
    return ParsedDevice(
        job=match["job"] and match["job"].lower(),
        task=None if task is None else int(task),
        device_type=match["type"].upper(),
        ordinal=int(match["index"] or 0),
    )


def resolve(device: DeviceLike, *, soft: bool = False) -> jax.Device:
    """Returns the `jax.Device` that is meant. Prepares the backend first.

    A string without a task refers to this process; `/job:worker/task:1` means process 1 of the job.

    Args:
        device: a device string, a `jax.Device`, or an object whose `name` is a device string.
        soft: if the string does not name a device of this job, use this process's first CPU device
          (TF's soft device placement).

    Raises:
        UnknownDeviceError: no such device; the message lists the available ones.
        TypeError: `device` is none of these.
    """
    if isinstance(device, jax.Device):
        return device
    parsed = parse(_name_of(device))
    runtime_devices.prepare_backend()
    found = _find(parsed)
    if found is None and soft:
        found = jax.local_devices(backend="cpu")[0]
    if found is None:
        raise UnknownDeviceError(
            f"Expected one of the devices of this job: {_list_of_names()}. "
            f"Received: {_name_of(device)!r}. {_mend(parsed)}"
        )
    return found


def select_devices(
    devices: int | DeviceLike | Iterable[DeviceLike] | None = None,
) -> list[jax.Device]:
    """Returns the devices for a strategy, in the order asked for.

    Args:
        devices: None for all accelerators of this process, or all its logical CPU devices if it has
          none; an integer for that many of these; or one or several of what `resolve` accepts.

    Raises:
        DeviceCountError: a count below 1 or above the number of devices, no device, or one device
            twice.
        UnknownDeviceError, TypeError: see `resolve`.
    """
    if devices is None or runtime_devices.planned_devices():
        return runtime_devices.default_devices()
    if isinstance(devices, int):
        chosen = _first(devices)
    elif isinstance(devices, str | jax.Device) or hasattr(devices, "name"):
        chosen = [resolve(devices)]
    elif isinstance(devices, Iterable):
        chosen = [resolve(device) for device in devices]
    else:
        raise TypeError(
            f"Expected a count, a device or a list of devices. Received: {devices!r} (of type "
            f"{type(devices).__name__})."
        )
    _check_distinct(chosen, devices)
    return chosen


def canonical_name(device: jax.Device) -> str:
    """Returns TF's full name of a device.

    In a single process "/job:localhost/replica:0/task:0/device:CPU:0"; in a job of several
    processes "/job:worker/replica:0/task:<process>/device:<type>:<index in that process>".
    """
    described = description_of(device)
    if described is None:
        several = jax.process_count() > 1
        of_kind = _devices_of(device_type(device), device.process_index)
    else:
        every = described.devices
        several = len({core.process_index for core in every}) > 1
        of_kind = [core for core in every if core.process_index == device.process_index]
    job = "worker" if several else "localhost"
    index = of_kind.index(device)
    where = f"/job:{job}/replica:0/task:{device.process_index}"
    return f"{where}/device:{device_type(device)}:{index}"


def device_type(device: jax.Device) -> str:
    """Returns TF's name of a device's type: "CPU", "GPU" (CUDA and ROCm) or "TPU"."""
    described = description_of(device)
    platform = device.platform if described is None else described.platform
    return _TYPES.get(platform, platform.upper())


def _name_of(device: DeviceLike) -> str:
    name = device if isinstance(device, str) else getattr(device, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            'Expected a device string such as "GPU:0", a jax.Device or a LogicalDevice. '
            f"Received: {device!r} (of type {type(device).__name__})."
        )
    return name


def _mend(parsed: ParsedDevice) -> str:
    if parsed.device_type == "CPU":
        return (
            f"For more logical CPU devices start the program with "
            f"{CPU_DEVICES_VARIABLE}={parsed.ordinal + 1}, or call "
            f"set_logical_cpu_devices({parsed.ordinal + 1}) before the first JAX computation."
        )
    return (
        "Name one of these, or install JAX's plugin for the accelerator: "
        "pip install 'unison[cuda12]', or cuda13, rocm, tpu."
    )


def _find(parsed: ParsedDevice) -> jax.Device | None:
    if parsed.job not in _JOBS or (parsed.job == "localhost" and parsed.task):
        return None
    is_here = parsed.task is None or parsed.job == "localhost"
    process = jax.process_index() if is_here else parsed.task
    there = _devices_of(parsed.device_type, process)
    return there[parsed.ordinal] if parsed.ordinal < len(there) else None


def _devices_of(kind: str, process: int | None) -> list[jax.Device]:
    try:
        devices = jax.devices(_PLATFORMS.get(kind, kind.lower()))
    except RuntimeError:  # no such platform here
        return []
    return [device for device in devices if device.process_index == process]


def _list_of_names() -> str:
    everywhere = [
        device
        for kind in _PLATFORMS
        for process in range(jax.process_count())
        for device in _devices_of(kind, process)
    ]
    return ", ".join(map(canonical_name, everywhere))


def _first(count: int) -> list[jax.Device]:
    if isinstance(count, bool) or count < 1:
        raise DeviceCountError(f"Expected a number of devices, at least 1. Received: {count!r}.")
    there = runtime_devices.local_devices()
    if count > len(there):
        raise DeviceCountError(
            f"Expected at most {len(there)} devices, what this process has: "
            f"{', '.join(map(canonical_name, there))}. Received: {count}. For logical CPU devices "
            f"start the program with {CPU_DEVICES_VARIABLE}={count}, or call "
            f"set_logical_cpu_devices({count}) before the first JAX computation."
        )
    return there[:count]


def _check_distinct(chosen: Sequence[jax.Device], received: object) -> None:
    if not chosen:
        raise DeviceCountError(
            f"Expected at least one device. Received: {received!r}. Leave it out to take all."
        )
    twice = {canonical_name(device) for device in chosen if chosen.count(device) > 1}
    if twice:
        raise DeviceCountError(
            f"Expected every device once. Received: {', '.join(sorted(twice))} more than once in "
            f"{received!r}. Name each device once."
        )
