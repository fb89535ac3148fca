"""Programs that XLA's GPU compiler makes for GPUs that are not here.

`test_compiled_steps` compares them with those that an expert writes in plain JAX.
"""

import collections
import re

import jax
import jax.numpy as jnp
import jaxlib
import keras
import pytest

import unison
from gpu_compiling import FOLDER, compiler, needs_gpu_compiler  # noqa: F401
from subprocess_program import run_program
from unison.planning import gpu_compiler, plan_fit, plan_run, target
from unison.planning.collectives import collectives_of
from unison.planning.hardware import names
from unison.planning.overlap import hidden_share, overlaps_of

#: An MLP with gradients of 192 MiB: XLA sums up to 30 MiB at a time.
LAYERS, WIDTH, BATCH = 12, 2048, 256

pytestmark = [pytest.mark.slow, needs_gpu_compiler, pytest.mark.usefixtures("compiler")]

#: The target of the tests that run before every commit.
H100 = pytest.param("h100:8", marks=pytest.mark.smoke)


def planned(name, layers=LAYERS, optimizer="sgd", width=WIDTH, **options):
    """Returns the plan of a training step of an MLP on a target."""
    with target(name):
        strategy = unison.MirroredStrategy(**options)
        with strategy.scope():
            hidden = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(layers)]
            model = keras.Sequential([keras.Input((width,)), *hidden])
            model.compile(optimizer, "mse")
        x = jax.ShapeDtypeStruct((strategy.num_replicas_in_sync * BATCH, width), "float32")
        return plan_fit(model, x, x)


def bytes_summed(hlo):
    return sum(one.bytes * one.runs for one in collectives_of(hlo) if one.kind == "all-reduce")


@pytest.mark.parametrize("name", [H100, "h100:4x8", "h200:8", "b200:8"])
def test_gradients_are_summed_behind_the_backward_pass(name):
    plan = planned(name)
    assert plan.hidden_share >= 0.8
    assert products_after_the_first_sum(plan.hlo) >= LAYERS // 2
    (large, *_) = plan.collectives
    assert (large.kind, large.bytes) == ("all-reduce", 4 * WIDTH**2)  # each gradient by itself


def products_after_the_first_sum(hlo):
    """The matrix products of the backward pass that a device starts after its first sum."""
    lines = hlo[hlo.index("\nENTRY") :].splitlines()
    first = next(place for place, line in enumerate(lines) if " all-reduce-start(" in line)
    return sum("gemm" in line.partition(" = ")[0] for line in lines[first:])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_divided_gradients_are_scattered_behind_the_backward_pass(zero):
    """By ZeRO's paper, a step sends as much as an all-reduce, or half more if weights are divided:
    these are gathered for the forward and the backward pass."""
    with target("h100:8"):
        strategy = unison.ModelParallelStrategy(mesh={"batch": 8}, zero=zero)
        with strategy.scope():
            hidden = [keras.layers.Dense(WIDTH, "tanh", use_bias=False) for _ in range(LAYERS)]
            model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
            model.compile("adam", "mse")
        x = jax.ShapeDtypeStruct((8 * BATCH, WIDTH), "float32")
        plan = plan_fit(model, x, x)
    sums = collections.Counter()
    for one in plan.collectives:
        sums[one.kind] += one.bytes * one.runs if one.bytes > 64 else 0
    gradients = 4 * LAYERS * WIDTH**2
    assert sums["reduce-scatter"] == gradients
    assert sums["all-reduce"] == 0
    if zero < 3:
        assert sums["all-gather"] == gradients
    else:
        assert 1.5 * gradients < sums["all-gather"] < 2 * gradients
    assert plan.hidden_share >= 0.8
    assert plan.memory.temporaries < 0.5 * gradients  # those that have not been scattered yet


def test_calls_of_libraries_count_as_bytes():
    """On a P100, products are calls of cuBLAS."""
    plan = planned("p100:2", layers=1)
    assert "custom-call(" in plan.hlo
    weights = 4 * WIDTH**2
    assert plan.bytes_accessed > 3 * weights  # read forwards, the gradient written, updated


def test_bytes_per_pack_is_what_xla_sums_at_a_time():
    """XLA would sum these gradients, of 24 MiB, together: behind nothing."""
    layers = 6
    together = planned("h100:8", layers, width=1024)
    assert [one.bytes for one in together.collectives if one.bytes > 64] == [4 * layers * 1024**2]
    options = unison.CommunicationOptions(bytes_per_pack=2**22)
    apart = planned("h100:8", layers, width=1024, communication_options=options)
    sums = [one for one in apart.collectives if one.bytes > 64]
    assert {one.bytes for one in sums} == {4 * 1024**2}
    assert sum(one.runs for one in sums) == layers
    assert together.hidden_share < 0.1 < 0.8 <= apart.hidden_share


