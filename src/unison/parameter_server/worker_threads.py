"""The coordinator's side of one worker: a thread that sends it calls.

The thread takes the next call from the queue, sends it, answers the worker's requests (such as the
program for new shapes), and waits until the call is done.
"""

from __future__ import annotations

import collections
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import jax
import numpy as np

from unison import errors
from unison.errors import OpError, UnavailableError
from unison.net.array_messages import Connection, Message
from unison.parameter_server.calls import Call
from unison.parameter_server.messages import connect
from unison.parameter_server.programs import WantsBatchError, described
from unison.parameter_server.pulse import Pulse
from unison.parameter_server.serving import dataset_of
from unison.parameter_server.store import ServerLostError

if TYPE_CHECKING:
    from unison.parameter_server.dispatching import Dispatcher

logger = logging.getLogger("unison")

#: The number of calls that a worker has, including the running one, if many are waiting: the values
#: that the next call reads are then returned with the answer to the last push.
_AHEAD = 2

#: Seconds between two attempts to reach a worker.
_PAUSE = 0.5


class WorkerThread:
    """The coordinator's side of one worker: one thread sends it calls, others its heartbeats."""

    def __init__(self, dispatcher: Dispatcher, index: int, address: str):
        self._dispatcher = dispatcher
        self._index = index
        self._address = address
        self._connection: Connection | None = None
        self._pulse: Pulse | None = None
        #: The worker's calls, in order; the first one is running.
        self._running: collections.deque[Call] = collections.deque()
        #: The time that the worker has waited for servers.
        self.waited_seconds = 0.0
        self._sent: set[int] = set()
        self._streams: dict[int, Iterator[Any]] = {}
        self._is_ended = threading.Event()
        self.lost_since = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, name=f"unison-coordinator-{index}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Sends a goodbye when the running calls are done."""
        self._is_ended.set()
        self._thread.join(_PAUSE * 4)
        if self._pulse is not None:
            self._pulse.close()
        if self._connection is not None:
            _say_goodbye(self._connection)
            self._connection.close()

    @property
    def is_lost(self) -> bool:
        return self._connection is None

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def _timeout(self) -> float:
        return self._dispatcher.strategy.timeout_seconds

    def _work(self) -> None:
        queue = self._dispatcher.queue
        while not self._is_ended.is_set():
            if self._connection is None and not self._reached():
                continue
            call: Call | None = None
            if not self._running:
                call = queue.take(self._index)
                if call is None:
                    return
            elif len(self._running) < _AHEAD:
                call = queue.take_more(self._index, len(self._dispatcher.workers))
            if call is not None and self._prepared(call):
                self._running.append(call)
                if not self._sent_off(call) or len(self._running) < _AHEAD:
                    continue
            self._end_first()

    def _prepared(self, call: Call) -> bool:
        """Ensures that the worker has the datasets for a call; otherwise requeues the call."""
        missing = [own.number for own in call.iterators if own.number not in self._sent]
        while missing and self._running:
            self._end_first()  # the worker handles one message at a time
        try:
            for iterator in missing:
                if self._connection is None:
                    raise UnavailableError(message="The worker is lost.")
                self._send_dataset(self._connection, iterator)
        except Exception as error:
            self._on_failure(call, error)
            return False
        return True

    def _reached(self) -> bool:
        """Connects to the worker; if too many workers have been lost for too long, calls fail."""
        try:
            connection = connect(
                self._address,
                _PAUSE,
                f"Worker {self._index}",
                role="coordinator",
                worker=self._index,
                servers=self._dispatcher.strategy.store.addresses,
                patience=self._timeout,
                job=self._dispatcher.strategy.store.job,
            )
            self._pulse = Pulse(
                f"worker {self._index}",
                self._address,
                connection,
                lambda: self._timeout,
                self._say_that_it_is_silent,
            )
        except (OpError, RuntimeError) as error:
            self._say_that_too_many_are_lost(error)
            self._is_ended.wait(_PAUSE)
            return False
        self._sent, self._streams = set(), {}
        self._connection = connection
        self._dispatcher.queue.welcome(self._index)
        return True

    def _say_that_too_many_are_lost(self, error: Exception) -> None:
        workers = self._dispatcher.workers
        needed = self._dispatcher.strategy.num_replicas_in_sync
        lost = [worker for worker in workers if worker.is_lost]
        if len(workers) - len(lost) >= needed:
            return
        seconds = time.monotonic() - max(worker.lost_since for worker in lost)
        if seconds > self._timeout and self._dispatcher.queue.has_work():
            there = len(workers) - len(lost)
            self._dispatcher.queue.fail(
                UnavailableError(
                    message=f"Only {there} of the {len(workers)} workers have been connected for "
                    f"{self._timeout:g} s, {needed} are needed, and calls wait. The last error: "
                    f"{error}"
                )
            )

    def _say_that_it_is_silent(self) -> None:
        logger.warning(
            "worker %d (%s) has sent no heartbeat for %g s: it is considered lost",
            self._index,
            self._address,
            self._timeout,
        )

    def _sent_off(self, call: Call) -> bool:
        """Sends a call to the worker; returns whether that succeeded."""
        connection = self._connection
        assert connection is not None
        unused = self._dispatcher.iterators.unused(self._sent)
        try:
            connection.send(
                "run",
                call.arrays,
                function=call.function,
                iterators=[iterator.number for iterator in call.iterators],
                unused=unused,
                closure=call.number,
                is_step=self._dispatcher.strategy.synchronous,
                settled=self._dispatcher.queue.settled(),
            )
        except Exception as error:
            self._running.remove(call)
            self._on_failure(call, error)
            return False
        for iterator in unused:
            self._sent.remove(iterator)
            self._streams.pop(iterator, None)
        return True

    def _end_first(self) -> None:
        """Waits for the end of the first running call."""
        if not self._running:
            return
        connection = self._connection
        assert connection is not None
        call = self._running.popleft()
        try:
            answer = self._answered(connection)
            program = self._dispatcher.functions.numbered(answer["program"])
            value = jax.tree.unflatten(program.structure, answer.arrays)
            self.waited_seconds += answer["waited"]
            self._dispatcher.queue.finish(call, value, self._index, answer["servers"])
        except Exception as error:
            self._on_failure(call, error)

    def _on_failure(self, call: Call, error: Exception) -> None:
        queue = self._dispatcher.queue
        if isinstance(error, ServerLostError):
            try:
                self._dispatcher.await_server(error)
            except ServerLostError as final:
                queue.fail(final, call, self._index)
            else:
                queue.put_back(call, self._index)
        elif isinstance(error, UnavailableError) and not self._is_alive():
            logger.warning(
                "worker %d (%s) is lost; its calls are rescheduled: %s",
                self._index,
                self._address,
                error,
            )
            self._lose()
            for late in [*reversed(self._running), call]:
                queue.put_back(late, self._index)
            self._running.clear()
        else:
            queue.fail(error, call, self._index)

    def _is_alive(self) -> bool:
        """Returns whether the worker is connected: an error may come from the user's function."""
        return self._connection is not None and self._connection.is_open

    def _lose(self) -> None:
        for connection in (self._connection, self._pulse):
            if connection is not None:
                connection.close()
        self._connection = None
        self._dispatcher.queue.dismiss(self._index)
        self.lost_since = time.monotonic()

    def _send_dataset(self, connection: Connection, iterator: int) -> None:
        maker = self._dispatcher.iterators.maker(iterator)
        try:
            pickled = cloudpickle.dumps(maker)
        except Exception as error:
            logger.warning(
                "The dataset for worker %d is iterated over by the coordinator, which sends the "
                "batches: %r cannot be pickled: %s",
                self._index,
                maker,
                error,
            )
            connection.send("streamed dataset", iterator=iterator)
        else:
            connection.send("dataset", [connection.signed(pickled)], iterator=iterator)
        self._answered(connection)
        self._sent.add(iterator)

    def _answered(self, connection: Connection) -> Message:
        """Returns the worker's answer, after serving its requests."""
        failure: Exception | None = None
        while True:
            message = connection.receive()
            if message.kind == "program":
                failure = self._send_program(connection, message)
            elif message.kind == "host":
                failure = self._call_host(connection, message)
            elif message.kind == "next":
                failure = self._send_batch(connection, message["iterator"])
            elif message.kind == "failed":
                raise failure or _error_of(message)
            elif message.kind == "server lost":
                store = self._dispatcher.strategy.store
                server = message["server"]
                raise ServerLostError(server, store.addresses[server], message["why"])
            else:
                return message

    def _send_program(self, connection: Connection, message: Message) -> Exception | None:
        """Sends the program that the worker requests; returns the error if that fails."""
        try:
            program = self._dispatcher.functions.program(message["function"], message["batches"])
        except WantsBatchError as wants:
            connection.send("take more", counts=wants.counts)
            return None
        except Exception as error:
            connection.send("cancel")
            return error
        connection.send(
            "program",
            [np.frombuffer(program.data, np.uint8), np.frombuffer(program.lookups, np.uint8)],
            program=program.number,
            description=program.description,
        )
        return None

    def _call_host(self, connection: Connection, message: Message) -> Exception | None:
        """Calls the host functions of a call before its push; returns their exception, if any."""
        try:
            program = self._dispatcher.functions.numbered(message["program"])
            program.call_host(message.arrays)
        except Exception as error:
            connection.send("cancel")
            return error
        connection.send("called")
        return None

    def _send_batch(self, connection: Connection, iterator: int) -> Exception | None:
        """Sends the next batch of a dataset that the coordinator iterates over."""
        try:
            if iterator not in self._streams:
                with self._dispatcher.strategy.scope():
                    maker = self._dispatcher.iterators.maker(iterator)
                    self._streams[iterator] = iter(dataset_of(maker))
            structure, leaves = described(next(self._streams[iterator]))
        except StopIteration:
            connection.send("end")
            return None
        except Exception as error:
            connection.send("error", text=str(error))
            return error
        connection.send("batch", leaves, structure=json.dumps(structure))
        return None


def _error_of(message: Message) -> Exception:
    """Returns the error of a function that has failed on a worker."""
    text = message["text"]
    if message["traceback"]:
        text += f"\n\nOn the worker:\n{message['traceback']}"
    kind: Any = getattr(errors, message["kind_of_error"], None)
    if isinstance(kind, type) and issubclass(kind, OpError):
        return kind(message=text)
    return errors.UnknownError(message=text)


def _say_goodbye(connection: Connection) -> None:
    try:
        connection.send("goodbye")
    except UnavailableError:
        return
