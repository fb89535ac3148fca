"""A Ray cluster: joining it, and actors on its nodes with the resources that they take."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unison.errors import UnavailableError

Result = TypeVar("Result")

#: Timeouts in seconds for a connection, for the start of Ray's driver, for resources, and for
#: actors: their nodes fetch the folder, start Python and import Unison.
_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_JOIN = 30.0
_SECONDS_FOR_ROOM = 60.0
_SECONDS_TO_START = 180.0

#: The prefixes of environment variables that are passed to the nodes: library configuration.
_FORWARDED = ("JAX_", "KERAS_", "NCCL_", "UNISON_", "XLA_")


@dataclasses.dataclass(frozen=True)
class Room:
    """The resources that the workers of a job take from a Ray cluster.

    Attributes:
        workers: The number of workers. None: one per node.
        cpus: The number of CPUs of each worker. None: an equal share of a node's.
        gpus: The number of GPUs of each worker. None: an equal share of a node's.
    """

    workers: int | None = None
    cpus: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("cpus", 1), ("gpus", 0)):
            count = getattr(self, name)
            if count is not None and count < least:
                raise ValueError(f"Expected {name} of at least {least}. Received: {count}")

    def on(self, nodes: list[dict[str, float]]) -> Room:
        """Returns the request with its defaults set from the nodes, given by their resources.

        Examples:
            >>> Room().on([{"CPU": 4.0}, {"CPU": 6.0}])
            Room(workers=2, cpus=4, gpus=0)
            >>> Room(workers=4).on([{"CPU": 4.0, "GPU": 2.0}, {"CPU": 6.0, "GPU": 2.0}])
            Room(workers=4, cpus=2, gpus=1)
        """
        workers = len(nodes) if self.workers is None else self.workers
        of_a_node = -(-workers // len(nodes))

        def share(resource: str) -> int:
            return min(int(node.get(resource, 0)) for node in nodes) // of_a_node

        cpus = max(1, share("CPU")) if self.cpus is None else self.cpus
        return Room(workers, cpus, share("GPU") if self.gpus is None else self.gpus)

    def fits_on(self, nodes: list[dict[str, float]]) -> bool:
        """Returns whether the nodes have these resources, if all are free.

        Examples:
            >>> Room(workers=3, cpus=2, gpus=0).fits_on([{"CPU": 4.0}, {"CPU": 3.0}])
            True
            >>> Room(workers=3, cpus=2, gpus=1).fits_on([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 3.0}])
            False
        """
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        places = (
            min(int(node.get(name, 0)) // count for name, count in wanted.items() if count)
            for node in nodes
        )
        return sum(places) >= (self.workers or 1)


class RayCluster:
    """A Ray cluster that this process has joined.

    Args:
        address: `"auto"`, `"HOST:PORT"` or `"ray://HOST:PORT"`.
        folder: The folder that is sent to the nodes and in which actors run. None: no folder is
            sent.
        leaving: Gets what leaves the cluster, if this process had not joined it before.

    Raises:
        ImportError: Ray is not installed.
        UnavailableError: The cluster cannot be reached, or has no node with a CPU.
    """

    def __init__(self, address: str, folder: str | None, leaving: contextlib.ExitStack):
        self._address = address
        self._ray = _connected(address, folder, leaving)
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        alive = [node for node in alive if node["Resources"].get("CPU", 0) >= 1]
        if not alive:
            raise UnavailableError(message=f"The Ray cluster {address} has no node with a CPU.")
        #: The id of this process's job there.
        self.job = str(self._ray.get_runtime_context().get_job_id())
        #: The CPUs and GPUs of each node.
        self.nodes = [
            {name: count for name, count in node["Resources"].items() if name in ("CPU", "GPU")}
            for node in alive
        ]
        #: The addresses of the nodes.
        self.addresses = [str(node["NodeManagerAddress"]) for node in alive]

    def placed(
        self,
        actor: type,
        room: Room,
        ending: contextlib.ExitStack,
        args: Sequence[Any] = (),
        restarts: int = 0,
    ) -> list[Any]:
        """Returns one actor per worker, spread over the nodes.

        Args:
            actor: Their class.
            room: The resources, which `Room.on` has completed.
            ending: Gets what ends the actors.
            args: The arguments of the class.
            restarts: How often Ray starts one that is lost again; -1: always.

        Raises:
            UnavailableError: The cluster lacks resources.
        """
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each = {"CPU": room.cpus, **({"GPU": room.gpus} if room.gpus else {})}
        no_room = (
            f"Expected room for {room.workers} workers with {each} each. The cluster has: "
            f"{self.nodes}. Ask for fewer workers, or for less for each (--cpus-per-worker and "
            "--gpus-per-worker; cpus and gpus in Python)."
        )
        if not room.fits_on(self.nodes):
            raise UnavailableError(message=no_room)
        group = placement_group([each] * (room.workers or 0), strategy="SPREAD")
        ending.callback(remove_placement_group, group)
        if not group.wait(_SECONDS_FOR_ROOM):
            free = self._ray.available_resources()
            raise UnavailableError(
                message=f"{no_room} Others left after {_SECONDS_FOR_ROOM:g} s only: {free}"
            )
        remote = self._ray.remote(actor)
        actors = []
        for index in range(room.workers or 0):
            placed = remote.options(
                num_cpus=room.cpus,
                num_gpus=room.gpus,
                max_concurrency=4,
                max_restarts=restarts,
                max_task_retries=restarts,  # calls wait for one that is started again
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(*args)
            ending.callback(self._ray.kill, placed)
            actors.append(placed)
        return actors

    def answers(self, actors: Sequence[Any], method: str) -> list[Any]:
        """Returns what a method of each actor returns, once they have started.

        Raises:
            UnavailableError: They cannot be started.
        """
        try:
            asked = [getattr(actor, method).remote() for actor in actors]
            return list(self._ray.get(asked, timeout=_SECONDS_TO_START))
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(
                message=f"The nodes of the Ray cluster {self._address} cannot start workers. "
                "They need the Unison, Python and Ray of this process, and take a folder of some "
                f"hundred MB at most. Ray says: {error}"
            ) from error


def is_joined() -> bool:
    """Whether this process has joined a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def forwarded_variables() -> dict[str, str]:
    """Returns the environment variables that are passed to the nodes."""
    return {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}


def _connected(address: str, folder: str | None, leaving: contextlib.ExitStack) -> Any:
    """Returns the module `ray`, connected to the cluster."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"Programs that join a Ray cluster ({address}) need Ray: pip install 'unison[ray]'"
        ) from error
    if ray.is_initialized():
        return ray
    _check_reachable(address)
    sent = {} if folder is None else {"working_dir": folder}
    try:
        _within(
            _SECONDS_TO_JOIN,
            lambda: ray.init(
                address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=sent or None
            ),
        )
    except Exception as error:  # Ray raises errors of many kinds
        raise UnavailableError(
            message=f"Cannot join the Ray cluster {address}: {error}. Give the address that `ray "
            "start` has printed, or ray://HOST:10001 from outside of the cluster."
        ) from error
    leaving.callback(ray.shutdown)
    return ray


def _check_reachable(address: str) -> None:
    """Checks that the address can be reached, which takes Ray a minute to find out."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise UnavailableError(
            message=f"Expected auto, HOST:PORT or ray://HOST:PORT. Received: {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(
            message=f"Nobody listens at {address}: {error}. Start a Ray cluster (`ray start "
            "--head`), and give the address that it prints."
        ) from error


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Calls a function in a thread, and returns its result or raises its error.

    Raises:
        TimeoutError: It takes longer; it continues in its thread.
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="unison-ray-init", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
