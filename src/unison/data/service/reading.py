"""Reading an iteration of a job: one thread for each worker, and a bounded buffer."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import threading
import time
import weakref
from typing import Any

from unison.data.chunks import Chunk
from unison.data.service.connections import Calls, connect
from unison.data.service.elements import error_of, unpacked
from unison.data.service.iterations import (
    ROUNDS_OF_BLOCK,
    JobSpec,
    described_spec,
    worker_of_round,
)
from unison.data.service.local_workers import ids_of_local_workers
from unison.data.transformations.prefetching import is_wanted
from unison.errors import CancelledError, FailedPreconditionError, OpError, UnavailableError
from unison.interrupts import wait_until
from unison.net.array_messages import Connection

#: The requests of a worker that are answered one after the other without waiting for this end.
_REQUESTS_OF_WORKER = 3

#: The chunks that wait in the buffer, for each worker.
_CHUNKS_OF_WORKER = 2

#: The rounds of coordinated reads that are read ahead.
_ROUNDS_AHEAD = 4

#: Seconds between two attempts to reach a worker, and for one attempt.
_BETWEEN_ATTEMPTS = 0.1
_SECONDS_TO_CONNECT = 5.0

#: Seconds after an answer without elements.
_AFTER_NOTHING = 0.005

#: Seconds for which a worker's answer is awaited: it answers earlier, if only that it has nothing.
_SECONDS_OF_AN_ANSWER = 30.0

#: Seconds for which the dispatcher waits for a change before it answers.
_SECONDS_OF_WAITING = 5.0

#: Seconds for which threads are awaited.
_SECONDS_TO_CLOSE = 5.0

#: Seconds for which a lost worker may send what was requested from it.
_SECONDS_AFTER_LOSS = 1.0

#: Seconds for which the dispatcher is tried again if it does not answer.
_SECONDS_FOR_DISPATCHER = 60.0


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A program's way of reading a job.

    Attributes:
        address: The address of the dispatcher.
        job: The name of the job.
        spec: What all consumers of the job agree on.
        index: The index of this one among coordinated consumers; None: first come, first served.
        max_outstanding_requests: The most elements that are requested or buffered; None: chosen.
        trainer: The name of the training program, if elements are kept for several.
        is_local: Whether only workers that this process has started are read.
        timeout: Seconds for which workers are awaited while there are none.
    """

    address: str
    job: str
    spec: JobSpec
    index: int | None = None
    max_outstanding_requests: int | None = None
    trainer: str = ""
    is_local: bool = False
    timeout: float = 120.0


class JobReader:
    """Reads an iteration of a job, ahead, in threads.

    Args:
        consumer: How.
        index: The number of the iteration.
    """

    def __init__(self, consumer: Consumer, index: int):
        self._state = _State(consumer, index)
        # The threads reference the state only, so that dropping this object ends them.
        self._finalizer = weakref.finalize(self, self._state.close)

    def next(self) -> Chunk | None:
        """Returns the next elements; None at the end, also in further calls.

        Raises:
            UnavailableError: There are no workers.
            OpError: The dispatcher does not answer, or rejects the job.
            Exception: What a worker's function has raised.
        """
        return self._state.next()

    def close(self) -> None:
        """Ends the threads, and tells the dispatcher."""
        self._finalizer()


