"""The flags of XLA that the pages about GPUs and TPUs name, and what the benchmark says of them."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from gpu_compiling import compiler, needs_gpu_compiler  # noqa: F401
from subprocess_program import PYTHON_PATH

ROOT = pathlib.Path(__file__).parents[2]

START_JAX = "import jax; jax.devices()"
DESCRIBE_A_SLICE = "from unison.runtime.tpu.slices import describe_slice; describe_slice('v5e:2x2')"


@pytest.fixture
def compiler_flags(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import compiler_flags

    return compiler_flags


def flags_in(page, platform):
    """The flags of a page that have a value there."""
    text = (ROOT / "docs" / page).read_text()
    return sorted(set(re.findall(rf"--xla_(?!{platform})\w+=[^\s`|'\"]*", text)))


def started_with(variable, flags, program):
    """What a program prints that starts with flags; XLA ends a process at one that it lacks."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "XLA_FLAGS": "", variable: " ".join(flags)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_xla_knows_the_flags_of_the_page_about_gpus():
    flags = flags_in("gpus.md", "tpu")
    assert len(flags) > 15
    assert started_with("XLA_FLAGS", flags, START_JAX) == (0, "")


def test_libtpu_knows_the_flags_of_the_page_about_tpus():
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
    flags = flags_in("tpu.md", "gpu")
    assert len(flags) > 5
    assert started_with("LIBTPU_INIT_ARGS", flags, DESCRIBE_A_SLICE) == (0, "")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_pages_have_the_flags_that_the_benchmark_compiles_with(compiler_flags, platform):
    page = {"gpu": "gpus.md", "tpu": "tpu.md"}[platform]
    text = (ROOT / "docs" / page).read_text()
    assert [flags for flags in compiler_flags.FLAGS[platform] if flags not in text] == []


def test_flags_are_options_of_the_compiler(compiler_flags):
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_x="
    assert compiler_flags.options_of(flags) == {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_x": "",
    }
    assert compiler_flags.options_of("JAX_OPTIMIZATION_LEVEL=O1") == {"optimization_level": 19}
    assert compiler_flags.options_of(compiler_flags.DEFAULT) == {}


def test_a_row_has_the_collectives_of_each_kind(compiler_flags):
    collectives = {"reduce-scatter": (1, 192.0), "all-gather": (12, 192.0)}
    row = compiler_flags.Row(1216.4, 88, collectives, 0.456)
    assert compiler_flags.line_of("--xla_gpu_x=1", row) == (
        "| `--xla_gpu_x=1` | 1,216 | 88 | 12 all-gather of 192, 1 reduce-scatter of 192 | 46% |"
    )
    assert compiler_flags.line_of("(none)", "refused: why") == "| (none) | refused: why |  |  |  |"


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.usefixtures("compiler")
def test_sums_hide_behind_work_where_xla_hides_latencies(compiler_flags):
    """By default on H100s, where it knows how long collectives take; elsewhere if it is told to."""
    hides = "--xla_gpu_enable_latency_hiding_scheduler=true"
    shares = {}
    for target in ("h100:8", "a100:8"):
        program = compiler_flags.traced(compiler_flags.MODELS["mlp"], target)
        for flags in (compiler_flags.DEFAULT, hides):
            shares[target, flags] = compiler_flags.compiled(program, flags).hidden_share
    assert shares == {
        ("h100:8", compiler_flags.DEFAULT): 1.0,
        ("h100:8", hides): 1.0,
        ("a100:8", compiler_flags.DEFAULT): 0.0,
        ("a100:8", hides): 1.0,
    }
    told = compiler_flags.compiled(program, "--xla_gpu_there_is_none=1")
    assert told.startswith("refused: ")
    assert "xla_gpu_there_is_none" in told
