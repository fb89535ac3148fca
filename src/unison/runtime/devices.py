"""Logical CPU devices, and what else JAX's backend starts with.

Every strategy must run on a laptop, so the CPU can be split into logical devices: with
`set_logical_cpu_devices(4)`, `UNISON_CPU_DEVICES=4`, JAX's own `jax_num_cpu_devices`, or
`XLA_FLAGS=--xla_force_host_platform_device_count=4`. If several of these state a count, the counts
must agree. Nothing happens until a strategy asks for devices: then `prepare_backend` starts the
backend. After a call of `set_logical_cpu_devices`, plain JAX or Keras may start it as well.

XLA's CPU client has a pool of as many threads as there are cores, or devices if these are more.
Where a container may use fewer cores than the machine has, the pool gets as many: NPROC is set
while the backend starts, which is when XLA sizes the pool, and then restored, so that child
processes (Ray workers, launchers, data loaders) size their own pools. See `unison.runtime.launches`
for what a pool of one thread a device needs.

XLA's own timeouts for a stuck collective are left unchanged: lower ones would abort healthy
programs whose replicas are merely slow, since many logical devices share few cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Iterator, Sequence

import jax

from unison.runtime.cores import available_cores
from unison.runtime.environment import environment
from unison.runtime.memory import keep_freed_memory
from unison.runtime.private_jax import backend_is_started, start_cpus_within
from unison.runtime.tpu.slices import WITHOUT_A_TPU

CPU_DEVICES_VARIABLE = "UNISON_CPU_DEVICES"

_PREPARE_LOCK = threading.Lock()
_XLA_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count[= ](\d+)")
_ACCELERATOR_PLATFORMS = frozenset({"gpu", "cuda", "rocm"})

#: XLA's option for GPUs: its operations and its choice of kernels are the same in every run.
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class DeviceCountError(ValueError):
    """A number or list of devices that is not available."""


class DeviceCountConflictError(DeviceCountError):
    """Two places state different numbers of logical CPU devices."""


class BackendStartedError(RuntimeError):
    """A setting was requested that can only be made before the backend starts."""


@dataclasses.dataclass
class _Wishes:
    """The settings made through this module; applied by `prepare_backend`."""

    cpu_devices: int | None = None
    pool_threads: int = 0
    visible_gpus: tuple[int, ...] | None = None
    preallocate_gpu_memory: bool | None = None


_wishes = _Wishes()
_planned_devices: tuple[jax.Device, ...] = ()


def set_logical_cpu_devices(count: int) -> None:
    """Splits the CPU into `count` logical devices.

    Must be called before the first JAX computation. Does not start the backend; whatever starts it
    then, also plain JAX or Keras, has as many devices.

    Args:
        count: number of logical devices, at least 1.

    Raises:
        DeviceCountError: `count` is not a positive integer.
        DeviceCountConflictError: the environment or JAX's configuration states another number.
        BackendStartedError: the backend is already running with another number.

    Examples:
        ```
        unison.set_logical_cpu_devices(4)
        strategy = unison.MirroredStrategy()   # 4 replicas
        ```
    """
    _check_count(count, "set_logical_cpu_devices(count)")
    if backend_is_started():
        if len(_started_cpu_devices()) != count:
            raise _too_late_for(count, f"set_logical_cpu_devices({count})", _SET_FIRST)
    else:
        _agreed_count(dataclasses.replace(_wishes, cpu_devices=count))
        start_cpus_within(_cpu_start)
    _wishes.cpu_devices = count


def hold_stated_devices() -> None:
    """Makes the stated number of logical CPU devices hold for whatever starts the backend.

    Does not start it.
    """
    if not backend_is_started():
        start_cpus_within(_cpu_start)


def stated_cpu_devices() -> int | None:
    """Returns the number of logical CPU devices that was configured, None if none was.

    Reads `set_logical_cpu_devices`, `UNISON_CPU_DEVICES`, JAX's `jax_num_cpu_devices` and
    `XLA_FLAGS`. Does not start the backend.

    Raises:
        DeviceCountConflictError: they disagree.
    """
    return _agreed_count(_wishes)


def set_pool_threads(count: int) -> None:
    """Requests `count` threads in XLA's intra-op pool; 0 leaves the choice to Unison.

    The pool never has fewer threads than there are devices.

    Raises:
        ValueError: `count` is not an integer of at least 0.
        BackendStartedError: the backend is already running.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"Expected a number of threads, 0 or more. Received: {count!r}.")
    if count == _wishes.pool_threads:
        return
    if backend_is_started():
        raise BackendStartedError(
            "Intra op parallelism cannot be modified after initialization: XLA's threads already "
            f"run. Received: {count}. Set it before the first JAX computation."
        )
    _wishes.pool_threads = count