class _State:
    """The state that the threads of a reader share.

    Args:
        consumer: How the job is read.
        index: The number of the iteration.
    """

    def __init__(self, consumer: Consumer, index: int):
        self.consumer = consumer
        self._index = index
        self._id = secrets.token_hex(8)
        self.changed = threading.Condition()
        self.is_closed = False
        #: Whether there are no elements but those that are requested or buffered.
        self.is_complete = False
        self.iteration = -1
        self.calls = Calls(consumer.address, _SECONDS_FOR_DISPATCHER, lambda: not self.is_closed)
        # The other one waits for changes.
        self.round_calls = Calls(
            consumer.address, _SECONDS_FOR_DISPATCHER, lambda: not self.is_closed
        )
        #: The addresses of the present workers, by id.
        self.workers: dict[str, str] = {}
        self._fetching: dict[str, _Fetching] = {}
        #: The workers that have no elements left.
        self.ended: set[str] = set()
        #: Why a worker could not be reached, and where.
        self.unreachable = ""
        self._buffer: collections.deque[Chunk | Exception] = collections.deque()
        #: The elements that are requested or buffered.
        self._outstanding = 0
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._has_begun = False
        self._has_ended = False

    # -- the consumer's thread -------------------------------------------------------------

    def next(self) -> Chunk | None:
        if not self._has_begun:
            self._begin()
        if self._has_ended:
            return None
        item = wait_until(self.changed, self._may_take, self._take)
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # its traceback references this frame
        if item is None:
            self._has_ended = True
            self.close()
        return item

    def _begin(self) -> None:
        spec = self.consumer.spec
        answer = self.calls.call(
            "join",
            consumer=self._id,
            job=self.consumer.job,
            index=self._index,
            spec=described_spec(spec),
        )
        self.iteration = int(answer["iteration"])
        self._has_begun = True
        self.start(self._follow, "unison-input-job")
        if spec.num_consumers is not None:
            self.start(_Rounds(self).run, "unison-input-rounds")

    def start(self, target: Any, name: str) -> None:
        """Starts a thread."""
        thread = threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, target: Any) -> None:
        try:
            target()
        except Exception as error:
            if not self.is_closed:
                self.fail(error)

    def _may_take(self) -> bool:
        if not is_wanted():
            return True
        return bool(self._buffer) or self._failure is not None or self._is_at_end()

    def _is_at_end(self) -> bool:
        if self.is_closed:
            return True
        is_coordinated = self.consumer.spec.num_consumers is not None
        return self.is_complete and not self._fetching and not is_coordinated

    def _take(self) -> Chunk | Exception | None:
        if self._buffer:
            item = self._buffer.popleft()
            if isinstance(item, Chunk):
                self._outstanding -= len(item)
            self.changed.notify_all()
            return item
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._has_ended = True
            return failure
        if not self._is_at_end():
            return CancelledError(message="The iterator that reads ahead was dropped.")
        return None

    # -- the threads -----------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Ends the iteration with an error."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def put(self, item: Chunk | Exception, reserved: int) -> None:
        """Adds elements for which `reserved` were reserved, or an error."""
        with self.changed:
            self._buffer.append(item)
            self._outstanding += (len(item) if isinstance(item, Chunk) else 0) - reserved
            self.changed.notify_all()

    def reserve(self, worker: _Fetching | None, waits: bool = True) -> int | None:
        """Returns how many more elements may be requested.

        Args:
            worker: The thread that requests them; None for the only one.
            waits: Whether to wait until some may be.

        Returns:
            0: as many as the worker sends at a time. None: none.
        """
        with self.changed:
            while not self.is_closed and (worker is None or not worker.is_over):
                most = self.consumer.max_outstanding_requests
                if worker is None:
                    if self._outstanding < (most or _ROUNDS_AHEAD):
                        self._outstanding += 1
                        return 1
                elif most is None:
                    if len(self._buffer) < _CHUNKS_OF_WORKER * max(len(self._fetching), 1):
                        return 0
                elif self._outstanding < most:
                    each = max((most - self._outstanding) // max(len(self._fetching), 1), 1)
                    self._outstanding += each
                    return each
                if not waits:
                    return None
                self.changed.wait()
            return None

    def give_back(self, reserved: int) -> None:
        """Ends a reservation for which no elements have been received."""
        with self.changed:
            self._outstanding -= reserved
            self.changed.notify_all()

    def forget(self, worker: _Fetching) -> None:
        """Removes a thread that has ended."""
        with self.changed:
            if self._fetching.get(worker.id) is worker:
                del self._fetching[worker.id]
            if self.consumer.is_local and self._have_ended():
                self.is_complete = True
            self.changed.notify_all()

    def _have_ended(self) -> bool:
        return bool(self.workers) and self.workers.keys() <= self.ended

    def _follow(self) -> None:
        """Follows which workers there are, until the iteration is complete."""
        version = -1
        awaited_since = time.monotonic()
        while not self.is_closed:
            left = awaited_since + self.consumer.timeout - time.monotonic()
            answer = self.calls.call(
                "read",
                iteration=self.iteration,
                consumer=self._id,
                version=version,
                seconds=min(max(left, 0.0), _SECONDS_OF_WAITING),
            )
            version = int(answer["version"])
            workers = {str(key): str(value) for key, value in answer["workers"].items()}
            if self.consumer.is_local:
                own = ids_of_local_workers()
                workers = {key: value for key, value in workers.items() if key in own}
            with self.changed:
                self.workers = workers
                self.is_complete = bool(answer["is_complete"])
                self._follow_workers()
                if self.consumer.is_local and self._have_ended():
                    self.is_complete = True
                self.changed.notify_all()
                are_reached = any(each.is_connected for each in self._fetching.values())
            if self.is_complete:
                self._await_lost()
                return
            # Of coordinated reads, `_Rounds` awaits the workers.
            if are_reached or (workers and self.consumer.spec.num_consumers is not None):
                awaited_since = time.monotonic()
            elif time.monotonic() - awaited_since > self.consumer.timeout:
                raise self.no_workers()

    def _follow_workers(self) -> None:
        """Starts threads for new workers, and ends those of lost ones."""
        if self.consumer.spec.num_consumers is not None:
            return
        now = time.monotonic()
        for worker in self._fetching.values():
            if not worker.is_over and worker.id not in self.workers:
                worker.is_over, worker.over_since = True, now
            elif worker.is_over and now - worker.over_since > _SECONDS_AFTER_LOSS:
                worker.close()
        for worker_id, address in self.workers.items():
            is_new = worker_id not in self._fetching and worker_id not in self.ended
            if is_new and not self.is_complete:
                fetching = _Fetching(self, worker_id, address)
                self._fetching[worker_id] = fetching
                self.start(fetching.run, "unison-input-fetch")

    def _await_lost(self) -> None:
        """Ends the threads of lost workers when they have had time to send what was requested."""

        def lost() -> list[_Fetching]:
            return [each for each in self._fetching.values() if each.is_over]

        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or not lost(), _SECONDS_AFTER_LOSS)
            for worker in lost():
                worker.close()

    def no_workers(self) -> UnavailableError:
        """Returns the error for workers that did not come."""
        if self.workers and self.unreachable:
            return UnavailableError(
                message="Timed out waiting for input workers: none that is registered with the "
                f"dispatcher at {self.consumer.address} can be reached for "
                f"{self.consumer.timeout:g} s. {self.unreachable} Give workers an address at which "
                "this machine reaches them: WorkerConfig(worker_address=...)."
            )
        which = "that this process has started " if self.consumer.is_local else ""
        return UnavailableError(
            message=f"Timed out waiting for input workers: none {which}is registered with the "
            f"dispatcher at {self.consumer.address}, or those that were are lost, for "
            f"{self.consumer.timeout:g} s. Start workers: WorkerServer(WorkerConfig("
            f"{self.consumer.address!r})), or `unison data-service worker`."
        )

    def close(self) -> None:
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            fetching = list(self._fetching.values())
            self._buffer.clear()
            self.changed.notify_all()
        for worker in fetching:
            worker.close()
        if self.iteration >= 0:
            self._release()
        self.calls.close()
        self.round_calls.close()
        end = time.monotonic() + _SECONDS_TO_CLOSE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))

    def _release(self) -> None:
        # On a connection of its own: the other one waits for a change.
        with contextlib.suppress(OpError, OSError):
            connection = connect(self.consumer.address, 0.5, "The dispatcher")
            with contextlib.closing(connection):
                connection.send("release", iteration=self.iteration, consumer=self._id)
                connection.wait(1.0)


