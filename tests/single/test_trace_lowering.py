"""A traced function is brought into forms that are fast on CPUs without being traced again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from unison.lowering import lower_for_cpu, lowered_trace
from unison.program import building


def kernel_gradient(inputs, errors):
    return jax.grad(lambda kernel: jnp.vdot(inputs @ kernel, errors))(jnp.ones((512, 10)))


def arguments():
    numbers = np.random.default_rng(0)
    return [numbers.normal(size=shape).astype(np.float32) for shape in ((256, 512), (256, 10))]


def test_a_lowered_trace_has_the_faster_forms():
    traced = jax.make_jaxpr(kernel_gradient)(*arguments())
    assert "optimization_barrier" not in str(traced)
    assert "optimization_barrier" in str(lowered_trace(traced))


def test_a_lowered_trace_computes_what_the_lowered_function_does():
    traced = jax.make_jaxpr(kernel_gradient)(*arguments())
    (own,) = jax.jit(jaxpr_as_fun(lowered_trace(traced)))(*arguments())
    np.testing.assert_array_equal(own, jax.jit(lower_for_cpu(kernel_gradient))(*arguments()))


def test_the_parts_of_a_linear_solver_keep_their_names():
    matrix = np.array([[2.0, 1.0], [0.0, 4.0]], np.float32)
    traced = jax.make_jaxpr(jnp.linalg.inv)(matrix)
    (own,) = jaxpr_as_fun(lowered_trace(traced))(matrix)
    np.testing.assert_allclose(own, np.linalg.inv(matrix), rtol=1e-6)


def test_a_trace_with_a_shard_map_is_refused():
    mesh = jax.make_mesh((1,), ("core",), axis_types=(jax.sharding.AxisType.Auto,))
    own = PartitionSpec()
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=own, out_specs=own)
    with pytest.raises(ValueError, match="without shard_map"):
        lowered_trace(jax.make_jaxpr(mapped)(1.0))


def refuse(function):
    raise AssertionError("The function is traced again.")


def test_run_lowers_its_trace(monkeypatch, two_replicas):
    monkeypatch.setattr(building, "lower_for_cpu", refuse)
    doubled = two_replicas.run(lambda x: 2 * x, (np.ones(3, np.float32),))
    assert np.all(np.asarray(two_replicas.experimental_local_results(doubled)) == 2)


def test_fit_lowers_its_trace(monkeypatch, two_replicas):
    import keras

    monkeypatch.setattr(building, "lower_for_cpu", refuse)
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32), batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 2
