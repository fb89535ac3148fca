"""Counting what a traced function computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from unison.lowering.flops import count_flops


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr)


def test_matrix_product_counts_two_operations_for_each_element_and_term():
    assert flops(jnp.matmul, (3, 5), (5, 7)) == 2 * 3 * 5 * 7


def test_batched_product_counts_every_product():
    assert flops(jnp.matmul, (4, 3, 5), (4, 5, 7)) == 4 * 2 * 3 * 5 * 7


def test_convolution_counts_a_window_for_each_output():
    def convolve(image, kernel):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=names)

    assert flops(convolve, (2, 6, 6, 3), (3, 3, 3, 8)) == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)


def test_inner_functions_count():
    assert flops(jax.jit(jnp.matmul), (3, 5), (5, 7)) == 2 * 3 * 5 * 7


def test_the_body_of_a_scan_counts_each_time():
    def chained(x, weights):
        return jax.lax.scan(lambda carry, weight: (carry @ weight, None), x, weights)[0]

    assert flops(chained, (3, 5), (7, 5, 5)) == 7 * 2 * 3 * 5 * 5
