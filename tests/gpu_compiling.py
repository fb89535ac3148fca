"""XLA's GPU compiler in tests, on machines without a GPU."""

import os
import pathlib

import pytest
from benchmarks.compiled_steps import GPU_COMPILER

from unison.planning import gpu_compiler
from unison.planning.clusters import described_devices

#: Where it is.
FOLDER = os.environ.get(gpu_compiler.VARIABLE, GPU_COMPILER)

needs_gpu_compiler = pytest.mark.skipif(
    not list(pathlib.Path(FOLDER).rglob("xla_cuda_plugin.so")),
    reason=f"XLA's GPU compiler is not installed in {FOLDER}",
)


@pytest.fixture
def compiler(monkeypatch):
    """The compiler, and its devices, are found anew, before a test and after it."""
    monkeypatch.setenv(gpu_compiler.VARIABLE, FOLDER)
    _forget()
    yield
    _forget()


def _forget():
    for cached in (gpu_compiler.library, described_devices):
        cached.cache_clear()
