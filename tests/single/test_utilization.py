"""The utilization of GPUs: NVIDIA's library is a stand-in here, with the names of the real one."""

import dataclasses
import sys
import types

import pynvml
import pytest

from unison.monitoring.utilization import Utilization


@dataclasses.dataclass(frozen=True)
class Gpu:
    local_hardware_id: int
    platform: str = "gpu"


class Library:
    """NVML of a machine with three GPUs."""

    NVMLError = pynvml.NVMLError

    def __init__(self):
        self.rates = {"GPU-a": 10, "GPU-b": 20, "GPU-c": 90}
        self.names = dict.fromkeys(self.rates, "H100")
        self.fails = False

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.rates)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return list(self.rates)[index]

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        return name

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(gpu=self.rates[handle])


@pytest.fixture
def nvml(monkeypatch):
    for name in vars(Library):
        assert name.startswith("__") or hasattr(pynvml, name)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_it_is_the_mean_over_the_devices_of_the_process(nvml):
    assert Utilization().of([Gpu(0), Gpu(1)]) == pytest.approx(0.15)


@pytest.mark.parametrize(("visible", "rate"), [("2", 0.9), ("1, 2", 0.2), ("GPU-b,0", 0.2)])
def test_visible_devices_are_counted_as_jax_counts_them(nvml, monkeypatch, visible, rate):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Utilization().of([Gpu(0)]) == pytest.approx(rate)


def test_numbers_of_different_gpus_mean_something_only_in_the_order_of_the_bus(nvml, monkeypatch):
    nvml.names["GPU-c"] = "A100"
    assert Utilization().of([Gpu(0)]) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert Utilization().of([Gpu(0)]) == pytest.approx(0.1)


def test_an_error_is_not_for_ever(nvml):
    utilization = Utilization()
    nvml.fails = True
    assert utilization.of([Gpu(0)]) is None
    nvml.fails = False
    assert utilization.of([Gpu(0)]) == pytest.approx(0.1)


def test_on_other_devices_nvidia_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Utilization().of([]) is None
    assert Utilization().of([Gpu(0, "cpu")]) is None


def test_without_the_package_or_a_driver_it_is_not_known(nvml, monkeypatch):
    def init():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    nvml.nvmlInit = init
    assert Utilization().of([Gpu(0)]) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Utilization().of([Gpu(0)]) is None