def pool_threads_wished() -> int:
    """Returns the argument of the last `set_pool_threads`; 0 if it was not called."""
    return _wishes.pool_threads


def set_visible_gpus(indices: Sequence[int] | None) -> None:
    """Makes only these GPUs of this machine visible to JAX; none with `()`, all with None.

    Raises:
        BackendStartedError: the backend is already running.
    """
    wished = None if indices is None else tuple(indices)
    if wished == _wishes.visible_gpus:
        return
    if backend_is_started():
        raise BackendStartedError(
            "Visible devices cannot be modified after being initialized. "
            f"Received: GPUs {wished}. Choose them before the first JAX computation."
        )
    _wishes.visible_gpus = wished


def visible_gpus() -> tuple[int, ...] | None:
    """Returns the argument of the last `set_visible_gpus`; None means all."""
    return _wishes.visible_gpus


def set_gpu_preallocation(enabled: bool) -> None:
    """Sets whether JAX preallocates most of a GPU's memory at startup, as it does by default.

    Raises:
        BackendStartedError: the backend is already running.
    """
    if enabled == _wishes.preallocate_gpu_memory:
        return
    if backend_is_started():
        raise BackendStartedError(
            "Physical devices cannot be modified after being initialized. Choose how GPU memory "
            "is allocated before the first JAX computation."
        )
    _wishes.preallocate_gpu_memory = enabled


def gpu_preallocation() -> bool | None:
    """Returns the argument of the last `set_gpu_preallocation`; None means JAX's default."""
    return _wishes.preallocate_gpu_memory


def enable_op_determinism() -> None:
    """Makes programs give the same bits in every run on the same kind of GPU.

    XLA then adds in a fixed order, also where a scatter would let threads add as they come, and
    chooses kernels without measuring them: programs can be slower, by how much depends on their
    operations. On CPUs and TPUs this changes nothing. Seeds (`keras.utils.set_random_seed`) and the
    order of the input (`deterministic=True`) are needed besides.

    Must be called before the first JAX computation, in every process of a job. A second call has no
    effect. See `tf.config.experimental.enable_op_determinism`.

    Raises:
        BackendStartedError: the backend is already running, with a GPU.

    Examples:
        ```
        unison.enable_op_determinism()
        strategy = unison.MirroredStrategy()
        ```
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _DETERMINISTIC in flags.split():
        return
    if backend_is_started():
        if jax.default_backend() != "gpu":
            return
        raise BackendStartedError(
            "Deterministic operations must be requested before the first JAX computation. Call "
            f"enable_op_determinism first, or set XLA_FLAGS={_DETERMINISTIC}."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {_DETERMINISTIC}".strip()


def prepare_backend() -> None:
    """Starts JAX's backend with the requested logical CPU devices and enough threads.

    May be called any number of times, also after `jax.extend.backend.clear_backends()`: if a
    backend is running, it only checks that the backend has the requested devices. In a
    multi-process job, call it after `jax.distributed.initialize`.

    Raises:
        DeviceCountConflictError: the settings of the number of logical CPU devices disagree.
        BackendStartedError: the backend is already running with another number.
    """
    with _PREPARE_LOCK:
        count = stated_cpu_devices()
        if backend_is_started():
            _check_started_backend(count)
            return
        _apply_to_jax_config(count)
        with _cpu_start():
            jax.devices()


@contextlib.contextmanager
def _cpu_start() -> Iterator[int | None]:
    """Context in which JAX starts its CPU devices; yields their number, None if none is stated."""
    count = stated_cpu_devices()
    if (count is not None and count > 1) or jax.distributed.is_initialized():
        keep_freed_memory()
    with environment(_start_environment(count or 1)):
        yield count


def local_devices() -> list[jax.Device]:
    """Returns this process's devices: all accelerators, else all logical CPU devices.

    Prepares the backend first (`prepare_backend`).
    """
    prepare_backend()
    return list(jax.local_devices())


def default_devices() -> list[jax.Device]:
    """Returns a strategy's default devices: `local_devices`, or those of `planned_for`."""
    return list(_planned_devices) or local_devices()


