"""`tf.DeviceSpec`: the parts of a device's name, some of which may be open."""

from __future__ import annotations

import dataclasses
from typing import Any

#: Kinds of devices that a name may begin with, as in "/GPU:0".
_TYPES = ("CPU", "GPU", "TPU", "CUSTOM")


@dataclasses.dataclass(frozen=True, repr=False)
class DeviceSpec:
    """The parts of a device's name; None: any.

    Args:
        job: The job's name.
        replica: The index of the replica; 0 in the names of devices.
        task: The index of the job's task.
        device_type: "CPU", "GPU" or "TPU".
        device_index: The index of the device in its task.

    Examples:
        >>> spec = DeviceSpec(job="worker", task=1, device_type="GPU")
        >>> spec.to_string()
        '/job:worker/task:1/device:GPU:*'
        >>> spec.replace(device_index=2) == DeviceSpec.from_string("/job:worker/task:1/GPU:2")
        True

    TF: `tf.DeviceSpec`.
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    def __post_init__(self) -> None:
        for name in ("replica", "task", "device_index"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))
        for name in ("job", "device_type"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else str(value))
        if self.device_type is not None:
            object.__setattr__(self, "device_type", self.device_type.upper())

    @classmethod
    def from_string(cls, spec: str) -> DeviceSpec:
        """Returns the parts of a name such as "/job:ps/replica:0/task:1/device:CPU:0".

        Raises:
            ValueError: It has a part that names of devices do not have, or two devices.
        """
        parts: dict[str, Any] = {}
        for part in filter(None, (spec or "").split("/")):
            match part.split(":"):
                case [("job" | "replica" | "task") as name, value]:
                    parts[name] = value
                case ["device", kind, index]:
                    _add_device(parts, kind, index, spec)
                case [kind, index] if kind.upper() in _TYPES:
                    _add_device(parts, kind, index, spec)
                case [kind] if kind.upper() in _TYPES:
                    _add_device(parts, kind, "*", spec)
                case _:
                    raise ValueError(
                        f"Expected the parts job, replica, task and device. Received: {part!r} in "
                        f"{spec!r}"
                    )
        return cls(**parts)

    def parse_from_string(self, spec: str) -> DeviceSpec:
        """Returns `from_string(spec)`; this one does not change."""
        return self.from_string(spec)

    def make_merged_spec(self, dev: DeviceSpec) -> DeviceSpec:
        """Returns the parts of `dev`, and of this one those that `dev` leaves open."""
        given = {name: value for name, value in vars(dev).items() if value is not None}
        return self.replace(**given)

    def replace(self, **parts: Any) -> DeviceSpec:
        """Returns a spec with other parts."""
        return dataclasses.replace(self, **parts)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"<DeviceSpec({parts})>"

    def to_string(self) -> str:
        """Returns the name of the device."""
        named = [(name, getattr(self, name)) for name in ("job", "replica", "task")]
        text = "".join(f"/{name}:{value}" for name, value in named if value is not None)
        if self.device_type is None:
            return text
        index = "*" if self.device_index is None else self.device_index
        return f"{text}/device:{self.device_type}:{index}"


def _add_device(parts: dict[str, Any], kind: str, index: str, spec: str) -> None:
    if "device_type" in parts:
        raise ValueError(f"Expected one device in the name. Received: {spec!r}")
    parts["device_type"] = kind
    parts["device_index"] = None if index == "*" else index
