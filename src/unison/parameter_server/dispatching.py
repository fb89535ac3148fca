"""`Dispatcher`: distributes the calls that a coordinator schedules to the workers.

Calls wait in one queue, from which one thread per worker takes the next call.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from unison.parameter_server.calls import Call, CallQueue, RemoteValue, StepQueue
from unison.parameter_server.functions import FunctionTable
from unison.parameter_server.per_worker import PerWorkerIterators
from unison.parameter_server.programs import ServerProgram
from unison.parameter_server.store import ServerLostError, by_server
from unison.parameter_server.worker_threads import WorkerThread

if TYPE_CHECKING:
    from unison.parameter_server.strategy import ParameterServerStrategy

logger = logging.getLogger("unison")


class Dispatcher:
    """The calls, functions and workers of one coordinator.

    Args:
        strategy: The strategy, which holds the connections to the servers.
    """

    def __init__(self, strategy: ParameterServerStrategy):
        self.strategy = strategy
        self.queue = (
            StepQueue(strategy.num_replicas_in_sync, self._commit)
            if strategy.synchronous
            else CallQueue(strategy.max_staleness)
        )
        self.iterators = PerWorkerIterators()
        self.functions = FunctionTable(strategy.remote_placement, strategy.scope, self._install)
        self._numbers = itertools.count(1)
        self._installed: list[ServerProgram] = []
        self._recovering = threading.Lock()
        self.workers = [
            WorkerThread(self, index, address)
            for index, address in enumerate(strategy.worker_addresses)
        ]

    def start(self) -> None:
        """Connects to the workers, and starts sending them calls."""
        for worker in self.workers:
            worker.start()

    def end(self) -> None:
        """Cancels waiting calls, and disconnects the workers and servers."""
        self.queue.close()
        for worker in self.workers:
            worker.end()
        self.strategy.store.farewell()

    def schedule(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], loop: object
    ) -> RemoteValue:
        """Adds a call to the queue; see `ClusterCoordinator.schedule`."""
        function, arrays, iterators = self.functions.describe(fn, args, kwargs)
        call = Call(next(self._numbers), function, arrays, iterators, RemoteValue(), loop)
        self.queue.put(call)
        return call.value

    def await_server(self, error: ServerLostError) -> None:
        """Waits for a lost server to restart, and logs how many updates may be lost with it.

        Raises:
            ServerLostError: It does not restart in time.
        """
        store = self.strategy.store
        with self._recovering:
            if store.is_alive(error.server):  # another thread has waited for it
                return
            logger.warning(
                "parameter server %d (%s) is lost; the coordinator waits for it: %s",
                error.server,
                error.address,
                error.why,
            )
            store.reconnect(error.server, error.why)
            for program in self._installed:
                if error.server in by_server(program.shards):
                    self._install_on(program, [error.server])
            logger.warning(
                "parameter server %d has restarted with its state after %d updates; of the %d "
                "calls that have begun, at most %d are lost on it",
                error.server,
                store.restored[error.server],
                self.queue.begun,
                self.queue.begun - store.restored[error.server],
            )

    def _commit(self, call: Call, pushed: dict[int, list[int]]) -> bool:
        """Makes the servers apply what workers have pushed; returns whether no push was missing."""
        workers: dict[int, list[int]] = {}
        for worker, servers in pushed.items():
            for server in servers:
                workers.setdefault(server, []).append(worker)
        settled = self.queue.settled()
        answers = self.strategy.store.ask(
            {
                server: (
                    "commit",
                    (),
                    {"closure": call.number, "settled": settled, "workers": own},
                )
                for server, own in workers.items()
            }
        )
        return not any(answer["missing"] for answer in answers.values())

    def _install(self, program: ServerProgram) -> None:
        self._installed.append(program)
        self._install_on(program, by_server(program.shards))

    def _install_on(self, program: ServerProgram, servers: Iterable[int]) -> None:
        data = np.frombuffer(program.data, np.uint8)
        fields = {
            "program": program.number,
            "inputs": program.inputs,
            "outputs": program.outputs,
            "whole_inputs": program.whole_inputs,
            "are_kept": True,
        }
        self.strategy.store.ask({server: ("install", [data], fields) for server in servers})
