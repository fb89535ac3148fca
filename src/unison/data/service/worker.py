"""`InputWorker`: computes datasets in this process, and serves their elements."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from unison.data.plan import Plan
from unison.data.service.buffers import Buffer, FirstCome, Request, Rounds, Window
from unison.data.service.configuration import ANY_PORT, ShardingPolicy, WorkerConfig
from unison.data.service.connections import Answer, Calls, Listening
from unison.data.service.elements import described_error, packed
from unison.data.service.iterations import JobSpec, spec_of
from unison.data.service.own_random_numbers import with_random_numbers_of
from unison.data.service.pickles import unpickled
from unison.data.service.splits import with_splits
from unison.data.service.tasks import Task
from unison.errors import (
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    ResourceExhaustedError,
    UnavailableError,
)
from unison.net.addresses import joined_address
from unison.net.array_messages import Connection, Message
from unison.net.secret import key

logger = logging.getLogger("unison")

#: Seconds for which a request for elements waits for some.
_SECONDS_OF_A_REQUEST = 2.0

#: The seconds that a split should take, the first one's rows, and the most rows.
_SECONDS_OF_A_SPLIT = 0.05
_FIRST_ROWS = 16
_MOST_ROWS = 1 << 16

#: Seconds between two attempts to reach the dispatcher.
_BETWEEN_ATTEMPTS = 0.2

#: Seconds for which the thread of heartbeats is awaited.
_SECONDS_TO_CLOSE = 5.0

#: The number of datasets that are kept loaded.
_MOST_DATASETS = 8


class InputWorker:
    """A worker of an input service, in threads of this process.

    Its tasks share the process with whatever else runs there: `WorkerServer` starts one in a
    process of its own.

    Args:
        config: The configuration.
        worker_id: Its id. Default: a new one.

    Raises:
        OSError: It cannot listen at its address.
    """

    def __init__(self, config: WorkerConfig, worker_id: str | None = None):
        self._config = config
        #: Its id.
        self.id = worker_id or secrets.token_hex(8)
        self._secret = key()
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        #: The tasks of which the dispatcher has to know that they have ended, and the iterations
        #: of which it knows that this worker has no elements left.
        self._ended: set[int] = set()
        self._without_elements: set[int] = set()
        self._datasets: dict[str, bytes] = {}
        self._number: int | None = None
        self._version = -1
        self._is_registered = threading.Event()
        self._is_answered = threading.Event()  # by the dispatcher, which may have refused it
        self._is_stopping = threading.Event()
        self._stopped = threading.Event()
        self._failure: OpError | None = None
        self._calls = self._new_calls()
        self._heartbeats = self._new_calls()
        self._listening = Listening(config.host, config.own_port, "input worker", self._answer)
        #: The address at which it is reached.
        self.address = _announced(config, self._listening.port)
        self._heart = threading.Thread(target=self._beat, name="unison-input-worker", daemon=True)
        self._heart.start()

    def _new_calls(self) -> Calls:
        return Calls(
            self._config.dispatcher_address,
            self._config.dispatcher_timeout,
            lambda: not self._is_stopping.is_set(),
        )

    def wait_until_registered(self, seconds: float) -> bool:
        """Waits until the dispatcher knows it, and returns whether it does.

        Raises:
            OpError: The dispatcher refuses it.
        """
        self._is_answered.wait(seconds)
        if self._failure is not None:
            raise self._failure
        return self._is_registered.is_set()

    def join(self) -> None:
        """Waits until it has stopped.

        Raises:
            DeadlineExceededError: The dispatcher cannot be reached.
        """
        self._stopped.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stops serving, and tells the dispatcher."""
        with self._lock:
            if self._is_stopping.is_set():
                return
            # No heartbeat follows what the dispatcher is told below.
            self._is_stopping.set()
            tasks = list(self._tasks.values())
        # They end before the calls that they make do, which is no error of their elements.
        for task in tasks:
            task.close()
        self._heartbeats.close()
        with contextlib.suppress(OpError, OSError):
            if self._is_registered.is_set():
                self._calls.call("leave", worker=self.id)
        self._calls.close()
        if threading.current_thread() is not self._heart:
            self._heart.join(_SECONDS_TO_CLOSE)
        with self._lock:
            tasks = list({*tasks, *self._tasks.values()})
        for task in tasks:
            task.close()
        self._listening.close()
        for task in tasks:
            task.close(waits=True)
        self._stopped.set()

    # -- the dispatcher --------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._is_stopping.is_set():
            with self._lock:
                ended = sorted(self._ended)
            try:
                seconds = self._config.heartbeat_interval
                answer = self._tell(self._heartbeats, ended, self._version, seconds)
                self._number, self._version = int(answer["number"]), int(answer["version"])
                self._follow(
                    {int(number): task for number, task in answer["tasks"]},
                    {int(number) for number in answer["ended"]},
                )
                self._is_registered.set()
                self._is_answered.set()
            except (UnavailableError, ResourceExhaustedError):  # also: it cannot write its journal
                self._is_stopping.wait(_BETWEEN_ATTEMPTS)
            except OpError as error:
                if not self._is_stopping.is_set():
                    logger.error("The input worker at %s stops: %s", self.address, error)
                    self._failure = error
                    self._is_answered.set()
                    self._stopped.set()
                    return

    def _tell(self, calls: Calls, ended: list[int], version: int, seconds: float) -> Message:
        """Tells the dispatcher of this worker; returns what it wants.

        Args:
            calls: The connection.
            ended: The tasks that have ended.
            version: The state that is known here.
            seconds: For which the dispatcher waits for another one before it answers.
        """
        return calls.call(
            "work",
            worker=self.id,
            address=self.address,
            number=self._number,
            ended=ended,
            version=version,
            seconds=seconds,
        )

    def _follow(self, wanted: dict[int, dict[str, Any]], without_elements: set[int]) -> None:
        """Starts the tasks that are wanted, and ends the others."""
        with self._lock:
            self._without_elements = without_elements
            unwanted = [self._tasks.pop(each) for each in list(self._tasks) if each not in wanted]
            for number, described in wanted.items():
                if number not in self._tasks:
                    self._tasks[number] = self._started(number, described)
            self._ended &= self._tasks.keys()
        for task in unwanted:
            task.close()

    def _started(self, number: int, described: dict[str, Any]) -> Task:
        spec = spec_of(described)
        buffer: Buffer = FirstCome()
        if spec.num_consumers is not None:
            buffer = Rounds(spec.num_consumers)
        elif spec.is_shared:
            buffer = Window()

        def note_ended() -> None:
            with self._lock:
                self._ended.add(number)
            # The heartbeat that waits for a change ends, and the next one tells.
            self._version = -1
            with contextlib.suppress(OpError, OSError):
                self._tell(self._calls, [number], -1, 0.0)

        own = self._number or 0
        place = described["place"]
        num_places = int(described["num_places"])
        index = int(described["index"])
        task: list[Task] = []

        def is_closed() -> bool:
            return bool(task) and task[0].is_closed

        def open_plan() -> Plan:
            plan = unpickled(self._payload(spec.dataset), self._secret)
            return self._part(plan, number, spec, index, own, place, num_places, is_closed)

        task.append(Task(open_plan, buffer, note_ended, f"unison-input-task-{number}"))
        return task[0]

    def _payload(self, dataset: str) -> bytes:
        with self._lock:
            found = self._datasets.get(dataset)
        if found is None:
            (array,) = self._calls.call("payload", id=dataset).arrays
            found = array.tobytes()
            with self._lock:
                self._datasets[dataset] = found
                while len(self._datasets) > _MOST_DATASETS:
                    del self._datasets[next(iter(self._datasets))]
        return found

    def _part(
        self,
        plan: Plan,
        number: int,
        spec: JobSpec,
        index: int,
        own: int,
        place: int | None,
        num_places: int,
        is_closed: Callable[[], bool],
    ) -> Plan:
        """Returns the plan of this worker's part of an iteration."""
        if spec.policy is ShardingPolicy.DYNAMIC:
            splits = _Splits(self._calls, self.id, number, is_closed)
            return with_splits(with_random_numbers_of(plan, index, own), splits.hand_out)
        if spec.policy is ShardingPolicy.OFF:
            return with_random_numbers_of(plan, index, own)
        # Imports JAX, which a worker may not need otherwise.
        from unison.data.service.shares import share_of

        assert place is not None
        # All workers have the same order, of which each takes its share.
        return share_of(with_random_numbers_of(plan, index, 0), spec.policy, num_places, place)

    # -- consumers -------------------------------------------------------------------------

    def _answer(self, connection: Connection, message: Message) -> Answer:
        if message.kind != "take":
            raise InvalidArgumentError(
                message=f"Expected a request for elements. Received: {message.kind[:80]!r}"
            )
        if message["worker"] != self.id:
            # A lost worker had this address: what it was asked for is not this one's to send.
            return "other", (), {}
        number = int(message["iteration"])
        request = Request(
            int(message["most"]),
            int(message["consumer"]),
            int(message["round"]),
            str(message["trainer"]),
        )
        with self._lock:
            task = self._tasks.get(number)
            has_ended = number in self._without_elements
        if task is None and has_ended:
            return "end", (), {}
        if task is None:
            # It is not known yet, or not wanted any more: the consumer asks the dispatcher.
            return self._later()
        try:
            chunk = task.take(request, _SECONDS_OF_A_REQUEST)
            if chunk is None:
                return self._later() if task.is_closed else ("later", (), {})
            fields, arrays = packed(chunk)
        except StopIteration:
            return "end", (), {}
        except Exception as error:
            where = f"the input worker at {self.address} (process {os.getpid()})"
            return "failed", (), described_error(error, where)
        return "elements", arrays, fields

    def _later(self) -> Answer:
        time.sleep(_BETWEEN_ATTEMPTS / 10)  # the consumer asks again at once
        return "later", (), {}


