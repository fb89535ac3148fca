"""What the checks run on: devices, memory, driver and versions."""

from __future__ import annotations

import importlib.metadata
import pathlib
from collections.abc import Iterator

import jax

import unison
from benchmarks.gpu.findings import DEVICES, MACHINE, Finding, Note, Row, Setting, Value
from unison.runtime.devices import prepare_backend

_LIBRARIES = ("jax", "jaxlib", "keras", "numpy", "optax")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "torch")
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_GIBIBYTE = 2**30


def describe(setting: Setting) -> Iterator[Finding]:
    """Lists the devices, and computes on each of them."""
    prepare_backend()
    devices = jax.local_devices(backend=setting.device)
    for device in devices:
        jax.block_until_ready(jax.device_put(1.0, device) + 1.0)
    about: dict[str, Value] = {DEVICES: len(devices), "kind": devices[0].device_kind}
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        about["GiB for programs, of each device"] = limit / _GIBIBYTE
    about["platform"] = " ".join(devices[0].client.platform_version.split())
    if _DRIVER.exists():
        about["driver"] = _DRIVER.read_text().splitlines()[0]
    about["unison"] = unison.__version__
    for library in (*_LIBRARIES, *_PLUGINS):
        try:
            about[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, value in about.items():
        yield Row(MACHINE, {"": name, "value": value})
    if not setting.on_gpus:
        yield Note("These are logical CPU devices: they show that the checks work, not how fast.")