class _Fetching:
    """Fetches what one worker computes.

    Args:
        state: What the threads share.
        worker_id: The worker.
        address: Its address.
    """

    def __init__(self, state: _State, worker_id: str, address: str):
        self.id = worker_id
        #: Whether the worker is lost, and since when.
        self.is_over = False
        self.over_since = 0.0
        #: Whether it can be reached.
        self.is_connected = False
        self._state = state
        self._address = address
        self._connection: Connection | None = None
        self._reserved: collections.deque[int] = collections.deque()

    def close(self) -> None:
        """Ends a wait for the worker."""
        connection = self._connection
        if connection is not None:
            connection.shut_down()

    def run(self) -> None:
        """Fetches until there are no elements left, or the worker is lost."""
        try:
            while not (self._state.is_closed or self.is_over):
                try:
                    if self._fetch():
                        self._state.ended.add(self.id)
                        return
                except (UnavailableError, OSError) as error:
                    if not self.is_connected:
                        self._state.unreachable = str(error)
                    # Killed or unreachable; if it is lost, the dispatcher says so soon.
                    if self._state.is_complete:
                        return
                    time.sleep(_BETWEEN_ATTEMPTS)
                finally:
                    self._disconnect()
        finally:
            self._state.forget(self)

    def _disconnect(self) -> None:
        self.is_connected = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for reserved in self._reserved:
            self._state.give_back(reserved)
        self._reserved.clear()

    def _fetch(self) -> bool:
        """Fetches until the connection is lost; returns whether there are no elements left."""
        self._connection = connection = _connected(self._address, self.id)
        self.is_connected = True
        wants_more = True
        while True:
            was_complete = self._state.is_complete
            while wants_more and len(self._reserved) < _REQUESTS_OF_WORKER:
                # It must not wait while an answer may come that others wait for.
                reserved = self._state.reserve(self, waits=not self._reserved)
                if reserved is None:
                    break
                self._reserved.append(reserved)
                _ask(connection, self._state, self.id, reserved)
            if not self._reserved:
                return False
            answer = _answer_of(connection)
            reserved = self._reserved.popleft()
            if isinstance(answer, Chunk | Exception):
                self._state.put(answer, reserved)
                continue
            self._state.give_back(reserved)
            if answer == "end" or was_complete:
                wants_more = False
                if not self._reserved:
                    return True
            else:
                time.sleep(_AFTER_NOTHING)  # so that others may request elements


