"""The machine, in words."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import resource
import sys


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


def gpus() -> str:
    """The names of NVIDIA's GPUs; empty without."""
    told = sorted(pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [line for path in told for line in path.read_text().splitlines() if "Model:" in line]
    return ", ".join(line.partition(":")[2].strip() for line in models)


def expect_device(device: str) -> None:
    """Checks that JAX, if this process uses it, computes where it is to.

    Raises:
        RuntimeError: It has found no GPU, and computes on CPUs.
    """
    if device == "gpu" and "jax" in sys.modules:
        backend = sys.modules["jax"].default_backend()
        if backend != device:
            raise RuntimeError(
                f"Expected JAX to compute on {device}s. Received: {backend}. See its warnings."
            )


def description() -> dict[str, str | int]:
    return {
        "gpus": gpus(),
        "cpu": processor(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "day": datetime.date.today().isoformat(),
    }


def resident_bytes() -> int | None:
    """Returns the bytes of this process in memory; None where the system hides it."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Returns the most bytes that this process has had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
