"""`DispatchServer`: the process that knows the datasets, the workers and the jobs."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

from unison.data.service.configuration import DispatcherConfig, own_host
from unison.data.service.connections import Answer, Listening
from unison.data.service.iterations import spec_of
from unison.data.service.registry import RECONNECTION_SECONDS, Event, Registry
from unison.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    ResourceExhaustedError,
)
from unison.net.addresses import joined_address
from unison.net.array_messages import Connection, Message
from unison.storage.decoding import decoding
from unison.storage.file_systems import is_remote
from unison.storage.journal import Journal

logger = logging.getLogger("unison")

#: Seconds for which a question about changes waits for one.
_MOST_SECONDS_OF_WAITING = 5.0

#: The most rows of one split.
_MOST_ROWS = 1 << 20


class DispatchServer:
    """A dispatcher in this process, which serves from its creation on.

    It computes nothing and loads no dataset: it hands out rows by number. Clients and workers must
    know this user's key, or `UNISON_KEY`.

    Args:
        config: The configuration.
        start: Whether it starts serving immediately.

    Raises:
        OSError: It cannot listen at its address.
        FailedPreconditionError: Another dispatcher uses the same `work_dir`.
        DataLossError: The journal is corrupt.

    Examples:
        >>> from unison.data import Dataset, service
        >>> dispatcher = service.DispatchServer()
        >>> worker = service.WorkerServer(
        ...     service.WorkerConfig(dispatcher.target.split("://")[1]))
        >>> dataset = Dataset.range(5).apply(service.distribute("parallel_epochs",
        ...                                                     dispatcher.target))
        >>> [int(number) for number in dataset]
        [0, 1, 2, 3, 4]
        >>> worker.stop()
        >>> dispatcher.stop()

    TF: `tf.data.experimental.service.DispatchServer`.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True):
        self._config = config or DispatcherConfig()
        self._serving: _Serving | None = None
        self._stopped = threading.Event()
        if start:
            self.start()

    def start(self) -> None:
        """Starts serving.

        Raises:
            OSError: It cannot listen at its address.
        """
        if self._serving is None:
            self._serving = _Serving(self._config)
            # When all references to it are deleted, it stops.
            weakref.finalize(self, self._serving.close)

    def join(self) -> None:
        """Waits until it is stopped."""
        self._stopped.wait()

    def stop(self) -> None:
        """Stops serving; what the journal holds stays."""
        if self._serving is not None:
            self._serving.close()
        self._stopped.set()

    @property
    def target(self) -> str:
        """Its address, in TensorFlow's format: `grpc://host:port`."""
        if self._serving is None:
            raise FailedPreconditionError(message="The dispatcher has not been started: start().")
        return f"grpc://{self._serving.address}"

    @property
    def num_workers(self) -> int:
        """The number of workers that are registered and not lost."""
        return 0 if self._serving is None else self._serving.num_workers


