"""Programs of a group that may change: what they know of the replica that runs them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from unison.runtime.shared_memory.library import Ticket, library
from unison.runtime.shared_memory.rewriting import Transaction


def of_replica_3(function):
    ticket = jnp.zeros((1, len(Ticket)), jnp.uint32).at[0, Ticket.RANK].set(3)
    _, _, result = jax.jit(Transaction(function, "replica", 4))(ticket, jnp.float32(2))
    return result.tolist()


def number():
    return lax.axis_index("replica")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: number(),
        lambda x: jax.jit(number)(),
        lambda x: lax.cond(x > 0, number, lambda: jnp.int32(-1)),
        lambda x: lax.switch(jnp.int32(x) - 1, [lambda: jnp.int32(-1), lambda: jax.jit(number)()]),
        lambda x: lax.fori_loop(0, 2, lambda i, kept: number(), jnp.int32(-1)),
        lambda x: lax.scan(lambda kept, i: (kept, number()), 0, jnp.arange(2))[1][-1],
        lambda x: jax.checkpoint(lambda y: y * number())(x) / 2,
    ],
    ids=["here", "jit", "cond", "switch", "while", "scan", "checkpoint"],
)
def test_a_replica_has_its_number_in_the_group_wherever_it_asks(function):
    assert of_replica_3(function) == 3


@pytest.mark.skipif(library() is None, reason="the library is not there")
def test_a_step_overwrites_what_it_updates():
    # Of moments that were selected in the end only, XLA would copy the old ones at each step.
    def step(weight, moment, gradient):
        moment = 0.9 * moment + lax.psum(gradient, "replica")
        weight = weight - 0.1 * moment / (1 + jnp.abs(moment))
        return weight, moment, lax.psum(gradient[0, 0], "replica")

    def unchanged(args, results):
        return args[0], args[1], results[2]

    ticket = jnp.zeros((1, len(Ticket)), jnp.uint32)
    array = jnp.zeros((300, 300))
    transaction = Transaction(step, "replica", 4, unchanged)
    compiled = jax.jit(transaction, donate_argnums=(0, 1, 2)).lower(ticket, array, array, array)
    assert "f32[300,300]{1,0} copy(" not in compiled.compile().as_text()
