"""Workers on the nodes of a Ray cluster.

Ray allocates the resources and reports lost nodes. Each worker has an actor, which starts it as a
process on its node, as a local job does, and ends with this process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import threading
import time
from typing import Any, NamedTuple, Self

from unison.errors import UnavailableError
from unison.net.secret import KEY_VARIABLE, new_key
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.environments import cluster_on_this_machine
from unison.runtime.launching.guards import Guard
from unison.runtime.launching.ray_cluster import RayCluster, Room, forwarded_variables
from unison.runtime.launching.workers import OnLine, ProcessWorker, Program, Worker

#: Seconds for which an actor waits for output to report, and the timeout of its replies.
_TELL_EVERY = 1.0
_SECONDS_TO_ANSWER = 60.0

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

    Raises:
        ImportError: Ray is not installed.
        UnavailableError: The cluster cannot be reached, lacks resources, or its nodes do not have
            Unison.
    """

    def __init__(
        self, address: str, room: Room, folder: str | None = None, grace: float | None = None
    ):
        self._address = address
        self._room = room
        self._folder = folder
        self._grace = grace
        self._end = contextlib.ExitStack()
        self._actors: list[Any] = []
        # The nodes may not share a home folder in which the workers would find the user's key.
        self._key = new_key()
        #: The workers' addresses: their nodes' addresses with free ports.
        self.cluster = ClusterSpec({})
        #: The number of threads of a worker.
        self.cores = 1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undoing:
            cluster = RayCluster(self._address, self._folder, undoing)
            room = self._room.on(cluster.nodes)
            self._actors = cluster.placed(WorkerActor, room, undoing)
            self.cluster = ClusterSpec({"worker": cluster.answers(self._actors, "address")})
            self.cores = room.cpus or 1
            self._end = undoing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    def start(self, index: int, program: Program, on_line: OnLine) -> Worker:
        """Starts a worker, for the first time or again; see `jobs.Job` and `elastic.ElasticJob`.

        Raises:
            UnavailableError: Its node is lost.
        """
        environment = {KEY_VARIABLE: self._key, **forwarded_variables(), **program.environment}
        program = dataclasses.replace(program, environment=environment)
        return RayWorker(index, program, on_line, self._actors[index], self._grace)


class RayWorker(Worker):
    """The local proxy of a worker on a Ray cluster: a thread polls its actor."""

    def __init__(
        self, index: int, program: Program, on_line: OnLine, actor: Any, grace: float | None
    ):
        super().__init__(index, on_line)
        import ray

        self._ray = ray
        self._actor = actor
        self._result = b""
        self._on_report = program.on_report
        self._clock = _Clock()
        there = dataclasses.replace(program, on_report=None)  # the callback is local
        asks = program.on_report is not None
        try:
            ray.get(actor.start.remote(there, grace, asks), timeout=_SECONDS_TO_ANSWER)
        except ray.exceptions.RayError as error:
            raise UnavailableError(
                message=f"The node of worker {index} cannot start it. Ray says: {error}"
            ) from error
        self._follower = threading.Thread(target=self._follow, name="unison-worker", daemon=True)
        self._follower.start()

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            self._actor.signal.remote(number)

    def close(self) -> None:
        self._follower.join(_SECONDS_TO_ANSWER)

    def result(self) -> bytes:
        return self._result

    def _follow(self) -> None:
        exit_code = None
        try:
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
            self._result = self._ray.get(self._actor.result.remote(), timeout=_SECONDS_TO_ANSWER)
        except self._ray.exceptions.RayError as error:
            exit_code, self.is_cut_off = _LOST, True
            for line in f"The node or actor of this worker is lost. Ray says: {error}".splitlines():
                self.hear(line)
        self.ended_at = time.monotonic()
        self.exit_code = exit_code


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
