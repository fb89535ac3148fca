"""Fails when JAX moves a private name that Unison uses."""

import ast
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex
from jax.sharding import AxisType, PartitionSpec

from subprocess_program import SOURCE, run_program
from unison.runtime.private_jax import (
    counted_costs,
    dtype_before_cast,
    evaluated_as_traced,
    with_cache_misses,
)

PRIVATE = SOURCE / "unison/runtime/private_jax.py"


def imported_private_names() -> list[tuple[str, str]]:
    nodes = ast.walk(ast.parse(PRIVATE.read_text()))
    return [
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src")
        for alias in node.names
    ]


@pytest.mark.parametrize(("module", "name"), imported_private_names())
def test_jax_still_has_the_private_name(module, name):
    assert hasattr(importlib.import_module(module), name) or importlib.import_module(
        f"{module}.{name}"
    )


def names_asked_of_private_modules() -> list[tuple[str, str]]:
    """`module` and `name` for every `module.name` that the file says of what it imports."""
    modules = {name: f"{module}.{name}" for module, name in imported_private_names()}
    nodes = ast.walk(ast.parse(PRIVATE.read_text()))
    return sorted(
        {
            (modules[node.value.id], node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if node.value.id in modules
        }
    )


@pytest.mark.parametrize(("module", "name"), names_asked_of_private_modules())
def test_the_private_modules_still_have_what_is_asked_of_them(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_a_recording_processes_all_that_jax_differentiates():
    from jax._src.interpreters import ad

    from unison.runtime.private_jax import _Following

    of_jax = {
        name
        for trace in (ad.LinearizeTrace, ad.JVPTrace)
        for name in dir(trace)
        if name.startswith(("process_", "stage_"))
    }
    ours = {name for name in vars(_Following) if name.startswith(("process_", "stage_"))}
    assert ours == of_jax | {"process_call"}  # which JAX 0.10 has


def test_no_other_file_of_the_room_imports_private_names():
    others = [f for f in pathlib.Path(PRIVATE).parent.glob("*.py") if f != PRIVATE]
    assert [f.name for f in others if "import jax._src" in f.read_text()] == []
    assert [f.name for f in others if "from jax._src" in f.read_text()] == []


def test_a_jitted_function_calls_python_only_for_arguments_that_it_does_not_know():
    misses = []

    def around(miss):
        def noted(*args):
            misses.append(args)
            return miss(*args)

        return noted

    add = with_cache_misses(jax.jit(lambda x, y: x + y, donate_argnums=0), around)
    for x in (jnp.ones(3), jnp.ones(3), jnp.ones(4)):
        np.testing.assert_array_equal(add(x, 1.0), np.full(x.shape, 2.0))
        assert x.is_deleted()
    assert len(misses) == 2
    assert "add" in add.lower(jnp.ones(3), 1.0).as_text()


def test_operations_are_counted_in_a_module_that_is_not_compiled():
    lowered = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32"))
    assert counted_costs(lowered.compiler_ir("hlo").as_hlo_module())["flops"] == 2 * 8**3


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("_jax", "get_default_c_api_topology"),
        ("xla_client", "initialize_pjrt_plugin"),
        ("xla_client", "load_pjrt_plugin_dynamically"),
        ("xla_client", "pjrt_plugin_initialized"),
        ("xla_client", "pjrt_plugin_loaded"),
    ],
)
def test_jaxlib_still_has_what_describes_gpus(module, name):
    assert hasattr(importlib.import_module(f"jaxlib.{module}"), name)


def test_a_cast_is_seen_through_jitted_functions():
    seen = []

    @jax.jit
    def widened(x):
        return x.astype(jnp.float32)

    def function(x):
        seen.extend(map(dtype_before_cast, (x, x * 2, x.astype(jnp.float32), widened(x))))
        return x

    jax.make_jaxpr(function)(jnp.ones(3, jnp.float16))
    assert seen == [None, None, jnp.float16, jnp.float16]
    assert dtype_before_cast(jnp.ones(3)) is None


def test_backend_is_started_tells_when_and_starts_none():
    done = run_program(
        "import jax\n"
        "from unison.runtime.private_jax import backend_is_started\n"
        "print(backend_is_started(), backend_is_started())\n"
        "jax.devices()\n"
        "print(backend_is_started())\n"
        "import jax.extend\n"
        "jax.extend.backend.clear_backends()\n"
        "print(backend_is_started())\n",
        imported=("jax", "unison"),
    )
    assert done.stdout.split() == ["False", "False", "True", "False"], done.stderr


CACHING = """
import os, sys
import jax
from jax._src import distributed
from unison.runtime import private_jax
distributed.global_state.process_id = 1
for name, value in (
    ("jax_compilation_cache_dir", sys.argv[1]),
    ("jax_persistent_cache_min_compile_time_secs", 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", -1),
):
    jax.config.update(name, value)
jax.jit(lambda x: x + 1)(2.0)
print(len(os.listdir(sys.argv[1])))
private_jax.cache_programs_of_each_process()
jax.jit(lambda x: x * 3)(2.0)
print(len(os.listdir(sys.argv[1])) > 0)
"""


def test_every_process_can_write_compiled_programs(tmp_path):
    done = run_program(CACHING, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "True"]


_CONSTANT = np.arange(4, dtype=np.float32)


def _of_a_replica(x):
    with jax.named_scope("scope"), set_xla_metadata(mark="yes"):
        total = lax.psum(jnp.sin(x) * 2.0, "replica")
    jnp.cos(x)  # which nobody needs

    def step(carry, row):
        return carry + lax.pmean(row, "replica"), carry.sum()

    total, sums = lax.scan(step, total[0], total)
    total = lax.cond(sums[0] > 0, lambda x: x, lambda x: -x, total)
    return total + _CONSTANT, x.astype(jnp.bfloat16), 3, jax.jit(jnp.tanh)(sums)


@pytest.mark.parametrize("axes", [{"replica": 2}, {"replica": 2, "core": 2}])
def test_what_is_evaluated_as_traced_is_what_jax_traces_again(axes):
    traced = jax.make_jaxpr(_of_a_replica, axis_env=[("replica", 2)])(np.ones((3, 4), np.float32))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))

    def in_mesh(evaluate):
        return jax.make_jaxpr(
            jax.shard_map(
                lambda x: [jnp.asarray(y)[None] for y in evaluate(x)],
                mesh=mesh,
                in_specs=PartitionSpec("replica"),
                out_specs=PartitionSpec("replica"),
                axis_names={"replica"},
                check_vma=False,
            )
        )(np.ones((6, 4), np.float32))

    own = in_mesh(lambda x: evaluated_as_traced(traced, [x]))
    again = in_mesh(jex.jaxpr_as_fun(traced))
    assert str(own) == str(again)
    bodies = [program.jaxpr.eqns[0].params["jaxpr"].eqns for program in (own, again)]
    assert "mark" in str([equation.ctx.xla_metadata for equation in bodies[0]])
    for one, other in zip(*bodies, strict=True):
        weak = [[v.aval.weak_type for v in each.outvars] for each in (one, other)]
        assert weak[0] == weak[1], one
        assert str(one.source_info.name_stack) == str(other.source_info.name_stack)
        assert one.ctx.xla_metadata == other.ctx.xla_metadata
    x = np.ones((3, 4), np.float32)
    plain = jax.make_jaxpr(jnp.sin)(x)
    np.testing.assert_array_equal(evaluated_as_traced(plain, [x])[0], jnp.sin(x))
