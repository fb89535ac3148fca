"""`tf.test`: the questions that programs ask about the machine."""

from __future__ import annotations

import importlib.util
from typing import Any

from unison.tf import config
from unison.tf.missing import names_missing_from

__getattr__ = names_missing_from(__name__)


def is_gpu_available(
    cuda_only: bool = False, min_cuda_compute_capability: tuple[int, int] | None = None
) -> bool:
    """Whether there is a GPU that JAX can use. TF: `tf.test.is_gpu_available`."""
    return bool(config.list_logical_devices("GPU"))


def gpu_device_name() -> str:
    """Returns "/device:GPU:0", or an empty text. TF: `tf.test.gpu_device_name`."""
    gpus = config.list_logical_devices("GPU")
    return gpus[0].name if gpus else ""


def is_built_with_cuda() -> bool:
    """Whether JAX's package for CUDA is installed. TF: `tf.test.is_built_with_cuda`."""
    return _has_plugin("cuda12") or _has_plugin("cuda13")


def is_built_with_rocm() -> bool:
    """TF: `tf.test.is_built_with_rocm`."""
    return _has_plugin("rocm7") or _has_plugin("rocm60")


def is_built_with_gpu_support() -> bool:
    """TF: `tf.test.is_built_with_gpu_support`."""
    return is_built_with_cuda() or is_built_with_rocm()


def is_built_with_xla() -> bool:
    """Always true. TF: `tf.test.is_built_with_xla`."""
    return True


def is_cpu_target_available(target: Any) -> bool:
    """Always false: JAX does not report the instructions that it uses.

    TF: `tf.test.is_cpu_target_available`.
    """
    return False


def _has_plugin(platform: str) -> bool:
    return importlib.util.find_spec(f"jax_{platform}_plugin") is not None