def test_a_loop_of_ones_own_is_summed_behind_the_backward_pass():
    with target("h100:8"):
        strategy = unison.MirroredStrategy()
        with strategy.scope():
            variables = [unison.Variable(jnp.zeros((WIDTH, WIDTH))) for _ in range(LAYERS)]
            optimizer = unison.train.Momentum(0.1, 0.9)

        def loss(weights, x):
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return jnp.mean(x**2)

        def step(x):
            gradients = jax.grad(loss)([variable.value() for variable in variables], x)
            optimizer.apply(gradients, variables)

        x = unison.PerReplica([jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")] * 8)
        plan = plan_run(strategy, step, [x])
    assert plan.hidden_share >= 0.8
    assert bytes_summed(plan.hlo) == 4 * LAYERS * WIDTH**2


def test_all_state_is_donated():
    plan = planned("h100:8", optimizer="adam")
    aliases = plan.hlo.partition("\n")[0].partition("input_output_alias={")[2]
    state = sum(plan.memory.state.values())
    assert aliases.count("may-alias") >= 3 * LAYERS
    assert plan.memory.results < 0.001 * state


def test_nothing_is_in_float32_that_the_policy_has_in_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plan = planned("h100:8")
    finally:
        keras.config.set_dtype_policy("float32")
    assert plan.is_16_bit
    products = re.findall(r" dot\(%?([\w.\-]+), %?([\w.\-]+)\)", plan.hlo)
    calls = re.findall(r" custom-call\(%?([\w.\-]+), %?([\w.\-]+).*__cublas", plan.hlo)
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", plan.hlo))
    assert len(products) + len(calls) == 3 * LAYERS - 1
    assert {dtypes[name] for pair in products + calls for name in pair} == {"bf16"}


def test_add_n_asks_for_one_sum_of_all_gradients():
    options = unison.CommunicationOptions(method="ADD_N")
    plan = planned("h100:8", communication_options=options)
    (large, *_) = plan.collectives
    assert large.bytes == 4 * LAYERS * WIDTH**2


def test_operations_are_counted():
    plan = planned("h100:8")
    products = 3 * LAYERS - 1  # the first layer's input needs no gradient
    assert plan.flops == pytest.approx(products * 2 * BATCH * WIDTH**2, rel=0.01)


@pytest.mark.parametrize("name", names("devices", "gpu"))
def test_every_gpu_can_be_compiled_for(name):
    plan = planned(f"{name}:2", layers=1)
    assert not plan.is_estimate
    assert (plan.num_devices, plan.collectives[0].bytes) == (2, 4 * WIDTH**2)


def test_the_program_can_be_written(tmp_path):
    from unison.cli import main

    script, hlo = tmp_path / "train.py", tmp_path / "step.hlo"
    script.write_text(
        "import jax, unison\n"
        "strategy = unison.MirroredStrategy()\n"
        "strategy.run(lambda x: unison.get_replica_context().all_reduce('SUM', x), (1.0,))\n"
    )
    assert main(["plan", "--target", "h100:2", "--hlo", str(hlo), str(script)]) == 0
    assert hlo.read_text().startswith("HloModule")
    assert [one.collective.kind for one in overlaps_of(hlo.read_text())] == ["all-reduce"]


def test_a_program_is_written_of_one_target_only(tmp_path, capsys):
    from unison.cli import main

    script = tmp_path / "train.py"
    script.write_text("")
    options = ["--target", "h100:2", "--target", "h100:4", "--hlo", str(tmp_path / "hlo")]
    assert main(["plan", *options, str(script)]) == 2
    assert "Expected one --target with --hlo" in capsys.readouterr().err


def test_a_folder_without_the_compiler_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv(gpu_compiler.VARIABLE, str(tmp_path))
    with pytest.raises(gpu_compiler.GPUCompilerError, match=r"jax-cuda12-pjrt==") as raised:
        gpu_compiler.library()
    assert str(tmp_path) in str(raised.value)


def test_a_compiler_of_another_jax_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "xla_cuda_plugin.so").touch()
    (tmp_path / "version.py").write_text('_version = "0.1.2"\n')
    monkeypatch.setenv(gpu_compiler.VARIABLE, str(tmp_path))
    with pytest.raises(gpu_compiler.GPUCompilerError, match=rf"{jaxlib.__version__}.*0\.1\.2"):
        gpu_compiler.library()


def test_a_compiler_of_another_jax_in_the_environment_is_not_used(monkeypatch, tmp_path):
    plugin = tmp_path / "jax_plugins" / "xla_cuda12"
    plugin.mkdir(parents=True)
    (plugin / "xla_cuda_plugin.so").touch()
    (plugin / "version.py").write_text("_release_version: str = '0.1.2'\n")
    monkeypatch.delenv(gpu_compiler.VARIABLE)
    monkeypatch.syspath_prepend(tmp_path)
    assert gpu_compiler.library() is None


def test_a_program_that_is_not_scheduled_has_no_order():
    assert overlaps_of("HloModule step\nENTRY %main () -> f32[] {\n}\n") == []
    assert hidden_share([]) is None


ROWS_ARE_ADDED = """
import sys
import jax, numpy as np
import unison
from unison.planning import plan_run, target

if sys.argv[1] == "deterministic":
    unison.enable_op_determinism()
with target("h100:1"):
    strategy = unison.MirroredStrategy()
    with strategy.scope():
        table = unison.Variable(np.zeros((50, 16), np.float32))

    def step(rows, values):
        table.assign(table.read_value().at[rows].add(values))

    rows = jax.ShapeDtypeStruct((640,), "int32")
    values = jax.ShapeDtypeStruct((640, 16), "float32")
    plan = plan_run(strategy, step, (rows, values))
print([line for line in plan.hlo.splitlines() if " scatter(" in line])
"""


@pytest.mark.parametrize("way", ["deterministic", "fast"])
def test_with_determinism_no_two_threads_add_to_one_row(way):
    folder = {gpu_compiler.VARIABLE: FOLDER}
    finished = run_program(ROWS_ARE_ADDED, way, imported=("jax",), env=folder)
    assert " scatter(" in finished.stdout, finished.stderr
    assert ("unique_indices=true" in finished.stdout) == (way == "deterministic")
