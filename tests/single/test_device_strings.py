"""Device strings as TF writes them, on the logical CPU devices of conftest.py."""

from typing import NamedTuple

import jax
import pytest

from unison.runtime.device_strings import (
    UnknownDeviceError,
    canonical_name,
    device_type,
    parse,
    resolve,
    select_devices,
)
from unison.runtime.devices import DeviceCountError


class Named(NamedTuple):
    name: str
    device_type: str


def cpus() -> list[jax.Device]:
    resolve("CPU:0")  # the backend, prepared
    return jax.local_devices(backend="cpu")


@pytest.mark.parametrize(
    "name",
    [
        "CPU:1",
        "cpu:1",
        "/cpu:1",
        "/CPU:1",
        "/device:CPU:1",
        "/device:cpu:1",
        "/job:localhost/replica:0/task:0/device:CPU:1",
        "/job:localhost/device:CPU:1",
        "/job:worker/task:0/cpu:1",
        "/job:worker/replica:0/task:0/device:CPU:1",
        "/task:0/device:CPU:1",
    ],
)
def test_every_spelling_means_the_same_device(name):
    assert resolve(name) is cpus()[1]


def test_a_type_without_number_means_the_first():
    assert resolve("CPU") is cpus()[0]


def test_a_jax_device_means_itself():
    assert resolve(cpus()[2]) is cpus()[2]


def test_a_logical_device_means_the_one_of_its_name():
    assert resolve(Named("/device:CPU:2", "CPU")) is cpus()[2]


@pytest.mark.parametrize("name", ["GPU", "/gpu:0", "TPU:0", "CUDA:0"])
def test_a_kind_that_is_not_there_is_an_error_that_lists_what_is(name):
    with pytest.raises(UnknownDeviceError, match=r"task:0/device:CPU:0, .*Received: '.*'"):
        resolve(name)


def test_a_cpu_too_many_is_an_error_that_says_how_to_get_it():
    with pytest.raises(UnknownDeviceError, match=r"UNISON_CPU_DEVICES=100"):
        resolve("CPU:99")


@pytest.mark.parametrize("name", ["/job:ps/task:0/cpu:0", "/job:worker/task:1/cpu:0"])
def test_a_task_that_is_not_there_is_an_error(name):
    with pytest.raises(UnknownDeviceError, match="Expected one of the devices of this job"):
        resolve(name)


@pytest.mark.parametrize(
    "name", ["", "CPU:", "CPU:-1", "CPU:x", "/job:worker/task:1", "/physical_device:CPU:0", ":0"]
)
def test_what_is_no_device_string_is_an_error_that_shows_one(name):
    with pytest.raises(UnknownDeviceError, match=r'Expected a device string such as "GPU:1"'):
        parse(name)


def test_what_names_no_device_is_a_type_error():
    with pytest.raises(TypeError, match="Received: 3"):
        resolve(3)


def test_soft_placement_falls_back_to_the_first_cpu():
    assert resolve("GPU:7", soft=True) is cpus()[0]


def test_soft_placement_leaves_a_device_that_exists():
    assert resolve("CPU:1", soft=True) is cpus()[1]


def test_canonical_name_is_the_full_name_of_tf():
    assert canonical_name(cpus()[1]) == "/job:localhost/replica:0/task:0/device:CPU:1"


def test_canonical_name_resolves_to_the_device():
    assert [resolve(canonical_name(device)) for device in cpus()] == cpus()


def test_cuda_and_rocm_devices_are_gpus():
    class Device(NamedTuple):
        platform: str

    assert [device_type(Device(p)) for p in ("gpu", "cuda", "rocm", "tpu")] == [
        "GPU",
        "GPU",
        "GPU",
        "TPU",
    ]


def test_select_devices_takes_all_by_default():
    assert select_devices() == cpus()


def test_select_devices_takes_the_first_of_a_count():
    assert select_devices(2) == cpus()[:2]


def test_select_devices_keeps_the_order_of_a_list():
    assert select_devices(["CPU:2", cpus()[0]]) == [cpus()[2], cpus()[0]]


@pytest.mark.parametrize("one", ["CPU:1", Named("/device:CPU:1", "CPU")])
def test_select_devices_takes_a_single_one(one):
    assert select_devices(one) == [cpus()[1]]


@pytest.mark.parametrize("count", [0, -1, True])
def test_a_count_that_is_no_positive_integer_is_an_error(count):
    with pytest.raises(DeviceCountError, match=f"at least 1. Received: {count}"):
        select_devices(count)


def test_more_devices_than_there_are_is_an_error_with_the_mend():
    with pytest.raises(
        DeviceCountError, match=r"at most \d+ .*Received: 99.*UNISON_CPU_DEVICES=99"
    ):
        select_devices(99)


def test_a_device_named_twice_is_an_error():
    with pytest.raises(DeviceCountError, match=r"device:CPU:1 more than once"):
        select_devices(["CPU:1", "CPU:0", "/device:CPU:1"])


def test_no_device_at_all_is_an_error():
    with pytest.raises(DeviceCountError, match="at least one device"):
        select_devices([])


def test_a_fraction_of_a_device_is_a_type_error():
    with pytest.raises(TypeError, match=r"Expected a count, a device or a list.*Received: 2.5"):
        select_devices(2.5)
