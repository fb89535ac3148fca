"""The names of `tf.config`, with TF's rules."""

import pytest

from subprocess_program import run_program

HEAD = """
from unison.tf import config
from unison.runtime.private_jax import backend_is_started
def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"
cpu = config.list_physical_devices("CPU")[0]
two = [config.LogicalDeviceConfiguration()] * 2
"""
# A machine with two GPUs, as far as the list of physical devices can tell.
WITH_GPUS = HEAD + "config._physical_gpus = lambda: 2\n"


def printed(body: str, head: str = HEAD) -> list[str]:
    done = run_program(head + body, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_there_is_one_physical_cpu_and_asking_starts_no_backend():
    body = "print(config.list_physical_devices(), backend_is_started())"
    expected = "[PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')] False"
    assert printed(body) == [expected]


def test_there_is_one_physical_cpu_however_it_is_split():
    body = """
config.set_logical_device_configuration(cpu, two)
config.list_logical_devices()
print(len(config.list_physical_devices("CPU")))
"""
    assert printed(body) == ["1"]


def test_a_kind_that_is_not_there_lists_nothing():
    body = "print(config.list_physical_devices('GPU'), config.list_logical_devices('GPU'))"
    assert printed(body) == ["[] []"]


def test_splitting_the_cpu_gives_logical_devices():
    body = """
config.set_logical_device_configuration(cpu, two)
print(config.list_logical_devices("CPU"))
"""
    expected = [
        "[LogicalDevice(name='/device:CPU:0', device_type='CPU'), "
        "LogicalDevice(name='/device:CPU:1', device_type='CPU')]"
    ]
    assert printed(body) == expected


def test_logical_devices_resolve_to_jax_devices():
    body = """
from unison.runtime.device_strings import select_devices
config.set_logical_device_configuration(cpu, two)
print(select_devices(config.list_logical_devices("CPU")))
"""
    assert printed(body) == ["[CpuDevice(id=0), CpuDevice(id=1)]"]


def test_the_configuration_can_be_read_back():
    body = """
print(config.get_logical_device_configuration(cpu))
config.set_logical_device_configuration(cpu, two)
print(config.get_logical_device_configuration(cpu) == two)
"""
    assert printed(body) == ["None", "True"]


def test_splitting_is_too_late_once_the_backend_runs():
    body = """
config.list_logical_devices()
print(raised(config.set_logical_device_configuration, cpu, two))
try:
    config.set_logical_device_configuration(cpu, two)
except RuntimeError:
    print("a RuntimeError")
"""
    first, second = printed(body)
    assert "Virtual devices cannot be modified after being initialized" in first
    assert "UNISON_CPU_DEVICES=2" in first
    assert second == "a RuntimeError"


def test_the_same_configuration_again_is_no_error():
    body = """
config.set_logical_device_configuration(cpu, two)
config.list_logical_devices()
print(raised(config.set_logical_device_configuration, cpu, two))
"""
    assert printed(body) == ["nothing raised"]


@pytest.mark.parametrize(
    "field", ["memory_limit", "experimental_priority", "experimental_device_ordinal"]
)
def test_a_limit_on_a_logical_cpu_is_an_error(field):
    body = f"""
one = [config.LogicalDeviceConfiguration({field}=1)]
print(raised(config.set_logical_device_configuration, cpu, one))
"""
    (line,) = printed(body)
    assert line.startswith(f"ValueError: Setting {field} on CPU virtual devices is currently not")


def test_splitting_a_gpu_is_an_error_with_the_mend():
    body = """
gpu = config.list_physical_devices("GPU")[0]
print(raised(config.set_logical_device_configuration, gpu, two))
"""
    (line,) = printed(body, WITH_GPUS)
    assert line.startswith("ValueError: Expected the CPU: JAX cannot split an accelerator")
    assert "set_memory_growth" in line


def test_a_device_that_is_not_there_is_an_error():
    body = """
ghost = config.PhysicalDevice("/physical_device:GPU:0", "GPU")
for call in (config.get_logical_device_configuration, config.set_visible_devices,
             config.experimental.get_memory_growth):
    print(raised(call, ghost))
"""
    lines = printed(body)
    assert [line.split(":")[:2] for line in lines] == [["ValueError", " Unrecognized device"]] * 3


def test_hidden_gpus_are_not_visible_and_stay_physical():
    body = """
gpus = config.list_physical_devices("GPU")
config.set_visible_devices(gpus[1], "GPU")
print([d.name for d in config.get_visible_devices()], len(config.list_physical_devices("GPU")))
config.set_visible_devices([], "GPU")
print([d.name for d in config.get_visible_devices()], backend_is_started())
config.set_visible_devices(gpus, "GPU")
print(len(config.get_visible_devices("GPU")))
"""
    assert printed(body, WITH_GPUS) == [
        "['/physical_device:CPU:0', '/physical_device:GPU:1'] 2",
        "['/physical_device:CPU:0'] False",
        "2",
    ]


def test_a_device_of_another_type_cannot_be_made_visible():
    assert printed("print(raised(config.set_visible_devices, [cpu], 'GPU'))")[0].startswith(
        "ValueError: Unrecognized device: expected one of type GPU"
    )


def test_the_cpu_cannot_be_hidden():
    (line,) = printed("print(raised(config.set_visible_devices, [], 'CPU'))")
    assert line.startswith("ValueError: Expected the CPU among the visible devices")


def test_hiding_is_too_late_once_the_backend_runs():
    body = """
config.list_logical_devices()
print(raised(config.set_visible_devices, [], "GPU"))
"""
    (line,) = printed(body, WITH_GPUS)
    assert "Visible devices cannot be modified after being initialized" in line


def test_memory_growth_can_be_set_and_read():
    body = """
gpu = config.list_physical_devices("GPU")[0]
print(config.experimental.get_memory_growth(gpu))
config.experimental.set_memory_growth(gpu, True)
print(config.experimental.get_memory_growth(gpu))
"""
    assert printed(body, WITH_GPUS) == ["False", "True"]


def test_memory_growth_of_the_cpu_is_an_error():
    (line,) = printed("print(raised(config.experimental.set_memory_growth, cpu, True))")
    assert line.startswith("ValueError: Cannot set memory growth on non-GPU")


def test_soft_placement_is_on_and_can_be_turned_off():
    body = """
config.set_soft_device_placement(False)
print(config.get_soft_device_placement())
"""
    assert printed("print(config.get_soft_device_placement())") == ["True"]
    assert printed(body) == ["False"]


def test_threads_can_be_set_before_the_start_only():
    body = """
t = config.threading
t.set_intra_op_parallelism_threads(9)
t.set_inter_op_parallelism_threads(3)
print(t.get_intra_op_parallelism_threads(), t.get_inter_op_parallelism_threads())
config.list_logical_devices()
print(raised(t.set_intra_op_parallelism_threads, 2))
print(raised(t.set_inter_op_parallelism_threads, 2))
"""
    numbers, intra, inter = printed(body)
    assert numbers == "9 3"
    assert "Intra op parallelism cannot be modified after initialization" in intra
    assert "Inter op parallelism cannot be modified after initialization" in inter


def test_the_older_names_are_there():
    body = """
e = config.experimental
e.set_virtual_device_configuration(cpu, [e.VirtualDeviceConfiguration()] * 2)
print(len(e.get_virtual_device_configuration(cpu)), len(e.list_logical_devices("CPU")),
      len(e.list_physical_devices("CPU")), len(e.get_visible_devices("CPU")))
"""
    assert printed(body) == ["2 2 1 1"]
