"""The machine, in words."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform


def processor() -> str:
    """The name of the CPU's model."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def description() -> dict[str, str | int]:
    return {
        "cpu": processor(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "day": datetime.date.today().isoformat(),
    }
