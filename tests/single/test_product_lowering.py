"""The gradient of a layer with few outputs is computed by an ordinary product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unison.lowering import lower_for_cpu


def kernel_gradient(inputs, errors):
    def loss(kernel):
        return jnp.vdot(inputs @ kernel, errors)

    return jax.grad(loss)(jnp.zeros((inputs.shape[1], errors.shape[1]), inputs.dtype))


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def barriers_in(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("optimization_barrier")


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(512, 512, 10), (64, 1024, 128), (512, 10, 512), (300, 130, 2)]
)
def test_the_gradient_of_a_narrow_kernel_equals_that_of_xla(rows, inputs, outputs):
    x, errors = normal(rows, inputs), normal(rows, outputs, seed=1)
    lowered = lower_for_cpu(kernel_gradient)
    assert barriers_in(lowered, x, errors) == 2
    expected = np.asarray(x, np.float64).T @ np.asarray(errors, np.float64)
    for compute in (lowered, kernel_gradient):
        # A sum of `rows` products, each of size about 1.
        np.testing.assert_allclose(jax.jit(compute)(x, errors), expected, atol=rows * 2e-6)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype"),
    [
        (512, 512, 1, jnp.float32),
        (512, 512, 129, jnp.float32),
        (512, 100, 10, jnp.float32),
        (32, 512, 10, jnp.float32),
        (512, 512, 10, jnp.bfloat16),
    ],
)
def test_other_products_pass_through_untouched(rows, inputs, outputs, dtype):
    x, errors = normal(rows, inputs, dtype=dtype), normal(rows, outputs, seed=1, dtype=dtype)
    assert barriers_in(lower_for_cpu(kernel_gradient), x, errors) == 0


def test_products_of_batches_pass_through_untouched():
    def product(x, y):
        return lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,))))

    assert barriers_in(lower_for_cpu(product), normal(2, 512, 512), normal(2, 512, 10)) == 0
