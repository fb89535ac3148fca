"""Logical CPU devices, and the threads that they start with.

Almost every test needs a process whose backend has not started, so it is a program.
"""

import textwrap

import pytest

from subprocess_program import run_program
from unison.runtime import devices
from unison.runtime.devices import DeviceCountError

HEAD = """
import glob, os, jax
from unison.runtime import devices
def pool_threads():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    return names.count("tf_XLAEigen")
def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"
"""


def printed(body: str, env: dict[str, str] | None = None) -> list[str]:
    """The lines that a program prints."""
    done = run_program(HEAD + textwrap.dedent(body), env=env, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_cpu_device_when_nobody_states_a_number():
    assert printed("print(len(devices.local_devices()))") == ["1"]


def test_a_call_sets_the_number_of_devices():
    body = "devices.set_logical_cpu_devices(3); print(len(devices.local_devices()))"
    assert printed(body) == ["3"]


@pytest.mark.parametrize(
    "env",
    [
        {"UNISON_CPU_DEVICES": "3"},
        {"JAX_NUM_CPU_DEVICES": "3"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
        {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
            "UNISON_CPU_DEVICES": "3",
        },
    ],
)
def test_the_environment_sets_the_number_of_devices(env):
    assert printed("print(len(devices.local_devices()))", env) == ["3"]


@pytest.mark.parametrize(
    "first", ["import jax; jax.numpy.ones(2)", "import keras; keras.ops.ones(2)"]
)
def test_the_environment_of_a_tensorflow_program_holds_for_what_computes_first(first):
    body = f"""
        import unison.tf as tf
        {first}
        print(tf.distribute.MirroredStrategy().num_replicas_in_sync)
    """
    assert printed(body, {"UNISON_CPU_DEVICES": "3"}) == ["3"]


def test_importing_and_stating_start_no_backend():
    body = """
    import unison.tf.config
    from unison.runtime.private_jax import backend_is_started
    devices.set_logical_cpu_devices(2)
    print(backend_is_started(), jax.config.values["jax_num_cpu_devices"], os.environ.get("NPROC"))
    """
    assert printed(body) == ["False -1 None"]


def test_the_last_call_before_the_start_wins():
    body = """
    devices.set_logical_cpu_devices(3)
    devices.set_logical_cpu_devices(2)
    print(len(devices.local_devices()))
    """
    assert printed(body) == ["2"]


@pytest.mark.parametrize(
    "env",
    [
        {"UNISON_CPU_DEVICES": "3"},
        {"JAX_NUM_CPU_DEVICES": "3"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
    ],
)
def test_numbers_that_disagree_are_an_error_that_names_both(env):
    (line,) = printed("print(raised(devices.set_logical_cpu_devices, 2))", env)
    assert line.startswith("DeviceCountConflictError: ")
    assert "set_logical_cpu_devices (or tf.config) says 2" in line
    assert f"{next(iter(env)).lower()}" in line.lower()
    assert "says 3" in line


def test_numbers_that_disagree_in_the_environment_are_an_error_at_the_start():
    env = {"UNISON_CPU_DEVICES": "3", "JAX_NUM_CPU_DEVICES": "2"}
    (line,) = printed("print(raised(devices.local_devices))", env)
    assert line.startswith("DeviceCountConflictError: ")


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5"])
def test_a_variable_that_is_no_positive_number_is_an_error_that_names_it(value):
    (line,) = printed("print(raised(devices.local_devices))", {"UNISON_CPU_DEVICES": value})
    assert line.startswith("DeviceCountError: ")
    assert "UNISON_CPU_DEVICES" in line


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", None, True])
def test_a_count_that_is_no_positive_integer_is_an_error(count):
    with pytest.raises(DeviceCountError, match="Received: set_logical_cpu_devices"):
        devices.set_logical_cpu_devices(count)


def test_another_number_is_too_late_once_the_backend_runs():
    body = """
    devices.local_devices()
    devices.set_logical_cpu_devices(1)
    print(raised(devices.set_logical_cpu_devices, 2))
    """
    (line,) = printed(body)
    assert line.startswith("BackendStartedError: Virtual devices cannot be modified after being")
    assert "UNISON_CPU_DEVICES=2" in line


def test_a_backend_started_by_the_user_with_fewer_devices_is_refused():
    body = "jax.devices(); print(raised(devices.local_devices))"
    (line,) = printed(body, {"UNISON_CPU_DEVICES": "2"})
    assert line.startswith("BackendStartedError: ")
    assert "expected 2 logical CPU devices (environment variable UNISON_CPU_DEVICES)" in line
    assert "runs with 1" in line


@pytest.mark.parametrize("again", ["", "devices.set_logical_cpu_devices(3)"])
def test_plain_keras_has_the_devices_that_were_set_and_the_strategy_takes_them(again):
    body = f"""
    import keras
    import unison
    import unison.tf as tf

    three = [tf.config.LogicalDeviceConfiguration()] * 3
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], three)
    {again}
    keras.ops.ones(2) + keras.ops.ones(2)
    strategy = unison.MirroredStrategy()
    for _ in range(100):
        strategy.run(lambda: unison.get_replica_context().all_reduce("SUM", jax.numpy.ones(100)))
    print(strategy.num_replicas_in_sync, os.environ.get("NPROC"))
    """
    assert printed(body, {"KERAS_BACKEND": "jax"}) == ["3 None"]


def test_the_last_number_that_was_set_counts():
    body = """
    devices.set_logical_cpu_devices(4)
    devices.set_logical_cpu_devices(2)
    print(len(jax.devices()), jax.config.values["jax_num_cpu_devices"])
    """
    assert printed(body) == ["2 -1"]


@pytest.mark.parametrize(("count", "nproc", "threads"), [(2, 1, 2), (4, 1, 4), (2, 3, 3)])
def test_the_pool_has_a_thread_a_device_or_as_many_as_cores(count, nproc, threads):
    body = f"""
    devices.set_logical_cpu_devices({count})
    devices.local_devices()
    print(pool_threads())
    """
    assert printed(body, {"NPROC": str(nproc)}) == [str(threads)]


def test_the_cores_that_a_container_may_use_are_those_of_the_pool():
    body = """
    devices.available_cores = lambda: 5
    devices.set_logical_cpu_devices(2)
    devices.local_devices()
    print(pool_threads())
    """
    assert printed(body) == ["5"]


def test_a_larger_nproc_is_kept():
    env = {"NPROC": "12", "UNISON_CPU_DEVICES": "2"}
    body = "devices.local_devices(); print(pool_threads())"
    assert printed(body, env) == ["12"]


def test_more_pool_threads_can_be_asked_for():
    body = """
    devices.set_pool_threads(11)
    devices.set_logical_cpu_devices(2)
    devices.local_devices()
    print(pool_threads(), devices.pool_threads_wished())
    """
    assert printed(body) == ["11 11"]


def test_pool_threads_are_too_late_once_the_backend_runs():
    body = "devices.local_devices(); print(raised(devices.set_pool_threads, 3))"
    (line,) = printed(body)
    assert line.startswith("BackendStartedError: Intra op parallelism cannot be modified after")


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_pool_threads_that_are_no_number_are_an_error(count):
    with pytest.raises(ValueError, match="Expected a number of threads"):
        devices.set_pool_threads(count)


@pytest.mark.parametrize("env", [{}, {"NPROC": "1"}])
def test_child_processes_do_not_inherit_the_pool_size(env):
    body = """
    devices.set_logical_cpu_devices(2)
    devices.local_devices()
    print(os.environ.get("NPROC", "unset"))
    """
    assert printed(body, env) == [env.get("NPROC", "unset")]


def test_a_backend_that_is_started_again_has_the_devices_and_threads_again():
    body = """
    import jax.extend
    devices.set_logical_cpu_devices(2)
    first = devices.default_devices()
    del first
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    print(len(devices.default_devices()), pool_threads() >= 2)
    """
    assert printed(body) == ["2 True"]


def test_without_gpus_hiding_them_keeps_the_cpu():
    body = "devices.set_visible_gpus(()); print(devices.local_devices()[0].platform)"
    assert printed(body, {"JAX_PLATFORMS": ""}) == ["cpu"]
