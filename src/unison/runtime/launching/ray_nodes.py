"""Workers on the nodes of a Ray cluster.

Ray allocates the resources and reports lost nodes. Each worker has an actor, which starts it as a
process on its node, as a local job does, and ends with this process. The workers of most jobs are
placed together; one of an elastic job is placed by itself, again if its node is lost, on any node
that has room or is added.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Self

from unison.net.addresses import split_address
from unison.net.secret import KEY_VARIABLE, new_key
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import cluster_on_this_machine, listening_at
from unison.runtime.launching.guards import Guard
from unison.runtime.launching.ray_cluster import (
    SECONDS_TO_FIND_OUT,
    Place,
    RayCluster,
    Room,
    forwarded_variables,
)
from unison.runtime.launching.workers import (
    NoRoomError,
    OnLine,
    ProcessWorker,
    Program,
    Worker,
)

#: Seconds for which an actor waits for output to report, and the timeout of its replies.
_TELL_EVERY = 1.0
_SECONDS_TO_ANSWER = 60.0

#: Timeout for the start of a worker: its node fetches the folder, starts Python and imports Unison.
_SECONDS_TO_START = 180.0

#: Seconds between two looks whether a worker that is being started is still wanted.
_SECONDS_BETWEEN_LOOKS = 0.2

#: The number of lines that an actor buffers; the worker blocks until they are fetched. Only the
#: latest reports are kept.
_MOST_LINES = 10_000
_MOST_REPORTS = 64

#: The exit code of a worker whose node or actor is lost.
_LOST = 1


class RayNodes:
    """Resources for the workers of a job on the nodes of a Ray cluster, as a context manager.

    Args:
        address: `"auto"`, `"HOST:PORT"` or `"ray://HOST:PORT"`.
        room: The workers' resources.
        folder: The folder that is sent to the nodes and in which the workers run. None: no folder
            is sent.
        grace: Seconds that workers may continue after the end of this process; None: they are
            killed with it.
        at_least: The number of workers with which an elastic job begins: each is placed by itself,
            the others when there is room for them. None: all are placed together.
        patience: Seconds to wait for nodes to be added, if those that there are do not suffice for
            all workers.
        on_wait: Called with a message if it has to wait for them.
        undecided: The ids of nodes of which Ray has to find out first whether they are lost.

    Raises:
        ImportError: Ray is not installed.
        UnavailableError: The cluster cannot be reached, lacks resources, or its nodes do not have
            Unison.
    """

    def __init__(
        self,
        address: str,
        room: Room,
        folder: str | None = None,
        grace: float | None = None,
        *,
        at_least: int | None = None,
        patience: float = 0.0,
        on_wait: Callable[[str], None] = lambda text: None,
        undecided: Collection[str] = (),
    ):
        self._address = address
        self._at_least = at_least
        self._patience = patience
        self._on_wait = on_wait
        self._undecided = undecided
        self._room = room
        self._folder = folder
        self._grace = grace
        self._end = contextlib.ExitStack()
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._last: dict[int, RayWorker] = {}
        self._cluster: RayCluster
        # The nodes may not share a home folder in which the workers would find the user's key.
        self._key = new_key()
        #: The workers' addresses: their nodes' addresses with free ports. Without those of workers
        #: of an elastic job for which there was no room yet.
        self.cluster = ClusterSpec({})
        #: The number of threads of a worker.
        self.cores = 1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undoing:
            cluster = RayCluster(self._address, self._folder, undoing)
            if self._at_least is None:
                taken = cluster.reserved(
                    self._room, undoing, self._patience, self._on_wait, self._undecided
                )
                room = taken.room
                self._actors = cluster.placed(WorkerActor, taken, undoing)
            else:
                room = self._room.on(cluster.nodes)
                self._places = cluster.places(room, self._at_least, undoing)
                placed = [place for place in self._places if place.node is not None]
                self._actors = [place.start(WorkerActor) for place in placed]
            self.cluster = ClusterSpec({"worker": cluster.answers(self._actors, "address")})
            self.cores = room.cpus or 1
            self._cluster = cluster
            self._end = undoing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    def start(self, index: int, program: Program, on_line: OnLine) -> Worker:
        """Starts a worker, for the first time or again; see `jobs.Job` and `elastic.ElasticJob`.

        Raises:
            NoRoomError: No node has room for it now; it is a worker of an elastic job.
        """
        environment = {KEY_VARIABLE: self._key, **forwarded_variables(), **program.environment}
        if self._places:
            actor, node = self._actor_with_room(index)
            environment = listening_at(environment, node)
        else:
            actor = self._actors[index]
            node = split_address(self.cluster.task_address("worker", index))[0]
        program = dataclasses.replace(program, environment=environment)
        worker = self._last[index] = RayWorker(index, program, on_line, actor, node, self._grace)
        worker.where = node
        return worker

    def undecided(self) -> list[str]:
        """Returns the ids of nodes that may be lost: their workers do not answer."""
        silent = {
            worker.where
            for worker in self._last.values()
            if worker.exit_code is None or not worker.is_reached
        }
        return [id_ for id_, address in self._cluster.alive().items() if address in silent]

    def _actor_with_room(self, index: int) -> tuple[Any, str]:
        """Returns an actor for a worker of an elastic job, and the address of its node.

        Raises:
            NoRoomError: No node has room for it now.
        """
        place, last = self._places[index], self._last.get(index)
        if last is not None and last.keeps_actor:
            return place.actor, last.where
        node = place.node
        if last is not None and last.is_undecided(node):
            raise NoRoomError(message=f"Ray has not decided whether its node {node} is lost")
        if node is None:
            raise NoRoomError(message="no node of the Ray cluster has room for it")
        if place.actor is None or last is not None:
            place.start(WorkerActor)
        return place.actor, node


class RayWorker(Worker):
    """The local proxy of a worker on a Ray cluster: a thread polls its actor, which starts it.

    Args:
        index: Its index.
        program: Its program.
        on_line: Called for every line that it prints, in a thread.
        actor: Its actor, which may still be starting.
        node: The address of its node.
        grace: Seconds that it may continue after the end of its actor.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        on_line: OnLine,
        actor: Any,
        node: str,
        grace: float | None,
    ):
        super().__init__(index, on_line)
        import ray

        self._ray = ray
        self._actor = actor
        self._node = node
        #: Whether its actor answers, or is known to be lost.
        self.is_reached = True
        self._has_started = False
        self._called_off: int | None = None  # the signal that came before it had started
        #: Whether its actor can start another one, after it has ended.
        self.keeps_actor = True
        self._result = b""
        self._on_report = program.on_report
        self._clock = _Clock()
        self._changing = threading.Lock()
        there = dataclasses.replace(program, on_report=None)  # the callback is local
        asks = program.on_report is not None
        starting = actor.start.remote(there, grace, asks)
        self._follower = threading.Thread(
            target=self._follow, args=(starting,), name="unison-worker", daemon=True
        )
        self._follower.start()

    def signal(self, number: int) -> None:
        with self._changing:
            if not self._has_started:
                self._called_off = number
            elif self.exit_code is None:
                self._actor.signal.remote(number)

    def is_undecided(self, node: str | None) -> bool:
        """Returns whether it was lost with a node that Ray may still count as alive.

        Args:
            node: The node that, according to Ray, has its resources.
        """
        is_late = time.monotonic() - self.ended_at > SECONDS_TO_FIND_OUT
        return node == self._node and not self.is_reached and not is_late

    def close(self) -> None:
        self._follower.join(_SECONDS_TO_ANSWER)

    def result(self) -> bytes:
        return self._result

    def _follow(self, starting: Any) -> None:
        try:
            exit_code = self._code_of_a_start_in_vain(starting)
            if exit_code is None:
                exit_code = self._code_after_output()
                self._result = self._ray.get(
                    self._actor.result.remote(), timeout=_SECONDS_TO_ANSWER
                )
        except Exception as error:  # Ray's client raises errors of many kinds
            exit_code = _LOST
            self._note_loss(error)
        self.ended_at = time.monotonic()
        self.exit_code = exit_code

    def _code_of_a_start_in_vain(self, starting: Any) -> int | None:
        """Waits until it has started; returns the exit code if it was called off before."""
        last = time.monotonic() + _SECONDS_TO_START
        while not self._ray.wait([starting], timeout=_SECONDS_BETWEEN_LOOKS)[0]:
            if self._called_off is not None:
                self._give_up_actor()
                return 128 + self._called_off
            if time.monotonic() > last:
                break
        self._ray.get(starting, timeout=0)
        with self._changing:
            self._has_started = True
            if self._called_off is not None:
                self._actor.signal.remote(self._called_off)
        return None

    def _code_after_output(self) -> int:
        """Passes on its output and reports until its end, and returns its exit code."""
        exit_code = None
        while exit_code is None:
            asked = time.time()
            told = self._ray.get(self._actor.tell.remote(), timeout=_SECONDS_TO_ANSWER)
            self._clock.compare(asked, told.asked_at, told.told_at, time.time())
            for line in told.lines:
                self.hear(line)
            if self._on_report is not None:
                for report in told.reports:
                    self._call(self._on_report, report, self._clock.ahead)
            exit_code = told.exit_code
        return exit_code

    def _note_loss(self, error: Exception) -> None:
        """Notes that its actor does not answer, which Ray ends if its node is not lost."""
        errors = self._ray.exceptions
        self.is_reached = not isinstance(
            error, (errors.ActorUnavailableError, errors.GetTimeoutError)
        )
        is_alive = False
        with contextlib.suppress(Exception):  # Ray itself is lost
            is_alive = self._node in {
                node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]
            }
        is_of_actor = self.is_reached and is_alive
        self.lost_with = f"its {'Ray actor on ' if is_of_actor else ''}node {self._node}"
        self._give_up_actor()
        for line in f"{self.lost_with} is lost. Ray says: {error}".splitlines():
            self.hear(line)

    def _give_up_actor(self) -> None:
        self.keeps_actor = False
        with contextlib.suppress(Exception):  # Ray itself is lost
            self._ray.kill(self._actor)


