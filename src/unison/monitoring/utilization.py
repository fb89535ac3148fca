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
        #: NVML's handles of devices.
        self._handles: dict[Any, Any] = {}

    def of(self, devices: Sequence[Any]) -> float | None:
        """Returns the part of the time in which GPUs compute, from 0 to 1: the mean over them.

        The driver measures it over its last sampling period, of up to a second.

        Args:
            devices: This process's devices.

        Returns:
            None if these are no GPUs of NVIDIA's, or their driver does not provide it now.
        """
        if self._is_missing or not devices or devices[0].platform not in ("cuda", "gpu"):
            return None
        try:
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
            for device in devices:
                if device not in self._handles:
                    self._handles[device] = _handle(self._nvml, device)
        except Exception:  # no package, no driver, or which GPU it is cannot be said
            self._is_missing = True
            return None
        measure = self._nvml.nvmlDeviceGetUtilizationRates
        try:
            rates = [measure(self._handles[device]).gpu for device in devices]
        except self._nvml.NVMLError:  # a part of a GPU (MIG) has none
            return None
        return sum(rates) / len(rates) / 100


def _handle(nvml: Any, device: Any) -> Any:
    """Returns NVML's handle of a device of JAX, which counts those that are visible only.

    Raises:
        LookupError: Numbers mean other GPUs for CUDA, which begins with the fastest, than for NVML.
    """
    index = device.local_hardware_id
    visible = os.environ.get(VISIBLE_GPUS)
    name = str(index) if visible is None else visible.split(",")[index].strip()
    if not name.isdecimal():
        return nvml.nvmlDeviceGetHandleByUUID(name)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not is_ordered and len({nvml.nvmlDeviceGetName(handle) for handle in handles}) > 1:
        raise LookupError(name)
    return handles[int(name)]
