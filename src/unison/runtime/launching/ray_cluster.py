"""A Ray cluster: joining it, and actors on its nodes with the resources that they take."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from unison.errors import UnavailableError

Result = TypeVar("Result")

#: Timeouts in seconds for a connection, for the start of Ray's driver, for resources, and for
#: actors: their nodes fetch the folder, start Python and import Unison.
_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_JOIN = 30.0
_SECONDS_FOR_ROOM = 60.0
_SECONDS_TO_START = 180.0

#: Seconds between two looks for room, and for workers beyond those with which a job begins.
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_FOR_THE_REST = 2.0

#: Seconds for Ray to find out whether a node that is not reached is lost.
SECONDS_TO_FIND_OUT = 90.0

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
        if not nodes:
            return Room(self.workers or 1, self.cpus or 1, self.gpus or 0)
        workers = len(nodes) if self.workers is None else self.workers
        of_a_node = -(-workers // len(nodes))

        def share(resource: str) -> int:
            return min(int(node.get(resource, 0)) for node in nodes) // of_a_node

        cpus = max(1, share("CPU")) if self.cpus is None else self.cpus
        return Room(workers, cpus, share("GPU") if self.gpus is None else self.gpus)

    @property
    def each(self) -> dict[str, int]:
        """The resources of each worker by Ray's names, which `on` has completed."""
        return {"CPU": self.cpus or 1, **({"GPU": self.gpus} if self.gpus else {})}

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


class Reserved(NamedTuple):
    """Resources that the workers of a job have together.

    Attributes:
        room: The resources.
        group: Ray's placement group of them.
    """

    room: Room
    group: Any


