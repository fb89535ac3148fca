"""Programs of a group that may change: what they know of the replica that runs them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from unison.runtime.shared_memory.library import Ticket
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