class _Clock:
    """Estimates how far a node's clock is ahead of the local one, from the existing messages.

    A message is never received before it was sent, so each request and its reply bound the offset
    from both sides.

    Examples:
        >>> clock = _Clock()
        >>> clock.compare(10.0, 15.1, 16.0, 11.5)  # asked and answered; there, in between
        >>> clock.compare(12.0, 17.9, 18.1, 13.0)
        >>> round(clock.ahead, 6)
        5.1
    """

    def __init__(self) -> None:
        self._bounds: collections.deque[tuple[float, float]] = collections.deque(maxlen=64)

    def compare(self, said: float, heard_there: float, said_there: float, heard: float) -> None:
        """Adds the times at which a request and its reply were sent and received."""
        self._bounds.append((said_there - heard, heard_there - said))

    @property
    def ahead(self) -> float:
        """The middle of the tightest bounds, in seconds."""
        least, most = zip(*self._bounds, strict=True)
        return (max(least) + min(most)) / 2


class Told(NamedTuple):
    """An actor's report on its worker.

    Attributes:
        lines: The lines printed since the last report.
        reports: What the worker has reported since then.
        exit_code: Its exit code, once its last line has been returned; None before.
        asked_at: When the actor received the request, by its node's clock.
        told_at: When it replied, by the same clock.
    """

    lines: list[str]
    reports: list[bytes]
    exit_code: int | None
    asked_at: float
    told_at: float


