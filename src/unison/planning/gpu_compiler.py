"""XLA's GPU compiler on a machine without a GPU: where it is, and the devices that it compiles for.

JAX's plugin for CUDA contains the compiler. It needs neither a GPU nor a driver nor CUDA's
libraries, only a description of the device (`hardware.toml`).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re

import jax
from jaxlib.version import __version__ as jaxlib_version

from unison.planning.hardware import compiler_facts
from unison.runtime.private_jax import described_gpus

#: The variable with the folder in which the plugin is installed, if not in this environment: there,
#: JAX would load it at the start of every process.
VARIABLE = "UNISON_GPU_COMPILER"

_LIBRARY = "xla_cuda_plugin.so"
_VERSION = re.compile(r"^_(?:release_)?version\b[^=]*= *[\"']([^\"']+)[\"']", re.MULTILINE)

#: A GPU as XLA describes one (`stream_executor.GpuTargetConfigProto`). The numbers
#: written here are the same for all NVIDIA GPUs, or versions of libraries.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_memory_per_block}
  shared_memory_per_core: {shared_memory_per_core}
  core_count: {cores} fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {memory_rate} l2_cache_size: {l2_cache} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


class GPUCompilerError(ImportError):
    """The GPU compiler that `UNISON_GPU_COMPILER` names is missing, or another JAX's."""


@functools.cache
def library() -> pathlib.Path | None:
    """Returns the path of the library with XLA's GPU compiler; None if there is none for this JAX.

    Raises:
        GPUCompilerError: `UNISON_GPU_COMPILER` names a folder without it, or it was built for
            another version of JAX.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = sorted(pathlib.Path(named).resolve().rglob(_LIBRARY))
        if not found:
            raise GPUCompilerError(
                f"Expected a folder with JAX's plugin for CUDA in {VARIABLE}. Received: {named!r}, "
                f"without {_LIBRARY}. Install it there: pip install --no-deps --target {named} "
                f"jax-cuda12-pjrt=={jaxlib_version}"
            )
    else:
        plugins = importlib.util.find_spec("jax_plugins")
        folders = [] if plugins is None else list(plugins.submodule_search_locations or ())
        found = sorted(
            path for folder in folders for path in pathlib.Path(folder).glob(f"*/{_LIBRARY}")
        )
    if not found:
        return None
    version = _version_of(found[-1])
    if version in (None, jaxlib_version):
        return found[-1]
    if not named:
        return None  # JAX does not use it either
    raise GPUCompilerError(
        f"Expected JAX's plugin for CUDA of version {jaxlib_version}, as jaxlib. Received: "
        f"{version}, {found[-1]}. Install the same version: pip install --no-deps "
        f"jax-cuda12-pjrt=={jaxlib_version}"
    )


def _version_of(path: pathlib.Path) -> str | None:
    """Returns the version of JAX that a library belongs to; None if it says none."""
    beside = path.with_name("version.py")
    stated = _VERSION.findall(beside.read_text("utf-8")) if beside.is_file() else []
    return stated[-1] if stated else None


def gpus(name: str, machines: int, per_machine: int) -> list[jax.Device] | None:
    """Returns GPUs that programs can be compiled for; None if the compiler is not installed.

    Args:
        name: The device's name in `hardware.toml`: `"h100"`.
        machines: The number of machines.
        per_machine: The number of GPUs of each.

    Raises:
        GPUCompilerError: As for `library`.
    """
    path = library()
    if path is None:
        return None
    return described_gpus(str(path), target_of(name), machines, per_machine)


def options() -> dict[str, str]:
    """Returns XLA's options for compiling with NVIDIA's assembler that is installed beside it.

    XLA prefers that of a CUDA on the machine, which may not know the GPU.
    """
    path = library()
    beside = [] if path is None else [folder / "nvidia" / "cuda_nvcc" for folder in path.parents]
    return next(({"xla_gpu_cuda_data_dir": str(each)} for each in beside if each.is_dir()), {})


def target_of(name: str) -> str:
    """Returns a GPU of `hardware.toml` in XLA's form, a `GpuTargetConfigProto` as text."""
    facts = compiler_facts(name)
    major, minor = facts["capability"]
    return _TARGET.format(**facts, major=major, minor=minor)
