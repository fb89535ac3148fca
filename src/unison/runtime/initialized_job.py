"""The rendezvous of processes that `jax.distributed.initialize` has connected already.

Ray Train's JaxTrainer, Kubeflow's JAX runtime, MaxText and others call it themselves. Such
processes share JAX's coordination service, through which they exchange where the first one listens;
then they connect to it as in every other job (`unison.runtime.rendezvous`), so that a lost process
is detected and named. JAX's own connections stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from unison.net.addresses import LOOPBACK, own_address, split_address
from unison.net.secret import KEY_VARIABLE, key, new_key
from unison.runtime.agreement import ConnectedWorkers
from unison.runtime.coordination import CoordinationStore
from unison.runtime.private_jax import coordinator_address
from unison.runtime.rendezvous import Met, Place, call, opened_entrance, receive

#: The address that stands for all addresses of a machine.
_ALL_ADDRESSES = "0.0.0.0"


class Adopted(NamedTuple):
    """The result of the rendezvous.

    Attributes:
        names: The names of all processes, in order, with their hosts and process ids.
        met: The connections between them.
    """

    names: list[str]
    met: Met


def meet_in_initialized_job(
    index: int, count: int, tasks: list[str], about: Mapping[str, str], timeout: float
) -> Adopted:
    """Connects the processes of a job of `jax.distributed`; all of them must call this.

    They authenticate each other with `UNISON_KEY` if the first process has it, else with a new key
    that it publishes in JAX's coordination service. Whoever can reach that service can read the
    key; he could also end the job or change what it computes, without it.

    Args:
        index: The index of this process.
        count: The number of processes.
        tasks: The names of the processes' tasks, in order.
        about: The values that must be the same on all processes.
        timeout: The timeout in seconds.

    Raises:
        DeadlineExceededError: A process has not called this in time.
        UnavailableError: A process is missing, or they differ in `about`.
        UnauthenticatedError: The first process has another `UNISON_KEY`.
    """
    host = _host_of_coordinator()
    workers = ConnectedWorkers(count, index, CoordinationStore(), "initialized job", timeout)
    own: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid()}
    with contextlib.ExitStack() as undoing:
        entrance = None
        if index == 0:
            own["key"] = None if os.environ.get(KEY_VARIABLE) else new_key()
            entrance = opened_entrance(_listening_host(host), 0, _secret(own["key"]), count)
            undoing.callback(entrance.close)
            own["port"] = entrance.listener.getsockname()[1]
        told = workers.talk("processes").ask(own)
        names = [
            f"{task} (process {each['process']} on {each['host']})"
            for task, each in zip(tasks, told, strict=True)
        ]
        place = Place(index, names)
        if entrance is not None:
            met = receive(entrance, place, about, timeout)
        else:
            where = (host, int(told[0]["port"]))
            met = call(where, _secret(told[0]["key"]), place, about, timeout)
    # JAX has its own connections to the coordination service.
    return Adopted(names, Met(met.lines, None))


def _secret(published: str | None) -> bytes:
    return key() if published is None else bytes.fromhex(published)


def _host_of_coordinator() -> str:
    try:
        return split_address(coordinator_address() or "")[0]
    except ValueError:  # a local socket
        return LOOPBACK


def _listening_host(host: str) -> str:
    """Returns where the first process listens for those that reach its machine as `host`.

    It is the address that the name has on this machine, if others have it for the same machine: a
    machine may resolve its own name to a loopback address (as Debian does), or be behind a router.
    """
    address = own_address(host)
    is_loopback = address is not None and (address.startswith("127.") or address == "::1")
    is_shared = not is_loopback or host in ("localhost", address)
    return address if address is not None and is_shared else _ALL_ADDRESSES
