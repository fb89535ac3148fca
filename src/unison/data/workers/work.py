"""The work of a worker process: it calls the function for the chunks that the parent sends."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from unison.data.chunks import Chunk, ChunkFunction
from unison.data.structure import Structure
from unison.data.workers.memory import Incoming, Outgoing
from unison.data.workers.messages import Channel
from unison.errors import UnknownError


class Failure:
    """An error of the function in a worker, as it is sent to the parent.

    Args:
        error: The error.
        notes: Its notes, which are not pickled with every error.
    """

    def __init__(self, error: Exception, notes: list[str]):
        self._error = error
        self._notes = notes

    def error(self) -> Exception:
        """Returns the error with its notes."""
        self._error.__notes__ = self._notes
        return self._error


def serve(connection: int, incoming: int, outgoing: int, lifeline: int) -> None:
    """Calls the function until the parent closes the connection, or ends.

    Args:
        connection: The descriptor of the socket.
        incoming: The descriptor of the memory that the parent writes.
        outgoing: The descriptor of the memory that the parent reads.
        lifeline: The descriptor of a pipe that is closed when the parent ends.
    """
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    channel = Channel(Connection(connection), Incoming(incoming), Outgoing(outgoing))
    with contextlib.suppress(EOFError, ConnectionError):
        sys.path[:] = pickle.loads(channel.connection.recv_bytes())
        _Worker(channel, channel.connection.recv_bytes()).work()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


class _Worker:
    def __init__(self, channel: Channel, pickled: bytes):
        self._channel = channel
        self._pickled = pickled
        self._function: ChunkFunction | None = None
        self._told: Structure | None = None

    def work(self) -> None:
        while True:
            number, chunk = self._channel.receive()
            begin = time.perf_counter()
            outcome, structure = self._outcome_of(chunk)
            del chunk
            seconds = time.perf_counter() - begin
            try:
                self._answer(number, outcome, structure, seconds)
            except ConnectionError:
                raise
            except Exception as error:
                self._answer(number, [_failure(error)], None, seconds)
            del outcome

    def _answer(
        self,
        number: int,
        outcome: list[Chunk | Failure],
        structure: Structure | None,
        seconds: float,
    ) -> None:
        answer = number, outcome, structure, seconds
        if any(isinstance(part, Failure) for part in outcome):
            # It caches the classes that the parent has sent, by their contents.
            import cloudpickle

            self._channel.send(answer, cloudpickle.dumps)
        else:
            self._channel.send(answer)

    def _outcome_of(self, chunk: Chunk) -> tuple[list[Chunk | Failure], Structure | None]:
        """Returns the outcome of the elements, and the structure of the results if it is new."""
        try:
            if self._function is None:
                self._function = pickle.loads(self._pickled)
            outcome = self._function(chunk, self._channel.outgoing.allocate)
        except Exception as error:
            return [_failure(error)], None
        structure = self._function.function.structure
        told, self._told = self._told, structure
        parts = [_failure(part) if isinstance(part, Exception) else part for part in outcome]
        return parts, None if structure == told else structure


def _failure(error: Exception) -> Failure:
    lines = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    notes = [*getattr(error, "__notes__", ()), f"In worker process {os.getpid()}:\n{lines}"]
    return Failure(_that_travels(error), notes)


def _that_travels(error: Exception) -> Any:
    """Returns the error if it can be pickled, otherwise one with the same message."""
    import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return UnknownError(message=f"{type(error).__qualname__}: {error}")
    return error