class Place:
    """Resources of one worker, on any node: when that is lost, on another one that has room.

    Args:
        cluster: The cluster.
        each: The resources.
        ending: Gets what releases the resources, and ends the actor on them.
    """

    def __init__(self, cluster: RayCluster, each: dict[str, int], ending: contextlib.ExitStack):
        from ray.util.placement_group import placement_group, remove_placement_group

        self._cluster = cluster
        self._each = each
        self._group = placement_group([each], strategy="SPREAD")
        #: The actor that was started there last, if any.
        self.actor: Any = None
        ending.callback(remove_placement_group, self._group)
        ending.callback(self.end)

    @property
    def node(self) -> str | None:
        """The address of the node that has the resources; None while none has."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self._group)
        if table.get("state") != "CREATED":  # a lost node's are pending, for another one
            return None
        (node,) = table["bundles_to_node_id"].values()
        return self._cluster.alive().get(node)

    def start(self, actor: type) -> Any:
        """Starts an actor of a class there, in place of the last one, and returns it."""
        self.end()
        self.actor = self._cluster.actor(actor, self._each, self._group, 0)
        return self.actor

    def end(self) -> None:
        """Ends the actor, if it has not ended."""
        if self.actor is not None:
            self._cluster.kill(self.actor)


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
        #: The id of this process's job there.
        self.job = str(self._ray.get_runtime_context().get_job_id())
        #: The CPUs and GPUs of each node, and the addresses of the nodes.
        self.nodes: list[dict[str, float]] = []
        self.addresses: list[str] = []
        self.look()
        if not self.nodes:
            raise UnavailableError(message=f"The Ray cluster {address} has no node with a CPU.")

    def look(self) -> None:
        """Updates `nodes` and `addresses`: nodes are lost and added."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        alive = [node for node in alive if node["Resources"].get("CPU", 0) >= 1]
        self.nodes = [
            {name: count for name, count in node["Resources"].items() if name in ("CPU", "GPU")}
            for node in alive
        ]
        self.addresses = [str(node["NodeManagerAddress"]) for node in alive]

    def alive(self) -> dict[str, str]:
        """Returns the addresses of the nodes that are not lost, by id."""
        nodes = self._ray.nodes()
        return {node["NodeID"]: str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]}

    def reserved(
        self,
        room: Room,
        ending: contextlib.ExitStack,
        patience: float = 0.0,
        on_wait: Callable[[str], None] = lambda text: None,
        undecided: Collection[str] = (),
    ) -> Reserved:
        """Reserves resources for all workers of a job, spread over the nodes.

        Args:
            room: The resources.
            ending: Gets what releases them.
            patience: Seconds to wait for nodes to be added if those that there are do not suffice.
            on_wait: Called with a message if it has to wait for them.
            undecided: The ids of nodes that are not reached: Ray first has to find out whether they
                are lost. It would try for a minute to reserve resources there, and none elsewhere.

        Raises:
            UnavailableError: The cluster lacks resources.
        """
        from ray.util.placement_group import (
            placement_group,
            placement_group_table,
            remove_placement_group,
        )

        found_out = time.monotonic() + SECONDS_TO_FIND_OUT
        while set(undecided) & set(self.alive()) and time.monotonic() < found_out:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        last = time.monotonic() + max(patience, _SECONDS_FOR_ROOM)
        has_told = False
        while True:
            self.look()
            complete, before = room.on(self.nodes), self.nodes
            fits = complete.fits_on(before)
            if not (fits or (patience and time.monotonic() < last)):
                waited = f" No node was added within {patience:g} s." if patience else ""
                raise UnavailableError(message=self._no_room(complete) + waited)
            if not fits:
                if not has_told:
                    on_wait(f"{self._no_room(complete)} Waiting for nodes, {patience:g} s at most.")
                    has_told = True
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                continue
            group = placement_group([complete.each] * (complete.workers or 0), strategy="SPREAD")
            with contextlib.ExitStack() as undoing:
                undoing.callback(remove_placement_group, group)
                while self.nodes == before and time.monotonic() < last:
                    if placement_group_table(group).get("state") == "CREATED":
                        ending.push(undoing.pop_all())
                        return Reserved(complete, group)
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
                    self.look()
            if time.monotonic() >= last:
                free = self._ray.available_resources()
                waited = f"{max(patience, _SECONDS_FOR_ROOM):g} s"
                raise UnavailableError(
                    message=f"{self._no_room(complete)} Others left after {waited} only: {free}"
                )

    def placed(
        self,
        actor: type,
        reserved: Reserved,
        ending: contextlib.ExitStack,
        args: Sequence[Any] = (),
        restarts: int = 0,
    ) -> list[Any]:
        """Returns one actor per worker, on the resources that are reserved for it.

        Args:
            actor: Their class.
            reserved: The resources.
            ending: Gets what ends the actors.
            args: The arguments of the class.
            restarts: How often Ray starts one that is lost again; -1: always.
        """
        actors = []
        for index in range(reserved.room.workers or 0):
            each = reserved.room.each
            placed = self.actor(actor, each, reserved.group, index, args, restarts)
            ending.callback(self.kill, placed)
            actors.append(placed)
        return actors

    def places(self, room: Room, at_least: int, ending: contextlib.ExitStack) -> list[Place]:
        """Returns a place for each worker, some of them without resources for now.

        Args:
            room: The resources, which `Room.on` has completed.
            at_least: The number of workers for which there are resources when this returns.
            ending: Gets what releases the resources.

        Raises:
            UnavailableError: The cluster lacks resources for that many.
        """
        needed = dataclasses.replace(room, workers=at_least)
        if not needed.fits_on(self.nodes):
            raise UnavailableError(message=self._no_room(needed))
        places = [Place(self, room.each, ending) for _ in range(room.workers or 0)]
        began = time.monotonic()
        while (found := sum(place.node is not None for place in places)) < len(places):
            seconds = time.monotonic() - began
            if found >= at_least and seconds >= _SECONDS_FOR_THE_REST:
                break
            if seconds >= _SECONDS_FOR_ROOM:
                free = self._ray.available_resources()
                raise UnavailableError(
                    message=f"{self._no_room(needed)} Others left after {_SECONDS_FOR_ROOM:g} s "
                    f"only: {free}"
                )
            time.sleep(0.1)
        return places

    def _no_room(self, room: Room) -> str:
        return (
            f"Expected room for {room.workers} workers with {room.each} each. The cluster has: "
            f"{self.nodes}. Ask for fewer workers, or for less for each (--cpus-per-worker and "
            "--gpus-per-worker; cpus and gpus in Python)."
        )

    def actor(
        self,
        actor: type,
        each: dict[str, int],
        group: Any,
        index: int,
        args: Sequence[Any] = (),
        restarts: int = 0,
    ) -> Any:
        """Returns an actor on one of the resources of a placement group; see `placed`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self._ray.remote(actor)
        return remote.options(
            num_cpus=each["CPU"],
            num_gpus=each.get("GPU", 0),
            max_concurrency=4,
            max_restarts=restarts,
            max_task_retries=restarts,  # calls wait for one that is started again
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote(*args)

    def kill(self, actor: Any) -> None:
        """Ends an actor, if it has not ended."""
        self._ray.kill(actor)

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
