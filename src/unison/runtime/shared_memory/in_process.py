"""Collective operations between the replicas of one process, between their buffers.

XLA's own make one rendezvous for each array, and are slow for large ones. Packing the arrays into
one buffer avoids the former, but makes a kernel of its own for each place in the buffer: XLA then
compiles a network of 50 layers for several times as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.runtime.shared_memory.library import InProcess, Ticket, library
from unison.runtime.shared_memory.rewriting import Ticketed

_numbers = itertools.count(1)


def new_program() -> int:
    """Returns the number of a new program that may fail on one replica, while others wait for it.

    Other programs have the number 0: their number must not depend on what was made before, since
    compiled programs come from a cache.
    """
    return next(_numbers)


def fail_program(program: int, reason: str) -> None:
    """Ends the waiting of the replicas in runs of a program, until `recover_program`."""
    if (loaded := library()) is not None:
        loaded.unison_exchange_fail(program, reason.encode(errors="replace"))


def recover_program(program: int) -> None:
    """Lets a program that has failed run again."""
    if (loaded := library()) is not None:
        loaded.unison_exchange_recover(program)


def are_in_this_process(replica_devices: Sequence[jax.Device]) -> bool:
    """Whether replicas on these devices can exchange values between their buffers."""
    process = jax.process_index()
    return (
        len(replica_devices) > 1
        and all(
            device.platform == "cpu" and device.process_index == process
            for device in replica_devices
        )
        and library() is not None
    )


def between_buffers(
    function: Callable[..., Any], num_replicas: int, axis_name: str, program: int = 0
) -> Callable[..., Any]:
    """Returns `function`, whose collective operations take and fill the replicas' own buffers.

    Args:
        function: A function that is called where the replicas' axis is bound.
        num_replicas: The size of that axis; all of its devices are CPU devices of this process.
        axis_name: The name of that axis.
        program: From `new_program`, if the function may fail on one replica.
    """
    here = InProcess(num_replicas, program)

    def exchanging(*args: Any) -> Any:
        # XLA tells the runs of a program apart, so tickets only order the operations of a run.
        ticket = jnp.zeros((1, len(Ticket)), jnp.uint32)
        ticket = ticket.at[0, Ticket.RANK].set(lax.axis_index(axis_name).astype(jnp.uint32))
        _, results = Ticketed(function, [range(num_replicas)], here)(ticket, *args)
        return results

    return exchanging
