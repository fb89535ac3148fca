"""A pool of worker processes, as the parent uses it."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unison.data.chunks import Chunk, ChunkFunction, Outcome, Pace
from unison.data.leaves import NestedDataset
from unison.data.transformations.prefetching import is_wanted
from unison.data.workers import work
from unison.data.workers.memory import Incoming, Outgoing, new_file
from unison.data.workers.messages import Channel
from unison.errors import CancelledError, InternalError

#: The program of worker processes; its first argument is a module with `serve`.
PROGRAM = Path(__file__).with_name("start.py")

#: The number of chunks of a worker: one that it computes, and one that is queued.
_CHUNKS_A_WORKER = 2

#: Seconds between two checks, of a thread that waits for a worker, whether it should continue.
_LOOK_AFTER = 0.5

#: The timeout in seconds after which a worker that should end is killed.
_GRACE = 2.0

#: The environment of workers, unless it is set: each has one CPU, and no accelerator.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


class Ticket:
    """A call in a worker.

    Args:
        chunk: Its argument.
    """

    def __init__(self, chunk: Chunk):
        self.chunk = chunk
        self.outcome: Outcome | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def result(self) -> Outcome:
        assert self.outcome is not None
        return self.outcome


class WorkerPool:
    """Processes that call a function; they start with the first call, and end with this object.

    Args:
        function: The function.
        count: The number of processes.
    """

    def __init__(self, function: ChunkFunction, count: int):
        self._function = function
        self._count = count
        self._pickled: bytes | None = None
        self._pace = Pace()
        self._workers: list[_Worker] = []
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._sent = 0
        self._finalizer = weakref.finalize(self, _end, self._workers, self._process)

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be used any more; in a forked process, it cannot."""
        return not self._finalizer.alive or self._process != os.getpid()

    def close(self) -> None:
        """Terminates the processes."""
        self._finalizer()

    @property
    def most_under_way(self) -> int:
        """The number of chunks that should be in flight."""
        return _CHUNKS_A_WORKER * self._count

    def size(self, asked_for: int) -> tuple[int, int]:
        """Returns the number of elements of a chunk: a number, and its multiple."""
        count = self._function.count_for(asked_for)
        return count, max(self._pace.elements() // count, 1)

    def submit(self, chunk: Chunk) -> Ticket:
        """Sends a chunk to the worker with the fewest chunks.

        Raises:
            TypeError: The function cannot be sent to another process.
            InternalError: No worker could be started.
        """
        with self._lock, self._closed_by_interrupts():
            self._check_open()
            self._check_can_be_sent(chunk)
            ticket = Ticket(chunk)
            self._send(ticket)
            return ticket

    def _send(self, ticket: Ticket) -> None:
        while len(self._workers) < self._count:
            self._workers.append(self._new_worker())
        worker = min(self._workers, key=lambda worker: len(worker.tickets))
        worker.tickets[self._sent] = ticket
        self._sent += 1
        try:
            worker.channel.send((self._sent - 1, ticket.chunk))
        except ConnectionError:
            self._bury(worker)

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Waits until one of the calls has ended.

        Raises:
            InternalError: The processes have ended.
            CancelledError: The result is no longer needed.
        """
        while not any(ticket.done() for ticket in tickets):
            with self._lock, self._closed_by_interrupts():
                self._check_open()
                if not is_wanted():
                    raise CancelledError(message="The iterator that reads ahead was dropped.")
                if not any(ticket.done() for ticket in tickets):
                    self._receive()

    def rest(self) -> None:
        """Does nothing: the workers stay for the next pass."""

    def _receive(self) -> None:
        busy = {worker.channel.connection: worker for worker in self._workers if worker.tickets}
        for connection in multiprocessing.connection.wait(list(busy), _LOOK_AFTER):
            worker = busy[connection]  # type: ignore[index]
            try:
                number, outcome, structure, seconds = worker.channel.receive()
            except (EOFError, ConnectionError):
                self._bury(worker)
                continue
            if structure is not None:
                self._function.function.adopt(structure)
            ticket = worker.tickets.pop(number)
            self._pace.note(len(ticket.chunk), seconds)
            ticket.outcome = [
                part.error() if isinstance(part, work.Failure) else part for part in outcome
            ]

    def _new_worker(self) -> _Worker:
        if self._pickled is None:
            self._pickled = pickled(self._function)
        return _Worker(self._pickled)

    def _bury(self, worker: _Worker) -> None:
        """Removes a worker that has ended: its current call fails with an error."""
        self._workers.remove(worker)
        worker.close()
        status = worker.wait()
        present, *waiting = worker.tickets.values()
        present.outcome = [_death(self._function.function.stage, status)]
        for ticket in waiting:
            self._send(ticket)

    def _check_can_be_sent(self, chunk: Chunk) -> None:
        if any(isinstance(leaf, NestedDataset) for leaf in chunk[0]):
            raise TypeError(
                "Elements that are datasets cannot be sent to worker processes, which the map was "
                'to use. Leave them in this process: executor="thread".'
            )

    def _check_open(self) -> None:
        if self.is_closed:
            raise InternalError(
                message=f"The worker processes of {self._function.function.stage} are not there: "
                "they have ended with an interrupt, or belong to the process of which this one is "
                "a fork. Take a new iterator over the dataset."
            )

    @contextlib.contextmanager
    def _closed_by_interrupts(self) -> Any:
        """A connection cannot be used after an interrupt in the middle of a message."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.close()
            raise


def _death(stage: str, status: int) -> InternalError:
    how = f"ended with exit code {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return InternalError(
        message=f"A worker process of {stage} {how}; its elements are lost. If the function does "
        "not end the process itself, the machine may have run out of memory: use fewer processes "
        "(num_parallel_calls, or workers of a PyDataset), or smaller elements."
    )


