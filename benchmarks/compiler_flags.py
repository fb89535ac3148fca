"""What XLA's flags do to compiled steps: `python -m benchmarks.compiler_flags [--target h100:8]`.

Compiles training steps of a few models for GPUs or TPUs that are not here, once as XLA compiles
them by default and once with each flag, and prints what the programs take, as a table in Markdown:
temporaries, kernels, collectives, and the share of the collectives' bytes that has work to hide
behind. Each step is traced once, and compiled with the flags as options of the compiler, which are
what `XLA_FLAGS` and `LIBTPU_INIT_ARGS` set for a whole process. An unknown one is listed as such.

GPUs need XLA's GPU compiler (`pip install 'unison[plan-gpu]'`, or `UNISON_GPU_COMPILER`), and TPUs
libtpu (`pip install 'unison[tpu]'`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import keras
import numpy as np
from keras import layers

import unison
from unison.planning import gpu_compiler, target
from unison.planning.collectives import collectives_of
from unison.planning.kernels import kernels_of
from unison.planning.overlap import hidden_share, overlaps_of
from unison.runtime.planned import PlannedProgram, ProgramPlanned, planning

_LAYERS = 12
_WIDTH = 2048
_EXAMPLES_OF_REPLICA = 256

#: A small GPT: its width, heads, tokens of an example, vocabulary, and examples of a replica.
_GPT_WIDTH, _HEADS, _TOKENS, _VOCABULARY, _SEQUENCES_OF_REPLICA = 768, 12, 1024, 50304, 8

#: These change only the machine code of a GPU's kernels, which is not measured, and compile it in
#: half of the time.
_QUICK_KERNELS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

#: JAX's levels of optimization, as an option of the compiler: `jax_optimization_level`.
_LEVELS = {"O1": 19}
_LEVEL = "JAX_OPTIMIZATION_LEVEL"

#: The compiler's options are typed.
_BOOLEANS = {"true": True, "false": False}

_MIB = 2**20
FLAGS = {
    "gpu": (
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_enable_analytical_sol_latency_estimator=false",
        f"{_LEVEL}=O1",
        f"--xla_gpu_all_reduce_combine_threshold_bytes={4 * _MIB}",
        f"--xla_gpu_all_reduce_combine_threshold_bytes={1024 * _MIB}",
        f"--xla_gpu_reduce_scatter_combine_threshold_bytes={4 * _MIB}",
        f"--xla_gpu_all_gather_combine_threshold_bytes={1024 * _MIB}",
        "--xla_gpu_experimental_enable_heuristic_collective_combining=true",
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=false",
        "--xla_gpu_enable_while_loop_double_buffering=true",
        "--xla_gpu_experimental_parallel_collective_overlap_limit=4",
        "--xla_gpu_disable_async_collectives=ALLREDUCE,ALLGATHER,REDUCESCATTER",
        "--xla_gpu_memory_limit_slop_factor=10",
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_deterministic_ops=true",
        "--xla_gpu_enable_nccl_user_buffers=true",
    ),
    "tpu": (
        "--xla_tpu_enable_latency_hiding_scheduler=false",
        "--xla_tpu_enable_async_collective_fusion=false",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=false",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
        "--xla_enable_async_all_reduce=true "
        "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
        f"--xla_jf_crs_combiner_threshold_in_bytes={4 * _MIB}",
        f"--xla_jf_crs_combiner_threshold_in_bytes={4 * _MIB} --xla_enable_async_all_reduce=true "
        "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
        "--xla_tpu_enable_data_parallel_all_reduce_opt=true "
        "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        "--xla_tpu_scoped_vmem_limit_kib=98304",
    ),
}

#: The name of the row without a flag.
DEFAULT = "(none)"


class Row(NamedTuple):
    """A step of a model, compiled with a set of flags.

    Attributes:
        temporaries: In MiB, on each device.
        kernels: Those that a device launches in a step, with repetitions in loops.
        collectives: For each kind, how many a step runs and the MiB of all of them.
        hidden_share: Of their bytes, with work to hide behind; None without collectives.
    """

    temporaries: float
    kernels: int
    collectives: dict[str, tuple[int, float]]
    hidden_share: float | None

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Row:
        hlo = compiled.as_text() or ""
        memory: Any = compiled.memory_analysis()
        found: dict[str, tuple[int, float]] = {}
        for one in collectives_of(hlo):
            count, size = found.get(one.kind, (0, 0.0))
            found[one.kind] = (count + one.runs, size + one.runs * one.bytes / _MIB)
        share = hidden_share(overlaps_of(hlo))
        return cls(memory.temp_size_in_bytes / _MIB, kernels_of(hlo), found, share)

    def cells(self) -> tuple[str, ...]:
        collectives = ", ".join(
            f"{count} {kind} of {size:,.0f}"
            for kind, (count, size) in sorted(self.collectives.items())
        )
        hidden = "" if self.hidden_share is None else f"{self.hidden_share:.0%}"
        return f"{self.temporaries:,.0f}", f"{self.kernels:,}", collectives, hidden


class Stacked(layers.Layer):
    """Layers whose weights are stacked, over which a loop iterates."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.kernels = self.add_weight((_LAYERS, shape[-1], shape[-1]), name="kernels")

    def call(self, inputs: jax.Array) -> jax.Array:
        def layer(hidden: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return jax.numpy.tanh(hidden @ kernel), None

        return jax.lax.scan(layer, inputs, keras.ops.convert_to_tensor(self.kernels))[0]


def _mlp(optimizer: str, hidden: list[layers.Layer]) -> tuple[Any, Any, Any]:
    model = keras.Sequential([keras.Input((_WIDTH,)), *hidden])
    model.compile(optimizer, "mse")
    count = unison.get_strategy().num_replicas_in_sync * _EXAMPLES_OF_REPLICA
    x = _array((count, _WIDTH), "float32")
    return model, x, x


def _dense() -> list[layers.Layer]:
    return [layers.Dense(_WIDTH, "tanh", use_bias=False) for _ in range(_LAYERS)]


def _gpt() -> tuple[Any, Any, Any]:
    """GPT-2's smallest network, without biases, in bfloat16 with weights in float32."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((_TOKENS,), dtype="int32")
    hidden = layers.Embedding(_VOCABULARY, _GPT_WIDTH)(tokens)
    for _ in range(_LAYERS):
        seen = layers.LayerNormalization(center=False)(hidden)
        attention = layers.MultiHeadAttention(_HEADS, _GPT_WIDTH // _HEADS, use_bias=False)
        hidden += attention(seen, seen, use_causal_mask=True)
        seen = layers.LayerNormalization(center=False)(hidden)
        wide = layers.Dense(4 * _GPT_WIDTH, activation="gelu", use_bias=False)(seen)
        hidden += layers.Dense(_GPT_WIDTH, use_bias=False)(wide)
    seen = layers.LayerNormalization(center=False)(hidden)
    model = keras.Model(tokens, layers.Dense(_VOCABULARY, use_bias=False)(seen))
    model.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    count = unison.get_strategy().num_replicas_in_sync * _SEQUENCES_OF_REPLICA
    ids = _array((count, _TOKENS), "int32")
    return model, ids, ids


def _array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an array that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class Model(NamedTuple):
    """A model to compile.

    Attributes:
        about: What it is.
        zero: What the replicas divide: 0 for nothing.
        build: Makes it in the scope of a strategy; returns it with its inputs and targets.
    """

    about: str
    zero: int
    build: Callable[[], tuple[Any, Any, Any]]


MODELS = {
    "mlp": Model("12 layers of 2048, SGD, data parallel", 0, lambda: _mlp("sgd", _dense())),
    "zero2": Model("12 layers of 2048, Adam, zero=2", 2, lambda: _mlp("adam", _dense())),
    "zero3": Model("12 layers of 2048, Adam, zero=3", 3, lambda: _mlp("adam", _dense())),
    "scan": Model("the same in a jax.lax.scan, zero=3", 3, lambda: _mlp("adam", [Stacked()])),
    "gpt": Model("GPT of 12 layers of 768, AdamW, bfloat16, data parallel", 0, _gpt),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiler_flags",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default="h100:8", metavar="NAME", help="as for `unison plan` (%(default)s)")
    add("--model", action="append", choices=tuple(MODELS), help="only this one; several times")
    add(
        "--flags",
        action="append",
        metavar="FLAGS",
        help="only these, instead of the known ones: --flags='--xla_gpu_...=true'; several times",
    )
    add("--json", type=pathlib.Path, metavar="PATH", help="write everything there")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, Row | str]] = {}
    for name in options.model or MODELS:
        program = traced(MODELS[name], options.target)
        flags = options.flags or FLAGS[program.placement.devices[0].platform]
        print(f"\n{name}: {MODELS[name].about}, {options.target}\n\n{_HEAD}", flush=True)
        found[name] = {}
        for setting in (DEFAULT, *flags):
            found[name][setting] = row = compiled(program, setting)
            print(line_of(setting, row), flush=True)
    if options.json:
        told = {
            name: {
                setting: row if isinstance(row, str) else row._asdict()
                for setting, row in rows.items()
            }
            for name, rows in found.items()
        }
        written = {"target": options.target, "versions": _versions(), "found": told}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return int(any(isinstance(rows[DEFAULT], str) for rows in found.values()))


def traced(model: Model, target_name: str) -> PlannedProgram:
    """Returns the training step of a model, lowered for the devices of a target.

    Raises:
        RuntimeError: The target's own compiler is not installed.
    """
    keras.config.set_dtype_policy("float32")
    with target(target_name):
        strategy: unison.Strategy = unison.MirroredStrategy()
        platform = strategy.placement.devices[0].platform
        if platform not in FLAGS:
            raise RuntimeError(
                f"Expected the compiler of {target_name}. Received: that of {platform}s. Install "
                "it: pip install 'unison[plan-gpu]', or name its folder in UNISON_GPU_COMPILER."
            )
        if model.zero:
            mesh = {"batch": strategy.num_replicas_in_sync}
            strategy = unison.ModelParallelStrategy(mesh=mesh, zero=model.zero)
        with strategy.scope():
            built, x, y = model.build()
        try:
            with planning():
                built.train_on_batch(x, y)
        except ProgramPlanned as planned:
            return planned.program
    raise AssertionError(f"{model.about} has no step for {target_name}")


def compiled(program: PlannedProgram, setting: str) -> Row | str:
    """Compiles a step with a set of flags, and returns what it takes, or why it was refused."""
    is_gpu = program.placement.devices[0].platform == "gpu"
    given = gpu_compiler.options() | _QUICK_KERNELS if is_gpu else {}
    try:
        return Row.of(program.lowered.compile(given | options_of(setting)))
    except jax.errors.JaxRuntimeError as error:
        return f"refused: {str(error).splitlines()[0]}"


def options_of(setting: str) -> dict[str, str | int]:
    """Returns the options of the compiler for a set of flags.

    Args:
        setting: Flags with values, as in `XLA_FLAGS`; `JAX_OPTIMIZATION_LEVEL=O1`; or `DEFAULT`.
    """
    if setting == DEFAULT:
        return {}
    options: dict[str, str | int] = {}
    for flag in setting.split():
        name, _, value = flag.removeprefix("--").partition("=")
        if name == _LEVEL:
            options["optimization_level"] = _LEVELS[value]
        else:
            options[name] = int(value) if value.isdecimal() else _BOOLEANS.get(value, value)
    return options


_HEAD = """| flags | temporaries, MiB | kernels | collectives, MiB | with work to hide behind |
| --- | --- | --- | --- | --- |"""


def line_of(setting: str, row: Row | str) -> str:
    """Returns a line of a table."""
    label = setting if setting == DEFAULT else f"`{setting}`"
    cells = (row, "", "", "") if isinstance(row, str) else row.cells()
    return f"| {label} | {' | '.join(cells)} |"


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "libtpu", "keras")
    installed = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in names if name in installed}


if __name__ == "__main__":
    sys.exit(main())