@contextlib.contextmanager
def planned_for(described: Sequence[jax.Device]) -> Iterator[None]:
    """Makes strategies inside the context use described devices, whichever they ask for."""
    global _planned_devices
    before = _planned_devices
    _planned_devices = tuple(described)
    try:
        yield
    finally:
        _planned_devices = before


def planned_devices() -> tuple[jax.Device, ...]:
    """Returns the devices that strategies use inside `planned_for`; outside, none."""
    return _planned_devices


def _check_count(count: object, said_by: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise DeviceCountError(
            f"Expected a number of logical CPU devices, an integer of at least 1. "
            f"Received: {said_by} = {count!r}."
        )


def _stated_counts(wishes: _Wishes) -> dict[str, int]:
    """Returns the configured numbers of logical CPU devices, by the setting's name in errors."""
    counts = {}
    if wishes.cpu_devices is not None:
        counts["set_logical_cpu_devices (or tf.config)"] = wishes.cpu_devices
    if variable := os.environ.get(CPU_DEVICES_VARIABLE, "").strip():
        said_by = f"environment variable {CPU_DEVICES_VARIABLE}"
        _check_count(int(variable) if variable.isdecimal() else variable, said_by)
        counts[said_by] = int(variable)
    return counts | _counts_of_jax()


def _counts_of_jax() -> dict[str, int]:
    counts = {}
    if jax.config.values["jax_num_cpu_devices"] >= 0:
        counts["JAX option jax_num_cpu_devices"] = jax.config.values["jax_num_cpu_devices"]
    if flags := _XLA_COUNT_FLAG.findall(os.environ.get("XLA_FLAGS", "")):
        counts["XLA_FLAGS --xla_force_host_platform_device_count"] = int(flags[-1])
    return counts


def _agreed_count(wishes: _Wishes) -> int | None:
    counts = _stated_counts(wishes)
    if len(set(counts.values())) > 1:
        listed = "; ".join(f"{said_by} says {count}" for said_by, count in counts.items())
        raise DeviceCountConflictError(
            f"Expected one number of logical CPU devices. Received: {listed}. "
            "Remove all but one, or make them equal."
        )
    return next(iter(counts.values()), None)


def _check_started_backend(count: int | None) -> None:
    if count is not None and (started := _started_cpu_devices()) and len(started) != count:
        said_by = " and ".join(_stated_counts(_wishes))
        raise _too_late_for(count, said_by, _START_FIRST)


_SET_FIRST = "Set the number before the first JAX computation (also before jax.devices())"
_START_FIRST = (
    "JAX or plain Keras has started it before Unison could: before they compute, call "
    "unison.set_logical_cpu_devices (or tf.config), or create the strategy"
)


def _too_late_for(count: int, said_by: str, remedy: str) -> BackendStartedError:
    return BackendStartedError(
        "Virtual devices cannot be modified after being initialized: "
        f"expected {count} logical CPU devices ({said_by}). Received: a JAX backend that already "
        f"runs with {len(_started_cpu_devices())}. {remedy}; or start the program with "
        f"{CPU_DEVICES_VARIABLE}={count} and let Unison start the backend."
    )


def _started_cpu_devices() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return []


def _apply_to_jax_config(count: int | None) -> None:
    if count is not None and not _counts_of_jax():
        jax.config.update("jax_num_cpu_devices", count)
    if _wishes.visible_gpus is None:
        return
    if _wishes.visible_gpus:
        for option in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(option, ",".join(map(str, _wishes.visible_gpus)))
        return
    platforms = (jax.config.values["jax_platforms"] or "cpu").split(",")
    kept = [name for name in platforms if name not in _ACCELERATOR_PLATFORMS]
    jax.config.update("jax_platforms", ",".join(kept or ["cpu"]))


def _start_environment(cpu_devices: int) -> dict[str, str]:
    variables = {}
    threads = _wishes.pool_threads
    if cpu_devices > 1:
        threads = threads or _nproc_variable() or available_cores()
    if threads:
        variables["NPROC"] = str(threads)
    if _wishes.preallocate_gpu_memory is not None:
        value = "true" if _wishes.preallocate_gpu_memory else "false"
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = value
    if "TPU_SKIP_MDS_QUERY" in os.environ:  # JAX has found that there is no TPU
        variables |= WITHOUT_A_TPU
    return variables


def _nproc_variable() -> int:
    value = os.environ.get("NPROC", "")
    return int(value) if value.isdecimal() else 0
