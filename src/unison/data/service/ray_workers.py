"""`RayWorkers`: input workers on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import traceback
import weakref
from typing import Any, Self

from unison.data.service.configuration import ANY_PORT, WorkerConfig
from unison.data.service.worker_process import WorkerServer
from unison.errors import UnavailableError
from unison.net.addresses import is_loopback, joined_address, own_address, split_address
from unison.net.secret import KEY_VARIABLE, key
from unison.runtime.launching.ray_cluster import (
    RayCluster,
    Room,
    forwarded_variables,
    is_joined,
)

#: The number of times that Ray starts a lost actor again, for Ray.
_ALWAYS = -1

#: The variables of workers, which compute on CPUs wherever the program trains.
_OF_WORKERS = {"JAX_PLATFORMS": "cpu"}

#: Seconds that pass before a worker that could not be started again is started once more.
_SECONDS_BETWEEN_STARTS = 5.0

#: Timeout in seconds for the end of the workers; actors that have not answered are killed.
_SECONDS_TO_STOP = 10.0


class RayWorkers:
    """Input workers as actors of a Ray cluster, each with a process of its own on its node.

    They serve from its creation on, until `stop`, the end of a `with` block, or the end of this
    program. Ray starts one that is lost again; if its node is lost, on another one that has room.
    To add workers while programs read, create another object.

    Args:
        config: The configuration. The nodes must reach the address of the dispatcher; the workers
            listen at their nodes' addresses, at free ports.
        workers: The number of workers. Default: one per node.
        cpus: The number of CPUs that each takes from the cluster.
        address: The address of the cluster: `"auto"`, `"HOST:PORT"` or `"ray://HOST:PORT"`. A
            program that has joined a cluster, by `ray.init` or by earlier `RayWorkers`, uses that.
        folder: A folder that is sent to the nodes when the program joins the cluster, from which
            datasets' functions import.

    Raises:
        ValueError: `config` has an address or a port for workers, the dispatcher listens at
            loopback and nodes are on other machines, or there is a `folder` for a cluster that
            the program has joined before.
        ImportError: Ray is not installed.
        UnavailableError: The cluster cannot be reached, lacks resources, its nodes do not have
            Unison, or the dispatcher refuses the workers.
    """

    def __init__(
        self,
        config: WorkerConfig,
        workers: int | None = None,
        cpus: int = 1,
        address: str = "auto",
        folder: str | None = None,
    ):
        if config.worker_address is not None or config.port:
            raise ValueError(
                "Workers on a Ray cluster listen at their nodes' addresses, at free ports. Expected"
                f" neither worker_address nor port in the WorkerConfig. Received: {config}"
            )
        if folder is not None and is_joined():
            raise ValueError(
                "This program has joined a Ray cluster, and a folder is sent when it does. Received"
                f": folder={folder!r}. Send it by ray.init(runtime_env={{'working_dir': folder}})."
            )
        room = Room(workers, cpus, gpus=0)
        with contextlib.ExitStack() as leaving, contextlib.ExitStack() as ending:
            self._cluster = RayCluster(address, folder, leaving)
            _check_reachable(config.dispatcher_address, self._cluster.addresses)
            self._actors = self._cluster.placed(
                InputActor,
                self._cluster.reserved(room, ending),
                ending,
                args=(config, {**forwarded_variables(), **_OF_WORKERS, KEY_VARIABLE: key().hex()}),
                restarts=_ALWAYS,
            )
            self._cluster.answers(self._actors, "address")
            leaving.pop_all()  # the cluster is left when the program ends: others may run there
            self._end = weakref.finalize(
                self, _end, self._actors, ending.pop_all(), self._cluster.job
            )
            self._end.atexit = False  # Ray ends the actors with the program

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def addresses(self) -> list[str]:
        """The addresses at which the workers are reached, host:port.

        Raises:
            UnavailableError: One is lost, and not started again in time.
        """
        return self._cluster.answers(self._actors, "address")

    def stop(self) -> None:
        """Ends the workers; their parts of unfinished iterations are lost."""
        self._end()


class InputActor:
    """The Ray actor on a node, which has an input worker in a process.

    Args:
        config: The worker's configuration, without its address.
        environment: Environment variables for it, with the key of the dispatcher's job.
    """

    def __init__(self, config: WorkerConfig, environment: dict[str, str]):
        import ray

        os.environ.update(environment)
        address = joined_address(ray.util.get_node_ip_address(), ANY_PORT)
        try:
            self._server = WorkerServer(dataclasses.replace(config, worker_address=address))
        except Exception:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise  # in the program that starts the workers
            # Ray gives up an actor that raises here, and starts one again whose process ends.
            traceback.print_exc()
            time.sleep(_SECONDS_BETWEEN_STARTS)
            os._exit(1)
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def address(self) -> str:
        """Returns the address of the worker."""
        return self._server.address

    def stop(self) -> None:
        """Ends the worker, which tells the dispatcher."""
        self._server.stop()

    def _end_with_server(self) -> None:
        try:
            self._server.join()
        except UnavailableError:
            os._exit(1)  # Ray starts this actor again


def _check_reachable(dispatcher: str, nodes: list[str]) -> None:
    host, _ = split_address(dispatcher)
    if host != "localhost" and not is_loopback(host):
        return
    if others := [node for node in nodes if own_address(node) is None]:
        raise ValueError(
            f"The dispatcher at {dispatcher} is reached from its own machine only, and the Ray "
            f"cluster has nodes at {', '.join(others)}. Start it with DispatcherConfig(host=...), "
            "an address of this machine in their network, and name that in the WorkerConfig."
        )


def _end(actors: list[Any], ending: contextlib.ExitStack, job: str) -> None:
    """Ends actors, unless Ray has ended them with its job."""
    import ray

    if is_joined() and ray.get_runtime_context().get_job_id() == job:
        with ending:
            asked = [actor.stop.remote() for actor in actors]
            ray.wait(asked, num_returns=len(asked), timeout=_SECONDS_TO_STOP)
