"""`tf.config`: the devices, and the settings that must be made before they are started.

TF's rules hold: there is one physical CPU, which can be split into logical ones; whatever changes
devices must come before the first computation. Reading the physical devices starts no backend.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from unison.runtime import device_strings, devices
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import ClusterResolver, SimpleClusterResolver
from unison.runtime.devices import BackendStartedError
from unison.runtime.private_jax import backend_is_started
from unison.runtime.process_group import training_tasks
from unison.runtime.tpu.system import connect
from unison.tf.missing import names_missing_from, namespace

__getattr__ = names_missing_from(__name__)


class PhysicalDevice(NamedTuple):
    """A device of this machine, as `list_physical_devices` gives it."""

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device that a program can run on; a physical one may be split into several."""

    name: str
    device_type: str


@dataclasses.dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """The configuration of one logical device. For the CPU, all fields are None."""

    memory_limit: int | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


_soft_placement = True
_inter_op_threads = 0
_runs_functions_eagerly = False
_has_jit = False
_optimizer_options: dict[str, Any] = {}


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices of this machine; one CPU always. Starts no backend.

    TPUs are listed once the backend runs.

    >>> list_physical_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    counts = {"CPU": 1, "GPU": _physical_gpus()}
    if backend_is_started():
        counts["GPU"] = max(counts["GPU"], len(_started("gpu")))
        counts["TPU"] = len(_started("tpu"))
    return [
        PhysicalDevice(f"/physical_device:{kind}:{index}", kind)
        for kind, count in counts.items()
        for index in range(count)
        if device_type in (None, kind)
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that programs run on, CPUs first. Starts the backend.

    Raises:
        BackendStartedError: See `unison.runtime.devices.prepare_backend`.
    """
    devices.prepare_backend()
    return [
        LogicalDevice(f"/device:{kind}:{index}", kind)
        for kind in ("CPU", "GPU", "TPU")
        for index in range(len(_started(kind.lower())))
        if device_type in (None, kind)
    ]


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Splits the CPU into as many logical devices as there are configurations.

    Raises:
        ValueError: An unknown device, an accelerator (JAX cannot split one), or a configuration
            with anything but None.
        BackendStartedError: The backend already runs with another number of devices.

    Examples:
        ```
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        ```
    """
    _check_known(device)
    if device.device_type != "CPU":
        raise ValueError(
            f"Expected the CPU: JAX cannot split an accelerator into logical devices, nor limit "
            f"one to some megabytes. Received: {device}. To try out several replicas, split the "
            "CPU; to take less GPU memory, call tf.config.experimental.set_memory_growth or set "
            "the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION."
        )
    for configuration in logical_devices:
        for field, value in dataclasses.asdict(configuration).items():
            if value is not None:
                raise ValueError(
                    f"Setting {field} on CPU virtual devices is currently not supported. "
                    f"Received: {configuration}. Leave {field} out."
                )
    devices.set_logical_cpu_devices(len(logical_devices))


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """One configuration for each logical device stated for `device`, None if none was stated."""
    _check_known(device)
    count = devices.stated_cpu_devices() if device.device_type == "CPU" else None
    return None if count is None else [LogicalDeviceConfiguration()] * count


def set_visible_devices(
    devices: Sequence[PhysicalDevice] | PhysicalDevice,  # TF's name; hides the module here
    device_type: str | None = None,
) -> None:
    """Lets the program see only these devices (only those of `device_type` are affected).

    `set_visible_devices([], "GPU")` runs everything on the CPU and leaves the GPUs' memory alone.

    Raises:
        ValueError: An unknown device, one of another type, or no CPU left.
        BackendStartedError: The backend already runs.
    """
    chosen = [devices] if isinstance(devices, PhysicalDevice) else list(devices)
    for device in chosen:
        _check_known(device)
        if device_type not in (None, device.device_type):
            raise ValueError(
                f"Unrecognized device: expected one of type {device_type}. Received: {device}."
            )
    if device_type in (None, "CPU") and not _indices(chosen, "CPU"):
        raise ValueError(
            "Expected the CPU among the visible devices: JAX needs it. "
            f"Received: {chosen}. Name the type to change, as in "
            "set_visible_devices([...], 'GPU')."
        )
    if device_type in (None, "GPU"):
        _show_gpus(_indices(chosen, "GPU"))


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The physical devices that the program may use. Starts no backend."""
    visible = devices.visible_gpus()
    return [
        device
        for device in list_physical_devices(device_type)
        if device.device_type != "GPU" or visible is None or _index(device) in visible
    ]


def _set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Lets GPU memory grow on demand. JAX has one setting for all GPUs.

    Raises:
        ValueError: An unknown device or one that is no GPU.
        BackendStartedError: The backend already runs.
    """
    _check_gpu(device)
    devices.set_gpu_preallocation(not enable)


def _get_memory_growth(device: PhysicalDevice) -> bool:
    """Whether memory grows on demand, instead of being taken at the start.

    Raises:
        ValueError: An unknown device or one that is no GPU.
    """
    _check_gpu(device)
    return devices.gpu_preallocation() is False


def set_soft_device_placement(enabled: bool) -> None:
    """Whether `tf.device` may fall back to the CPU where the device named does not exist."""
    global _soft_placement
    _soft_placement = bool(enabled)


def get_soft_device_placement() -> bool:
    """Whether soft device placement is on, as it is by default.

    >>> get_soft_device_placement()
    True
    """
    return _soft_placement


def _set_intra_op_parallelism_threads(num_threads: int) -> None:
    """At least this many threads for one operation; 0 lets Unison choose.

    Raises:
        ValueError: Not an integer of at least 0.
        BackendStartedError: The backend already runs.
    """
    devices.set_pool_threads(num_threads)


def _get_intra_op_parallelism_threads() -> int:
    """The argument of `set_intra_op_parallelism_threads`; 0 by default."""
    return devices.pool_threads_wished()


def _set_inter_op_parallelism_threads(num_threads: int) -> None:
    """Remembered for TF's sake, without effect: XLA runs one program on one pool.

    Raises:
        BackendStartedError: The backend already runs.
    """
    global _inter_op_threads
    if num_threads == _inter_op_threads:
        return
    if backend_is_started():
        raise BackendStartedError(
            "Inter op parallelism cannot be modified after initialization. Received: "
            f"{num_threads}. Set it before the first JAX computation."
        )
    _inter_op_threads = num_threads


def _get_inter_op_parallelism_threads() -> int:
    """The argument of `set_inter_op_parallelism_threads`; 0 by default."""
    return _inter_op_threads


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterSpec | ClusterResolver,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: Any = None,
) -> None:
    """Makes this process the task of a cluster that it is, and waits for the others.

    In a cluster of one task, and in one whose training tasks it is not among, nothing is done.

    Args:
        cluster_spec_or_resolver: The cluster; a resolver also names this process's task.
        job_name: The job of this process, where a `ClusterSpec` is given.
        task_index: Its index in the job, likewise.
        protocol: Accepted for TensorFlow's sake, as are the following.
        make_master_device_default: Likewise.
        cluster_device_filters: Likewise.

    Raises:
        TypeError: That is neither a cluster nor a resolver.
        RuntimeError: JAX has started already.
        UnavailableError: Timed out waiting for the other workers.

    TF: `tf.config.experimental_connect_to_cluster`.
    """
    del protocol, make_master_device_default, cluster_device_filters
    given = cluster_spec_or_resolver
    if isinstance(given, ClusterSpec):
        given = SimpleClusterResolver(given, task_type=job_name, task_id=task_index)
    if not isinstance(given, ClusterResolver):
        raise TypeError(
            "`cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`. "
            f"Received: {given!r}"
        )
    if (given.task_type, given.task_id) in training_tasks(given.cluster_spec()):
        connect(given)


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Whether every `tf.function` runs as Python, operation by operation, as when debugging.

    TF: `tf.config.run_functions_eagerly`.
    """
    global _runs_functions_eagerly
    _runs_functions_eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """TF: `tf.config.functions_run_eagerly`."""
    return _runs_functions_eagerly


experimental_run_functions_eagerly = run_functions_eagerly
experimental_functions_run_eagerly = functions_run_eagerly


def _set_jit(enabled: bool | str) -> None:
    """Remembered for TF's sake, without effect: XLA compiles every program.

    Raises:
        ValueError: Neither a truth value nor "autoclustering".
    """
    global _has_jit
    if enabled not in (True, False, "autoclustering"):
        raise ValueError(f"Expected True, False or 'autoclustering'. Received: {enabled!r}")
    _has_jit = bool(enabled)


def _get_jit() -> str:
    """Returns "autoclustering" if `set_jit` was given a true value, else an empty text."""
    return "autoclustering" if _has_jit else ""


def _set_experimental_options(options: dict[str, Any]) -> None:
    """Remembered for TF's sake, without effect: XLA optimizes every program."""
    _optimizer_options.update(options)