class _Splits:
    """Asks the dispatcher for rows, as many as take some time."""

    def __init__(self, calls: Calls, worker: str, iteration: int, is_closed: Callable[[], bool]):
        self._calls = calls
        self._worker = worker
        self._requests = itertools.count()
        self._iteration = iteration
        self._is_closed = is_closed
        self._most = _FIRST_ROWS
        self._begun: float | None = None
        self._latest = 0

    def hand_out(self, source: int, repetition: int, is_nested: bool) -> tuple[int, int] | None:
        """Returns the next rows of a source for this worker; None if there are none left.

        Raises:
            CancelledError: The task is not wanted any more.
        """
        if self._is_closed():
            raise CancelledError(message="The input task was ended.")
        now = time.monotonic()
        if self._begun is not None and self._latest:
            seconds_of_row = max((now - self._begun) / self._latest, 1e-9)
            wanted = int(_SECONDS_OF_A_SPLIT / seconds_of_row)
            self._most = min(max(wanted, 1), 4 * self._most, _MOST_ROWS)
        answer = self._calls.call(
            "split",
            iteration=self._iteration,
            source=source,
            repetition=repetition,
            most=1 if is_nested else self._most,
            worker=self._worker,
            request=next(self._requests),
        )
        self._begun = time.monotonic()
        if answer["rows"] is None:
            self._latest = 0
            return None
        begin, end = answer["rows"]
        self._latest = end - begin
        return begin, end


def _announced(config: WorkerConfig, port: int) -> str:
    """Returns the address at which a worker is reached.

    Raises:
        FailedPreconditionError: The configuration names another port.
    """
    if config.worker_address is None or ":" not in config.worker_address:
        return joined_address(config.host, port)
    given = config.worker_address.replace(ANY_PORT, str(port))
    if not given.endswith(f":{port}"):
        raise FailedPreconditionError(
            message=f"Expected worker_address to end with the port {port} of the worker. "
            f"Received: {config.worker_address!r}. Write %port% for it."
        )
    return given
