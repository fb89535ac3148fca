"""The utilization of GPUs: NVIDIA's library is a stand-in here, with the names of the real one."""

import sys
import types

import pynvml
import pytest

from unison.monitoring.utilization import Utilization


def gpu(index):
    return types.SimpleNamespace(platform="gpu", local_hardware_id=index)


@pytest.fixture
def nvml(monkeypatch):
    """NVML of a machine with three GPUs: its names, and the rates that it reports."""
    rates = {0: 10, 1: 20, 2: 90, "GPU-aa": 40}
    found = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: rates[index],
        nvmlDeviceGetHandleByUUID=lambda name: rates[name],
        nvmlDeviceGetUtilizationRates=lambda rate: types.SimpleNamespace(gpu=rate),
    )
    for name in vars(found):
        assert callable(getattr(pynvml, name))
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def test_it_is_the_mean_over_the_devices_of_the_process(nvml):
    assert Utilization().of([gpu(0), gpu(1)]) == pytest.approx(0.15)


@pytest.mark.parametrize(("visible", "rate"), [("2", 0.9), ("1, 2", 0.2), ("GPU-aa,0", 0.4)])
def test_visible_devices_are_counted_as_jax_counts_them(nvml, monkeypatch, visible, rate):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Utilization().of([gpu(0)]) == pytest.approx(rate)


def test_on_other_devices_nvidia_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Utilization().of([]) is None
    assert Utilization().of([types.SimpleNamespace(platform="cpu")]) is None


def test_without_the_package_or_a_driver_it_is_not_known(monkeypatch):
    assert Utilization().of([gpu(0)]) is None  # the real one: there is no driver here
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Utilization().of([gpu(0)]) is None