def _get_experimental_options() -> dict[str, Any]:
    """The argument of `set_experimental_options`."""
    return dict(_optimizer_options)


def _enable_tensor_float_32_execution(enabled: bool) -> None:
    """Whether products of float32 matrices on GPUs may use 19 bits of each number."""
    precision = "default" if enabled else "highest"
    jax.config.update("jax_default_matmul_precision", precision)


def _tensor_float_32_execution_enabled() -> bool:
    return jax.config.values["jax_default_matmul_precision"] != "highest"


def _get_device_details(device: PhysicalDevice) -> dict[str, Any]:
    """Returns the known details of a device: the name of its kind, once the backend runs."""
    _check_known(device)
    if device.device_type == "CPU" or not backend_is_started():
        return {}
    return {"device_name": _started(device.device_type.lower())[_index(device)].device_kind}


def _memory_stats(device: str) -> dict[str, int]:
    stats = device_strings.resolve(device).memory_stats()
    if stats is None:
        raise ValueError(f"No allocator statistics for device {device!r}: the CPU has none.")
    return stats


def _get_memory_info(device: str) -> dict[str, int]:
    """Returns the bytes in use on a device, and the most there were.

    Raises:
        ValueError: The device does not count them, as the CPU.
    """
    stats = _memory_stats(device)
    return {"current": stats["bytes_in_use"], "peak": stats["peak_bytes_in_use"]}