class _Rounds:
    """Reads rounds of coordinated reads, each from the worker that serves it."""

    def __init__(self, state: _State):
        self._state = state
        self._connections: dict[str, Connection] = {}
        self._blocks: dict[int, list[str]] = {}

    def run(self) -> None:
        """Reads until it is called off.

        Raises:
            FailedPreconditionError: The dataset has ended.
        """
        number = 0
        try:
            while self._state.reserve(None) is not None:
                item = self._read(number)
                if item is None:
                    return
                self._state.put(item, 1)
                number += 1
        finally:
            for connection in self._connections.values():
                connection.close()

    def _read(self, number: int) -> Chunk | Exception | None:
        """Returns this consumer's element of a round; None if it is called off."""
        awaited_since = time.monotonic()
        while not self._state.is_closed:
            workers = self._workers_of(number)
            address = None
            if workers:
                worker = worker_of_round(workers, number)
                with self._state.changed:
                    address = self._state.workers.get(worker)
            if address is not None:
                try:
                    connection = self._connected(worker, address)
                    _ask(connection, self._state, worker, 1, number)
                    answer = _answer_of(connection)
                    if isinstance(answer, Chunk | Exception):
                        return answer
                    if answer == "end":
                        return _ended_early(worker)
                    awaited_since = time.monotonic()
                    continue
                except (UnavailableError, OSError) as error:
                    if worker not in self._connections:
                        self._state.unreachable = str(error)
                    self._drop(worker)
            self._blocks.clear()  # a lost worker's rounds are assigned to another one
            if time.monotonic() - awaited_since > self._state.consumer.timeout:
                return self._state.no_workers()
            with self._state.changed:
                self._state.changed.wait(_BETWEEN_ATTEMPTS)
        return None

    def _workers_of(self, number: int) -> list[str]:
        block = number // ROUNDS_OF_BLOCK
        if block not in self._blocks:
            calls, iteration = self._state.round_calls, self._state.iteration
            found = calls.call("round", iteration=iteration, round=number)["workers"]
            self._blocks = {block: [str(each) for each in found]}
        return self._blocks[block]

    def _drop(self, worker: str) -> None:
        if worker in self._connections:
            self._connections.pop(worker).close()

    def _connected(self, worker: str, address: str) -> Connection:
        if worker not in self._connections:
            self._connections[worker] = _connected(address, worker)
        return self._connections[worker]


def _connected(address: str, worker: str) -> Connection:
    """Connects to a worker. It is not tried again here: the worker may be lost."""
    name = f"The input worker {worker}"
    return connect(address, _SECONDS_TO_CONNECT, name, lambda: False)


def _ask(
    connection: Connection, state: _State, worker: str, most: int, round_number: int = -1
) -> None:
    index = state.consumer.index
    connection.send(
        "take",
        worker=worker,
        iteration=state.iteration,
        most=most,
        consumer=-1 if index is None else index,
        round=round_number,
        trainer=state.consumer.trainer,
    )


def _answer_of(connection: Connection) -> Chunk | Exception | str:
    """Returns elements, a worker's error, "later" or "end".

    Raises:
        UnavailableError: The connection or the worker is lost, or the worker does not answer.
    """
    if not connection.wait(_SECONDS_OF_AN_ANSWER):
        raise UnavailableError(message="Timed out: the input worker does not answer.")
    answer = connection.receive()
    if answer.kind == "elements":
        return unpacked(answer.fields, answer.arrays)
    if answer.kind in ("failed", "error"):
        return error_of(answer.fields)
    if answer.kind == "other":
        raise UnavailableError(message="The input worker is lost: another one has its address.")
    return answer.kind


def _ended_early(worker: str) -> Exception:
    return FailedPreconditionError(
        message="Coordinated reads (num_consumers) need a dataset that does not end, so that no "
        f"consumer gets out of step. Received: the end of the dataset from input worker {worker}. "
        "Add .repeat() to the dataset."
    )