class _Worker:
    """A process, and its calls."""

    def __init__(self, function: bytes):
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.settimeout(None)  # whatever the program's default is
        to_worker, from_worker = new_file(), new_file()
        lifeline, self._lifeline = os.pipe()
        files = [theirs.fileno(), to_worker, from_worker, lifeline]
        try:
            # In its own session, because an interrupt from the terminal is for the parent.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), work.__name__, *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_ENVIRONMENT | os.environ,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        connection = Connection(ours.detach())
        self.channel = Channel(connection, Incoming(from_worker), Outgoing(to_worker))
        #: The calls in flight, by the numbers of their messages.
        self.tickets: dict[int, Ticket] = {}
        with contextlib.suppress(ConnectionError):
            connection.send_bytes(pickle.dumps(sys.path))
            connection.send_bytes(function)

    def close(self) -> None:
        """Lets the process end."""
        self.channel.close()
        os.close(self._lifeline)

    def wait(self) -> int:
        """Returns the exit status; kills the process after the timeout."""
        try:
            return self._popen.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()


def _end(workers: list[_Worker], process: int) -> None:
    if os.getpid() != process:
        return  # a forked process, whose parent still needs them
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.wait()
    workers.clear()


def pickled(function: ChunkFunction) -> bytes:
    """Returns a pickled function.

    Raises:
        TypeError: It cannot be pickled.
    """
    import cloudpickle

    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        named = _unpicklable_parts(function.function.user_function)
        raise TypeError(
            f"The function of {function.function.stage} cannot be sent to worker processes"
            f"{named}: {error}. Make such objects inside the function, at its first call, or leave "
            'the function in this process: executor="thread".'
        ) from error


def _unpicklable_parts(function: Any) -> str:
    """Returns the part of a message that names the unpicklable objects, if they can be found."""
    import inspect

    import cloudpickle

    try:
        used = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:
        return ""
    found = []
    for name, value in {**used.globals, **used.nonlocals}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            found.append(f"`{name}` of type {type(value).__name__}")
    return f", because of {' and '.join(found)}" if found else ""