class WorkerActor:
    """The Ray actor on a worker's node; its methods are called in several threads."""

    def __init__(self) -> None:
        self._worker: ProcessWorker | None = None
        self._guard: Guard | None = None
        self._lines: collections.deque[str] = collections.deque()
        self._has_lines = threading.Condition()
        self._reports: collections.deque[bytes] = collections.deque(maxlen=_MOST_REPORTS)

    def address(self) -> str:
        """Returns the node's address with a free port."""
        import ray

        return cluster_on_this_machine(1, ray.util.get_node_ip_address()).task_address("worker", 0)

    def start(self, program: Program, grace: float | None = None, asks: bool = False) -> None:
        """Starts the worker.

        Args:
            program: The worker's program.
            grace: Seconds that it may continue after the end of this process.
            asks: Whether the worker should report.
        """
        if grace is not None and self._guard is None:
            self._guard = Guard(grace)
        if asks:
            program = dataclasses.replace(program, on_report=self._keep_report)
        self._worker = ProcessWorker(0, program, self._keep, self._guard)

    def signal(self, number: int) -> None:
        """Sends a signal to the worker and its children."""
        assert self._worker is not None
        self._worker.signal(number)

    def tell(self) -> Told:
        """Returns new output, waiting for it for a while; after the last line, the exit code."""
        asked_at = time.time()
        assert self._worker is not None
        exit_code = self._worker.exit_code
        lines = self._fetched(0.0 if exit_code is not None else _TELL_EVERY)
        if not lines and exit_code is not None:
            self._worker.signal(signal.SIGKILL)  # its children
            self._worker.close()
            lines = self._fetched(0.0)  # those read in the meantime
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        return Told(lines, reports, None if lines else exit_code, asked_at, time.time())

    def _fetched(self, seconds: float) -> list[str]:
        """Returns and removes the buffered lines; waits up to `seconds` if there are none."""
        with self._has_lines:
            self._has_lines.wait_for(lambda: self._lines, seconds)
            lines = list(self._lines)
            self._lines.clear()
            self._has_lines.notify_all()
        return lines

    def result(self) -> bytes:
        """Returns the result that the worker, which has ended, has sent back."""
        assert self._worker is not None
        return self._worker.result()

    def _keep(self, worker: int, line: str) -> None:
        with self._has_lines:
            self._has_lines.wait_for(lambda: len(self._lines) < _MOST_LINES)
            self._lines.append(line)
            self._has_lines.notify_all()

    def _keep_report(self, report: bytes, ahead: float) -> None:
        self._reports.append(report)