def _get_memory_usage(device: str) -> int:
    """Returns the bytes in use on a device."""
    return _memory_stats(device)["bytes_in_use"]


def _reset_memory_stats(device: str) -> None:
    """Raises, as JAX keeps the peak for as long as the process lives.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "JAX does not reset the peak of a device's memory. Take the difference of two "
        f"get_memory_info({device!r}), or measure in a new process."
    )


def _check_known(device: PhysicalDevice) -> None:
    there = list_physical_devices()
    if device not in there:
        raise ValueError(
            f"Unrecognized device: expected one of {[known.name for known in there]}. "
            f"Received: {device!r}. Take it from tf.config.list_physical_devices()."
        )


def _check_gpu(device: PhysicalDevice) -> None:
    _check_known(device)
    if device.device_type != "GPU":
        raise ValueError(
            f"Cannot set memory growth on non-GPU devices. Expected a GPU. Received: {device}. "
            'Take it from tf.config.list_physical_devices("GPU").'
        )


def _index(device: PhysicalDevice) -> int:
    return device_strings.parse(device.name.replace("physical_", "")).ordinal


def _indices(chosen: Sequence[PhysicalDevice], device_type: str) -> tuple[int, ...]:
    return tuple(sorted({_index(d) for d in chosen if d.device_type == device_type}))


def _show_gpus(indices: tuple[int, ...]) -> None:
    shows_all = len(indices) == len(list_physical_devices("GPU"))
    devices.set_visible_gpus(None if shows_all else indices)


def _started(platform: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # no such platform here
        return []


@functools.cache
def _physical_gpus() -> int:
    """The number of GPUs that JAX would find; cached, since hiding them must not change it."""
    platforms = (jax.config.values["jax_platforms"] or "").split(",")
    if platforms != [""] and not {"gpu", "cuda", "rocm"} & set(platforms):
        return 0
    plugins = _accelerator_plugins()
    if any(name.startswith("xla_cuda") for name in plugins):
        return _cuda_gpus()
    if any(name.startswith("xla_rocm") for name in plugins):
        return len(list(pathlib.Path("/dev/dri").glob("renderD*")))
    return 0


def _accelerator_plugins() -> list[str]:
    spec = importlib.util.find_spec("jax_plugins")
    folders = spec.submodule_search_locations if spec else None
    return [name for folder in folders or () for name in os.listdir(folder)]


def _cuda_gpus() -> int:
    count = len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    # CUDA ignores everything from the first invalid entry on, usually written -1.
    named = [entry.strip() for entry in visible.split(",")]
    stop = next((i for i, entry in enumerate(named) if entry in ("", "-1")), len(named))
    return min(count, stop)


threading = namespace(
    "unison.tf.config.threading",
    set_intra_op_parallelism_threads=_set_intra_op_parallelism_threads,
    get_intra_op_parallelism_threads=_get_intra_op_parallelism_threads,
    set_inter_op_parallelism_threads=_set_inter_op_parallelism_threads,
    get_inter_op_parallelism_threads=_get_inter_op_parallelism_threads,
)

optimizer = namespace(
    "unison.tf.config.optimizer",
    get_experimental_options=_get_experimental_options,
    get_jit=_get_jit,
    set_experimental_options=_set_experimental_options,
    set_jit=_set_jit,
)

experimental = namespace(
    "unison.tf.config.experimental",
    VirtualDeviceConfiguration=LogicalDeviceConfiguration,
    enable_op_determinism=devices.enable_op_determinism,
    enable_tensor_float_32_execution=_enable_tensor_float_32_execution,
    get_device_details=_get_device_details,
    get_memory_growth=_get_memory_growth,
    get_memory_info=_get_memory_info,
    get_memory_usage=_get_memory_usage,
    get_virtual_device_configuration=get_logical_device_configuration,
    get_visible_devices=get_visible_devices,
    list_logical_devices=list_logical_devices,
    list_physical_devices=list_physical_devices,
    reset_memory_stats=_reset_memory_stats,
    set_memory_growth=_set_memory_growth,
    set_virtual_device_configuration=set_logical_device_configuration,
    set_visible_devices=set_visible_devices,
    tensor_float_32_execution_enabled=_tensor_float_32_execution_enabled,
)
