"""The calls of scheduled functions: their results and their queue.

A call that is not finished because its worker is lost returns to the front of the queue with its
number; by that number, servers know what they have already applied.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unison.errors import CancelledError
from unison.interrupts import signals_held, wait_for_event, wait_until
from unison.parameter_server.per_worker import PerWorkerIterator
from unison.values import PerReplica

#: The maximum number of waiting calls.
_LONGEST_QUEUE = 256 * 1024


class RemoteValue:
    """The future result of a scheduled function.

    TF: `tf.distribute.coordinator.RemoteValue`.
    """

    def __init__(self) -> None:
        self._is_ready = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def fetch(self) -> Any:
        """Waits for the function, and returns its result as NumPy arrays.

        A signal handler that raises ends the wait, but not the function.

        Raises:
            CancelledError: The call was cancelled because another one failed.
            Exception: The function failed.
        """
        wait_for_event(self._is_ready)
        if self._error is not None:
            raise self._error
        return self._value

    def get(self) -> Any:
        """Waits for the function, and returns its result as JAX arrays."""
        return jax.tree.map(lambda array: jax.numpy.asarray(array, array.dtype), self.fetch())

    @property
    def is_ready(self) -> bool:
        """Whether the function has returned, failed, or been cancelled."""
        return self._is_ready.is_set()

    def _settle(self, value: Any = None, error: Exception | None = None) -> None:
        if not self._is_ready.is_set():
            self._value, self._error = value, error
            self._is_ready.set()


@dataclasses.dataclass(order=True)
class Call:
    """A call; calls are ordered by their numbers.

    Attributes:
        number: Its number.
        function: The function's number.
        arrays: The arrays among its arguments.
        iterators: The iterators among its arguments, each once.
        value: Its future result.
        loop: The loop that has scheduled it; see `call_off`.
        has_begun: Whether a worker has taken it: some servers may already have applied it.
    """

    number: int
    function: int
    arrays: list[np.ndarray]
    iterators: list[PerWorkerIterator]
    value: RemoteValue
    loop: object = None
    has_begun: bool = False


class CallQueue:
    """The calls that are waiting or running.

    Args:
        max_staleness: The maximum number of calls that a worker may be ahead of the slowest one.
            None: no limit.
    """

    def __init__(self, max_staleness: int | None):
        self._max_staleness = max_staleness
        #: The number of calls that each present worker has begun and ended since it joined.
        self._begun: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._changed = threading.Condition()
        #: A heap: calls with the lowest numbers are first.
        self._waiting: list[Call] = []
        self._running: dict[int, Call] = {}
        self._error: Exception | None = None
        self._is_closed = False
        #: The number of calls that have begun: those up to this number.
        self.begun = 0

    def put(self, call: Call) -> None:
        def push() -> None:
            self._raise_error()
            if self._is_closed:
                raise _ended()
            heapq.heappush(self._waiting, call)
            self._changed.notify_all()

        wait_until(self._changed, self._may_put, push)

    def _may_put(self) -> bool:
        if self._error is not None:
            return self._may_raise()
        return len(self._waiting) < _LONGEST_QUEUE or self._is_closed

    def welcome(self, worker: int) -> None:
        """Lets a worker take calls; its count starts at that of the slowest one."""
        with self._changed:
            self._begun[worker] = self._ended[worker] = min(self._ended.values(), default=0)

    def dismiss(self, worker: int) -> None:
        """Stops waiting for a worker."""
        with self._changed:
            self._begun.pop(worker, None)
            self._ended.pop(worker, None)
            self._changed.notify_all()

    def take(self, worker: int) -> Call | None:
        """Waits for a call that a worker may run; returns None if there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._waiting and self._may_begin(worker))
            )
            return None if self._is_closed else self._begin(worker)

    def take_more(self, worker: int, spare: int) -> Call | None:
        """Returns another call for a worker if more than `spare` wait, and it may take one."""
        with self._changed:
            if len(self._waiting) <= spare or self._is_closed or self._error is not None:
                return None
            return self._begin(worker) if self._may_begin(worker) else None

    def _may_begin(self, worker: int) -> bool:
        if self._max_staleness is None:
            return True
        return self._begun[worker] - min(self._ended.values()) <= self._max_staleness

    def _begin(self, worker: int) -> Call:
        call = heapq.heappop(self._waiting)
        call.has_begun = True
        self._running[call.number] = call
        self.begun = max(self.begun, call.number)
        self._begun[worker] += 1
        self._changed.notify_all()
        return call

    def put_back(self, call: Call, worker: int) -> None:
        """Requeues a call that a worker did not finish, unless all have been cancelled."""
        with self._changed:
            self._running.pop(call.number, None)
            if worker in self._begun:
                self._begun[worker] -= 1
            if self._is_closed:
                call.value._settle(error=_ended())
            elif self._error is None:
                heapq.heappush(self._waiting, call)
            else:
                call.value._settle(error=_called_off())
            self._changed.notify_all()

    def finish(self, call: Call, value: Any, worker: int, servers: list[int]) -> None:
        """Notes that a worker has finished a call, and pushed to `servers`."""
        with self._changed:
            if worker in self._ended:
                self._ended[worker] += 1
            self._running.pop(call.number, None)
            call.value._settle(value)
            self._changed.notify_all()

    def fail(self, error: Exception, call: Call | None = None, worker: int = -1) -> None:
        """Cancels all waiting calls; the next `schedule` or `join` raises the error."""
        with self._changed:
            if call is not None:
                self._running.pop(call.number, None)
                call.value._settle(error=error)
                if worker in self._ended:
                    self._ended[worker] += 1
            for _ in range(len(self._waiting)):
                heapq.heappop(self._waiting).value._settle(error=_called_off())
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def settled(self) -> int:
        """Returns a number below which no call will run again."""
        with self._changed:
            unfinished = [*self._running, *(call.number for call in self._waiting[:1])]
            return min(unfinished, default=0)

    def wait(self) -> None:
        """Waits until no call is waiting or running; raises the error of a failed call."""
        wait_until(self._changed, self._is_empty, self._raise_error)

    def call_off(self, loop: object) -> None:
        """Cancels the calls of a loop that no worker has begun."""
        with signals_held, self._changed:
            dropped = [each for each in self._waiting if each.loop is loop and not each.has_begun]
            numbers = {call.number for call in dropped}
            self._waiting = [each for each in self._waiting if each.number not in numbers]
            heapq.heapify(self._waiting)
            for call in dropped:
                call.value._settle(error=_interrupted())
            self._changed.notify_all()

    def wait_for(self, loop: object) -> None:
        """Waits until no call of a loop is waiting or running."""

        def has_ended() -> bool:
            left = itertools.chain(self._waiting, self._running.values())
            return self._is_closed or all(call.loop is not loop for call in left)

        wait_until(self._changed, has_ended, lambda: None)

    def is_idle(self) -> bool:
        def look() -> bool:
            self._raise_error()
            return self._is_empty()

        return wait_until(self._changed, self._may_raise, look)

    def _is_empty(self) -> bool:
        return not self._waiting and not self._running

    def has_work(self) -> bool:
        with self._changed:
            return bool(self._waiting)

    def close(self) -> None:
        """Cancels waiting calls, and rejects new ones."""
        with signals_held, self._changed:
            self._is_closed = True
            while self._waiting:
                heapq.heappop(self._waiting).value._settle(error=_ended())
            self._changed.notify_all()

    def _may_raise(self) -> bool:
        """Returns whether an error, if any, may be raised: once no call is running."""
        return self._error is None or not self._running

    def _raise_error(self) -> None:
        """Raises the error, once, as in TensorFlow."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class StepQueue(CallQueue):
    """The calls in synchronous mode: one at a time, each of them run by all workers.

    Args:
        needed: The number of workers that must push for a step to end.
        commit: Makes the servers apply what these workers have pushed. Called with the call and, by
            worker, the servers that it has pushed to; returns whether no push was missing.
    """

    def __init__(self, needed: int, commit: Callable[[Call, dict[int, list[int]]], bool]):
        super().__init__(None)
        self._needed = needed
        self._commit = commit
        self._step: Call | None = None
        #: The workers that are running or have run the step, and the results and servers of those
        #: that have pushed.
        self._takers: set[int] = set()
        self._pushed: dict[int, tuple[Any, list[int]]] = {}

    def take(self, worker: int) -> Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._wants(worker))
            if self._is_closed:
                return None
            if self._step is None:
                self._step = heapq.heappop(self._waiting)
                self._step.has_begun = True
                self._running[self._step.number] = self._step
                self.begun = max(self.begun, self._step.number)
                self._begin_anew()
            self._takers.add(worker)
            return self._step

    def _wants(self, worker: int) -> bool:
        if self._step is None:
            return bool(self._waiting)
        return worker not in self._takers and len(self._pushed) < self._needed

    def _begin_anew(self) -> None:
        self._takers, self._pushed = set(), {}
        self._changed.notify_all()

    def take_more(self, worker: int, spare: int) -> Call | None:
        return None

    def has_work(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._step)

    def put_back(self, call: Call, worker: int) -> None:
        """Lets a worker run the step again."""
        with self._changed:
            if call is self._step:
                self._takers.discard(worker)
            self._changed.notify_all()

    def finish(self, call: Call, value: Any, worker: int, servers: list[int]) -> None:
        """Notes that a worker has pushed; the last required one ends the step."""
        with self._changed:
            is_late = call is not self._step or worker not in self._takers
            if is_late or len(self._pushed) == self._needed:
                return
            self._pushed[worker] = value, servers
            if len(self._pushed) < self._needed:
                return
            pushed = dict(sorted(self._pushed.items()))
        is_whole = False
        try:
            is_whole = self._commit(call, {w: servers for w, (_, servers) in pushed.items()})
        finally:
            if not is_whole:
                with self._changed:
                    self._begin_anew()
        values = [value for value, _ in pushed.values()]
        with self._changed:
            if is_whole and call is self._step:
                self._step = None
                super().finish(call, _of_replicas(values), worker, servers)

    def fail(self, error: Exception, call: Call | None = None, worker: int = -1) -> None:
        with self._changed:
            if call is None or call is self._step:
                call, self._step = self._step, None
                super().fail(error, call, worker)

    def close(self) -> None:
        with self._changed:
            if self._step is not None:
                self._step.value._settle(error=_ended())
            super().close()


def _of_replicas(values: list[Any]) -> Any:
    """Returns the results of several workers as per-replica values."""
    if len(values) == 1:
        return values[0]
    return jax.tree.map(lambda *own: PerReplica(own), *values)


def _called_off() -> CancelledError:
    return CancelledError(
        message="The call was cancelled, because another scheduled function had failed; schedule "
        "and join raise its error."
    )


def _interrupted() -> CancelledError:
    return CancelledError(message="The call was cancelled: the loop that scheduled it has failed.")


def _ended() -> CancelledError:
    return CancelledError(message="The coordinator has ended.")