class _Serving:
    def __init__(self, config: DispatcherConfig):
        self._config = config
        self._changed = threading.Condition()
        self._is_closed = False
        self._workers: dict[Connection, str] = {}
        self._journal: Journal | None = None
        if config.fault_tolerant_mode:
            self._journal = _opened(str(config.work_dir))
        self._registry = Registry(
            config.worker_addresses,
            time.monotonic(),
            self._record,
            config.worker_timeout,
            config.job_gc_timeout,
        )
        try:
            if self._journal is not None:
                with decoding(f"The journal {self._journal.path}", "Remove it."):
                    for event, payload in self._journal.records:
                        self._registry.apply(event, payload)
            # Versions of a dispatcher before this one are not taken for its own.
            self._registry.version += secrets.randbits(40)
            host = own_host(config.host)
            self._listening = Listening(host, config.port, "dispatcher", self._answer, self._ended)
        except BaseException:
            self._close_journal()
            raise
        self.address = joined_address(host, self._listening.port)
        self._ticking = threading.Thread(
            target=self._tick, name="unison-dispatcher-expiry", daemon=True
        )
        self._ticking.start()

    @property
    def num_workers(self) -> int:
        with self._changed:
            return len(self._registry.workers)

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._listening.close()
        if threading.current_thread() is not self._ticking:
            self._ticking.join()
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _record(self, event: Event, payload: bytes) -> None:
        if self._journal is None:
            return
        try:
            self._journal.append(event, payload)
        except OSError as error:
            raise ResourceExhaustedError(
                message=f"The dispatcher cannot write its journal {self._journal.path}: {error}. "
                "Free space there; the dispatcher goes on without being restarted."
            ) from error

    def _tick(self) -> None:
        """Removes what has expired."""
        every = min(
            RECONNECTION_SECONDS / 2,
            self._config.worker_timeout / 4,
            max(self._config.job_gc_check_interval, 0.05),
        )
        has_failed = False
        with self._changed:
            while not self._is_closed:
                self._changed.wait(every)
                before = self._registry.version
                try:
                    self._registry.expire(time.monotonic())
                    has_failed = False
                except OpError as error:
                    if not has_failed:
                        logger.warning("What has expired is removed later: %s", error)
                    has_failed = True
                if self._registry.version != before:
                    self._changed.notify_all()

    # -- messages --------------------------------------------------------------------------

    def _answer(self, connection: Connection, message: Message) -> Answer:
        answers: dict[str, Callable[[Connection, Message], Answer]] = {
            "register": self._register,
            "describe": self._describe,
            "payload": self._payload,
            "join": self._join,
            "read": self._read,
            "release": self._release,
            "work": self._work,
            "leave": self._leave,
            "split": self._split,
            "round": self._round,
        }
        if message.kind not in answers:
            raise InvalidArgumentError(
                message=f"Expected a message of an input service. Received: {message.kind[:80]!r}. "
                "Run the same version of Unison in all processes."
            )
        with self._changed:
            before = self._registry.version
            try:
                return answers[message.kind](connection, message)
            finally:
                if self._registry.version != before:
                    self._changed.notify_all()

    def _ended(self, connection: Connection) -> None:
        with self._changed:
            worker = self._workers.pop(connection, None)
            if worker is not None and worker not in self._workers.values():
                self._registry.close_worker(worker, time.monotonic())

    def _register(self, connection: Connection, message: Message) -> Answer:
        (payload,) = message.arrays
        about, given = dict(message["about"]), message["id"]
        about = {
            "description": str(about["description"]),
            "signature": about["signature"],
            "cardinality": int(about["cardinality"]),
            "split_sizes": [int(size) for size in about["split_sizes"] or ()],
            "split_error": str(about["split_error"] or ""),
        }
        found = self._registry.register_dataset(
            about, payload.tobytes(), None if given is None else str(given)
        )
        return "registered", (), {"id": found}

    def _describe(self, connection: Connection, message: Message) -> Answer:
        return "described", (), {"about": self._registry.dataset(str(message["id"])).about}

    def _payload(self, connection: Connection, message: Message) -> Answer:
        payload = self._registry.dataset(str(message["id"])).payload
        return "payload", [np.frombuffer(payload, np.uint8)], {}

    def _join(self, connection: Connection, message: Message) -> Answer:
        iteration = self._registry.join(
            str(message["consumer"]),
            str(message["job"]),
            int(message["index"]),
            spec_of(message["spec"]),
            time.monotonic(),
        )
        return "joined", (), {"iteration": iteration.number}

    def _read(self, connection: Connection, message: Message) -> Answer:
        number, consumer = int(message["iteration"]), str(message["consumer"])
        self._wait_for_change(int(message["version"]), float(message["seconds"]))
        found = self._registry.hear_consumer(number, consumer, time.monotonic())
        return "state", (), found

    def _release(self, connection: Connection, message: Message) -> Answer:
        number, consumer = int(message["iteration"]), str(message["consumer"])
        self._registry.release(number, consumer, time.monotonic())
        return "released", (), {}

    def _work(self, connection: Connection, message: Message) -> Answer:
        number = message["number"]
        worker = self._registry.hear_worker(
            str(message["worker"]),
            str(message["address"]),
            None if number is None else int(number),
            time.monotonic(),
        )
        self._workers[connection] = worker.id
        before = self._registry.version
        self._registry.end_tasks(worker, [int(each) for each in message["ended"]])
        if self._registry.version != before:
            self._changed.notify_all()
        self._wait_for_change(int(message["version"]), float(message["seconds"]))
        tasks = self._registry.tasks_of(worker)
        fields = {
            "number": worker.number,
            "version": self._registry.version,
            "tasks": [[each, task] for each, task in tasks.items()],
            "ended": self._registry.ended_of(worker),
        }
        return "tasks", (), fields

    def _leave(self, connection: Connection, message: Message) -> Answer:
        self._workers.pop(connection, None)
        self._registry.leave_worker(str(message["worker"]))
        return "left", (), {}

    def _split(self, connection: Connection, message: Message) -> Answer:
        found = self._registry.hand_out(
            int(message["iteration"]),
            int(message["source"]),
            int(message["repetition"]),
            min(int(message["most"]), _MOST_ROWS),
            str(message["worker"]),
            int(message["request"]),
        )
        return "rows", (), {"rows": found}

    def _round(self, connection: Connection, message: Message) -> Answer:
        workers = self._registry.workers_of_round(
            int(message["iteration"]), int(message["round"]), time.monotonic()
        )
        return "workers", (), {"workers": workers}

    def _wait_for_change(self, version: int, seconds: float) -> None:
        """Waits until the state is newer than a version that the peer has seen."""
        self._changed.wait_for(
            lambda: self._is_closed or self._registry.version != version,
            min(seconds, _MOST_SECONDS_OF_WAITING),
        )


def _opened(folder: str) -> Journal:
    if is_remote(folder):
        raise InvalidArgumentError(
            message="Expected work_dir to be a folder of this machine, since a journal is appended "
            f"to. Received: {folder!r}. Mount a shared file system, and name the folder there."
        )
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return Journal(os.path.join(folder, "dispatcher.journal"))
