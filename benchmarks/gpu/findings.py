"""What a check finds: rows of tables, notes, and what is wrong."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from benchmarks.processes import python_path

#: A cell of a table, as JSON has it.
Value = str | float | int | bool | None


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table; those with one title are one table.

    Attributes:
        table: The table's title.
        cells: The values by their columns' names.
    """

    table: str
    cells: dict[str, Value]


@dataclasses.dataclass(frozen=True)
class Note:
    """A sentence for the reader: what was left out, or what a number means."""

    text: str


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A sentence about a result that differs from what it must be: it makes the command fail."""

    text: str


Finding = Row | Note | Wrong

#: The table of the machine, each row of which is a name and a value, and its row of devices.
MACHINE, DEVICES = "Machine", "devices"


def to_json(finding: Finding) -> dict[str, Any]:
    return {"kind": type(finding).__name__, **dataclasses.asdict(finding)}


def from_json(fields: dict[str, Any]) -> Finding:
    fields = dict(fields)
    kinds: dict[str, type[Finding]] = {"Row": Row, "Note": Note, "Wrong": Wrong}
    return kinds[fields.pop("kind")](**fields)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the checks run on.

    Attributes:
        device: "gpu", or "cpu": logical CPU devices, on which the checks themselves are tested.
        devices: How many there are.
        seconds: How long the check may take.
        torch_python: An interpreter that has PyTorch; None: there is none.
    """

    device: str
    devices: int
    seconds: float
    torch_python: str | None = None

    @property
    def on_gpus(self) -> bool:
        return self.device == "gpu"


#: Variables that would change devices, threads or precision of what is checked.
_NOT_INHERITED = (
    "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS",
    "KERAS_BACKEND", "NPROC", "TF_CONFIG", "UNISON_CPU_DEVICES",
)  # fmt: skip

#: Compiling is most of what checks on CPUs do, and what they compute is small.
_FEW_OPTIMIZATIONS = "--xla_backend_optimization_level=0"


def environment(device: str, devices: int) -> dict[str, str]:
    """Returns the environment of a process that computes on so many devices.

    Where JAX finds no GPU, it may go on with CPUs: programs call `expect_device`.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # A check's process may compute on CPUs, and start others that do not.
    flags = [flag for flag in kept.get("XLA_FLAGS", "").split() if flag != _FEW_OPTIMIZATIONS]
    of_device = {"JAX_PLATFORMS": "cuda,cpu"}
    if device == "cpu":
        of_device = {"JAX_PLATFORMS": "cpu", "UNISON_CPU_DEVICES": str(devices)}
        flags.append(_FEW_OPTIMIZATIONS)
    of_device["XLA_FLAGS"] = " ".join(flags)
    path = python_path("tests")
    return kept | of_device | {"PYTHONPATH": path, "KERAS_BACKEND": "jax"}
