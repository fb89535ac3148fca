"""The utilization of this process's GPUs, as NVIDIA's driver measures it (NVML)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from unison.runtime.cluster_resolvers.gpus import VISIBLE_GPUS


class Utilization:
    """Asks NVIDIA's driver, where it and the package `nvidia-ml-py` are installed."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._is_missing = False

    def of(self, devices: Sequence[Any]) -> float | None:
        """Returns the part of the time in which GPUs compute, from 0 to 1: the mean over them.

        The driver measures it over its last sampling period, of up to a second.

        Args:
            devices: This process's devices.

        Returns:
            None if these are no GPUs of NVIDIA's, or their driver does not provide it.
        """
        if self._is_missing or not devices or devices[0].platform not in ("cuda", "gpu"):
            return None
        try:
            nvml = self._started()
            rates = [
                nvml.nvmlDeviceGetUtilizationRates(_handle(nvml, device)).gpu for device in devices
            ]
        except Exception:  # no package, no driver, or one that does not measure it, as for a part
            self._is_missing = True
            return None
        return sum(rates) / len(rates) / 100

    def _started(self) -> Any:
        if self._nvml is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        return self._nvml


def _handle(nvml: Any, device: Any) -> Any:
    """Returns NVML's handle of a device of JAX, which counts those that are visible only."""
    index = device.local_hardware_id
    visible = os.environ.get(VISIBLE_GPUS)
    name = str(index) if visible is None else visible.split(",")[index].strip()
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
