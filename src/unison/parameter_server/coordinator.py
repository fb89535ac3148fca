"""`ClusterCoordinator`: schedules functions on the workers.

Calls wait in one queue. One thread a worker takes the next, sends it, answers what the worker asks
for (the program for a shape that is new to it), and waits until it is done. What the worker does
not finish, because it is lost, goes back to the front of the queue with its number; the number is
how servers know what they have applied already.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import heapq
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np

from unison import errors
from unison.errors import CancelledError, OpError, UnavailableError
from unison.parameter_server.messages import Connection, Message, connect
from unison.parameter_server.programs import (
    BatchSpec,
    ServerProgram,
    Tracer,
    WantsBatchError,
    WorkerProgram,
    described,
    next_batch,
    on_workers_only,
)
from unison.parameter_server.pulse import Pulse
from unison.parameter_server.serving import dataset_of
from unison.parameter_server.store import ServerLostError, by_server
from unison.parameter_server.strategy import ParameterServerStrategy
from unison.program.arguments import Static, describe
from unison.program.identity import identity
from unison.runtime.interrupts import signals_held, wait_for_event, wait_until
from unison.runtime.precision import array_type
from unison.values import PerReplica

logger = logging.getLogger("unison")

#: How many calls may wait.
_LONGEST_QUEUE = 256 * 1024

#: How many calls a worker has, the one that it runs included, where many wait: what the next one
#: wants to see then comes with the answer to the last push.
_AHEAD = 2

#: Seconds between two attempts to reach a worker.
_PAUSE = 0.5


class RemoteValue:
    """What a scheduled function will have returned.

    TF: `tf.distribute.coordinator.RemoteValue`.
    """

    def __init__(self) -> None:
        self._is_ready = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def fetch(self) -> Any:
        """Waits for the function, and returns its result with NumPy arrays.

        A signal handler that raises ends the waiting, not the function.

        Raises:
            CancelledError: The call was called off, because another one failed.
            Exception: The function failed.
        """
        wait_for_event(self._is_ready)
        if self._error is not None:
            raise self._error
        return self._value

    def get(self) -> Any:
        """Waits for the function, and returns its result with arrays of JAX."""
        return jax.tree.map(lambda array: jax.numpy.asarray(array, array.dtype), self.fetch())

    @property
    def is_ready(self) -> bool:
        """Whether the function has returned, failed, or been called off."""
        return self._is_ready.is_set()

    def _settle(self, value: Any = None, error: Exception | None = None) -> None:
        if not self._is_ready.is_set():
            self._value, self._error = value, error
            self._is_ready.set()


@dataclasses.dataclass
class _Function:
    """A scheduled function, for arguments of one form.

    Attributes:
        call: Calls it, given the arrays among its arguments.
        arguments: Shapes and dtypes of these.
        keeps: What must live as long as it, since its number is found by identity.
        takes: How many batches it takes of each of its iterators, as far as is known.
    """

    call: Callable[[list[Any]], Any]
    arguments: list[Any]
    keeps: Any = None
    takes: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(order=True)
class _Closure:
    """One call; the order is that of the numbers.

    Attributes:
        number: Its number.
        function: The function's number.
        arrays: The arrays among its arguments.
        iterators: The iterators among its arguments, each once.
        value: What it will return.
        loop: The loop that has scheduled it; see `call_off`.
        has_begun: Whether a worker has taken it: some servers may have applied it already.
    """

    number: int
    function: int
    arrays: list[np.ndarray]
    iterators: list[PerWorkerIterator]
    value: RemoteValue
    loop: object = None
    has_begun: bool = False


class _Queue:
    """The calls that wait or run.

    Args:
        max_staleness: How many calls a worker may be ahead of the slowest one. None: any number.
    """

    def __init__(self, max_staleness: int | None):
        self._max_staleness = max_staleness
        #: How many calls each worker that is there has begun and ended, from when it came.
        self._begun: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._changed = threading.Condition()
        #: A heap: those of the lowest numbers come first.
        self._waiting: list[_Closure] = []
        self._running: dict[int, _Closure] = {}
        self._error: Exception | None = None
        self._is_closed = False
        #: How many calls have begun: those up to this number.
        self.begun = 0

    def put(self, closure: _Closure) -> None:
        def push() -> None:
            self._raise_error()
            if self._is_closed:
                raise _ended()
            heapq.heappush(self._waiting, closure)
            self._changed.notify_all()

        wait_until(self._changed, self._may_put, push)

    def _may_put(self) -> bool:
        if self._error is not None:
            return self._may_raise()
        return len(self._waiting) < _LONGEST_QUEUE or self._is_closed

    def welcome(self, worker: int) -> None:
        """Lets a worker take calls; it begins where the slowest is."""
        with self._changed:
            self._begun[worker] = self._ended[worker] = min(self._ended.values(), default=0)

    def dismiss(self, worker: int) -> None:
        """Waits for a worker no more."""
        with self._changed:
            self._begun.pop(worker, None)
            self._ended.pop(worker, None)
            self._changed.notify_all()

    def take(self, worker: int) -> _Closure | None:
        """Waits for a call that a worker may run; None: there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._waiting and self._may_begin(worker))
            )
            return None if self._is_closed else self._begin(worker)

    def take_more(self, worker: int, spare: int) -> _Closure | None:
        """Returns another call for a worker if more than `spare` wait, and it may."""
        with self._changed:
            if len(self._waiting) <= spare or self._is_closed or self._error is not None:
                return None
            return self._begin(worker) if self._may_begin(worker) else None

    def _may_begin(self, worker: int) -> bool:
        if self._max_staleness is None:
            return True
        return self._begun[worker] - min(self._ended.values()) <= self._max_staleness

    def _begin(self, worker: int) -> _Closure:
        closure = heapq.heappop(self._waiting)
        closure.has_begun = True
        self._running[closure.number] = closure
        self.begun = max(self.begun, closure.number)
        self._begun[worker] += 1
        self._changed.notify_all()
        return closure

    def put_back(self, closure: _Closure, worker: int) -> None:
        """Has a call run again that a worker did not end; not if all have been called off."""
        with self._changed:
            self._running.pop(closure.number, None)
            if worker in self._begun:
                self._begun[worker] -= 1
            if self._is_closed:
                closure.value._settle(error=_ended())
            elif self._error is None:
                heapq.heappush(self._waiting, closure)
            else:
                closure.value._settle(error=_called_off())
            self._changed.notify_all()

    def finish(self, closure: _Closure, value: Any, worker: int, servers: list[int]) -> None:
        """Notes that a worker has ended a call, and pushed to `servers`."""
        with self._changed:
            if worker in self._ended:
                self._ended[worker] += 1
            self._running.pop(closure.number, None)
            closure.value._settle(value)
            self._changed.notify_all()

    def fail(self, error: Exception, closure: _Closure | None = None, worker: int = -1) -> None:
        """Calls off all calls that wait; who schedules or joins next gets the error."""
        with self._changed:
            if closure is not None:
                self._running.pop(closure.number, None)
                closure.value._settle(error=error)
                if worker in self._ended:
                    self._ended[worker] += 1
            while self._waiting:
                heapq.heappop(self._waiting).value._settle(error=_called_off())
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def settled(self) -> int:
        """Returns a number below which no call will run any more."""
        with self._changed:
            unfinished = [*self._running, *(closure.number for closure in self._waiting[:1])]
            return min(unfinished, default=0)

    def wait(self) -> None:
        """Waits until nothing waits or runs; raises the error of a call that has failed."""
        wait_until(self._changed, self._is_empty, self._raise_error)

    def call_off(self, loop: object) -> None:
        """Calls off the calls of a loop that no worker has begun."""
        with signals_held, self._changed:
            dropped = [each for each in self._waiting if each.loop is loop and not each.has_begun]
            numbers = {closure.number for closure in dropped}
            self._waiting = [each for each in self._waiting if each.number not in numbers]
            heapq.heapify(self._waiting)
            for closure in dropped:
                closure.value._settle(error=_interrupted())
            self._changed.notify_all()

    def wait_for(self, loop: object) -> None:
        """Waits until no call of a loop waits or runs."""

        def has_ended() -> bool:
            left = itertools.chain(self._waiting, self._running.values())
            return self._is_closed or all(closure.loop is not loop for closure in left)

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
        """Calls off what waits, and what comes."""
        with signals_held, self._changed:
            self._is_closed = True
            while self._waiting:
                heapq.heappop(self._waiting).value._settle(error=_ended())
            self._changed.notify_all()

    def _may_raise(self) -> bool:
        """Whether an error, if there is one, may be raised: when nothing runs any more."""
        return self._error is None or not self._running

    def _raise_error(self) -> None:
        """Raises the error, once, as in TensorFlow."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class _Steps(_Queue):
    """The calls in synchronous mode: one after the other, each of them run by all workers.

    Args:
        needed: How many workers must have pushed for a step to end.
        commit: Has the servers apply what these have pushed. Given the call and, by worker, the
            servers that it has pushed to; returns whether all of it was there.
    """

    def __init__(self, needed: int, commit: Callable[[_Closure, dict[int, list[int]]], bool]):
        super().__init__(None)
        self._needed = needed
        self._commit = commit
        self._step: _Closure | None = None
        #: Who runs or has run the step, and the results and servers of those who have pushed.
        self._takers: set[int] = set()
        self._pushed: dict[int, tuple[Any, list[int]]] = {}

    def take(self, worker: int) -> _Closure | None:
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

    def take_more(self, worker: int, spare: int) -> _Closure | None:
        return None

    def has_work(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._step)

    def put_back(self, closure: _Closure, worker: int) -> None:
        """Lets a worker run the step again."""
        with self._changed:
            if closure is self._step:
                self._takers.discard(worker)
            self._changed.notify_all()

    def finish(self, closure: _Closure, value: Any, worker: int, servers: list[int]) -> None:
        """Notes that a worker has pushed; the last one that is needed ends the step."""
        with self._changed:
            is_late = closure is not self._step or worker not in self._takers
            if is_late or len(self._pushed) == self._needed:
                return
            self._pushed[worker] = value, servers
            if len(self._pushed) < self._needed:
                return
            pushed = dict(sorted(self._pushed.items()))
        is_whole = False
        try:
            is_whole = self._commit(closure, {w: servers for w, (_, servers) in pushed.items()})
        finally:
            if not is_whole:
                with self._changed:
                    self._begin_anew()
        values = [value for value, _ in pushed.values()]
        with self._changed:
            if is_whole and closure is self._step:
                self._step = None
                super().finish(closure, _of_replicas(values), worker, servers)

    def fail(self, error: Exception, closure: _Closure | None = None, worker: int = -1) -> None:
        with self._changed:
            if closure is None or closure is self._step:
                closure, self._step = self._step, None
                super().fail(error, closure, worker)

    def close(self) -> None:
        with self._changed:
            if self._step is not None:
                self._step.value._settle(error=_ended())
            super().close()


def _of_replicas(values: list[Any]) -> Any:
    """Returns the results of several workers as those of replicas."""
    if len(values) == 1:
        return values[0]
    return jax.tree.map(lambda *own: PerReplica(own), *values)


def _called_off() -> CancelledError:
    return CancelledError(
        message="The call was called off, because another scheduled function had failed; schedule "
        "and join raise its error."
    )


def _interrupted() -> CancelledError:
    return CancelledError(message="The call was cancelled: the loop that scheduled it has failed.")


def _ended() -> CancelledError:
    return CancelledError(message="The coordinator has ended.")


class PerWorkerDataset:
    """A dataset on every worker; see `ClusterCoordinator.create_per_worker_dataset`."""

    def __init__(self, coordinator: ClusterCoordinator, maker: Any):
        self._coordinator = coordinator
        self._maker = maker

    def __iter__(self) -> PerWorkerIterator:
        return self._coordinator._iterator(self._maker)


class PerWorkerIterator:
    """An iterator on every worker, for functions that are scheduled.

    In such a function, `next(iterator)` is the next batch of the worker that runs it.
    """

    def __init__(self, number: int):
        self.number = number

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise on_workers_only()

    def get_next(self) -> Any:
        """Returns the next batch, in a scheduled function."""
        return next(self)


class _IteratorOfCall(PerWorkerIterator):
    """What a scheduled function gets for an iterator: it is numbered among those of the call.

    So one program serves all iterators, and keeps none of them.
    """

    def __next__(self) -> Any:
        return next_batch(self.number)


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`; one for each strategy.

    Args:
        strategy: The strategy.

    Raises:
        TypeError: It is another one.

    TF: `tf.distribute.coordinator.ClusterCoordinator`.
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(
                f"ClusterCoordinator needs a ParameterServerStrategy. Received: {strategy!r}"
            )
        with signals_held, strategy.coordinator_lock:
            if strategy.coordinator is None:
                made = super().__new__(cls)
                made._start(strategy)
                strategy.coordinator = made
        coordinator: ClusterCoordinator = strategy.coordinator
        return coordinator

    def __init__(self, strategy: ParameterServerStrategy):
        del strategy  # `__new__` has given it to the one coordinator

    def _start(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._queue = (
            _Steps(strategy.num_replicas_in_sync, self._commit)
            if strategy.synchronous
            else _Queue(strategy.max_staleness)
        )
        self._numbers = itertools.count(1)
        self._functions: list[_Function] = []
        self._function_numbers: dict[Any, int] = {}
        self._programs: dict[str, WorkerProgram] = {}
        self._programs_by_number: dict[int, WorkerProgram] = {}
        self._iterator_numbers = itertools.count()
        #: What makes each dataset that is iterated over, by the iterator's number.
        self._makers: dict[int, Any] = {}
        #: The numbers of iterators that nobody has any more.
        self._dropped: collections.deque[int] = collections.deque()
        self._installed: list[ServerProgram] = []
        self._tracing = threading.RLock()
        self._recovering = threading.Lock()
        self._tracer = Tracer(strategy.remote_placement, strategy.scope, self._install)
        self._workers = [
            _Worker(self, index, address) for index, address in enumerate(strategy.worker_addresses)
        ]
        self._is_ended = False
        atexit.register(_end, weakref.ref(self))
        for worker in self._workers:
            worker.start()

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    @property
    def trace_count(self) -> int:
        """How many programs have been made; a steady state does not change it."""
        return self._tracer.trace_count

    @property
    def waited_seconds(self) -> float:
        """For how long the workers, all together, have waited for the servers."""
        return sum(worker.waited_seconds for worker in self._workers)

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Has some worker run `fn`, once it has time; returns at once.

        `fn` is traced for each form of its arguments and batches, as by `strategy.run`: its
        Python side effects happen then. If the worker is lost, another one runs it again. Host
        functions that return nothing (assertions, `jax.debug.print`) run in this process, in a
        thread, before the variables are updated; if one raises, the call has no effect.

        Args:
            fn: A function, which may read and assign variables of the strategy, take batches of
                per-worker datasets, and call `strategy.run`. In synchronous mode every worker runs
                it, and what it returns is a `PerReplica` for every array, if there are several.
            args: Arrays, numbers, text, iterators of per-worker datasets, in any nesting.
            kwargs: Likewise.

        Raises:
            Exception: A function that was scheduled before has failed. All that waited have been
                called off.
            TypeError: `fn` is no function, or an argument is nothing that can be sent.
            ValueError: An argument is a `RemoteValue`.
        """
        return self.schedule_in(None, fn, args, kwargs)

    def schedule_in(
        self,
        loop: object,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a call of a loop; see `schedule` and `call_off`."""
        if not callable(fn):
            raise TypeError(f"schedule needs a function to call. Received: {fn!r}")
        if isinstance(args, str | bytes) or not isinstance(args, Sequence):
            raise TypeError(
                "schedule takes the positional arguments as a tuple: schedule(fn, args=(x,)). "
                f"Received: args={args!r}"
            )
        function, arrays, iterators = self._described(fn, tuple(args), kwargs or {})
        closure = _Closure(next(self._numbers), function, arrays, iterators, RemoteValue(), loop)
        self._queue.put(closure)
        return closure.value

    def call_off(self, loop: object) -> None:
        """Calls off the calls of a loop that no worker has begun."""
        self._queue.call_off(loop)

    def wait_for(self, loop: object) -> None:
        """Waits until no call of a loop waits or runs; in a worker's thread, it does not wait."""
        if not any(worker.is_this_thread for worker in self._workers):
            self._queue.wait_for(loop)

    def join(self) -> None:
        """Waits until all scheduled functions have returned.

        Raises:
            Exception: One of them has failed. All that waited have been called off.
        """
        self._queue.wait()

    def done(self) -> bool:
        """Whether all scheduled functions have returned; raises as `join`."""
        return self._queue.is_idle()

    def fetch(self, val: Any) -> Any:
        """Waits for the `RemoteValue`s in a structure, and returns it with their results."""
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf,
            val,
            is_leaf=lambda leaf: isinstance(leaf, RemoteValue),
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Returns a dataset that every worker makes for itself.

        Args:
            dataset_fn: A function of no arguments, called on every worker, that returns a dataset
                or an iterable of batches; or such a thing itself. What it uses is sent with it,
                pickled. Where that is not possible, the coordinator iterates, and sends batches.
        """
        if not callable(dataset_fn) and not hasattr(dataset_fn, "__iter__"):
            raise TypeError(
                "create_per_worker_dataset takes a function that returns a dataset, or a dataset. "
                f"Received: {dataset_fn!r}"
            )
        return PerWorkerDataset(self, dataset_fn)

    def end(self) -> None:
        """Lets the workers and servers go; their processes end. Called when the program ends."""
        with signals_held:  # else processes would miss the goodbye, and report a lost coordinator
            if self._is_ended:
                return
            self._is_ended = True
            self._queue.close()
            for worker in self._workers:
                worker.end()
            self._strategy.store.farewell()

    # -- what the workers' threads need ---------------------------------------------------------

    def await_server(self, error: ServerLostError) -> None:
        """Waits for a lost server to come back, and says which updates are lost with it.

        Raises:
            ServerLostError: It does not come back.
        """
        store = self._strategy.store
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
                "parameter server %d is back, as it was after %d updates; of the %d calls that "
                "have begun, at most %d are lost on it",
                error.server,
                store.restored[error.server],
                self._queue.begun,
                self._queue.begun - store.restored[error.server],
            )

    def _described(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[int, list[np.ndarray], list[PerWorkerIterator]]:
        """Returns the number of a function for arguments of this form, and what varies of them."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        placement = self._strategy.placement
        iterators: list[PerWorkerIterator] = []
        described_leaves = [self._described_leaf(leaf, placement, iterators) for leaf in leaves]
        descriptions = tuple(description for description, _ in described_leaves)
        key = (identity(fn), structure, descriptions)
        if key not in self._function_numbers:

            def call(arrays: list[Any]) -> Any:
                left = iter(arrays)
                filled = [d.value if isinstance(d, Static) else next(left) for d in descriptions]
                own_args, own_kwargs = jax.tree.unflatten(structure, filled)
                return fn(*own_args, **own_kwargs)

            arguments = [d.aval(0) for d in descriptions if not isinstance(d, Static)]
            arguments = [array_type(aval.shape, aval.dtype) for aval in arguments]
            with signals_held:
                self._functions.append(_Function(call, arguments, keeps=key))
                self._function_numbers[key] = len(self._functions) - 1
        number = self._function_numbers[key]
        varying = [
            operand
            for description, operand in described_leaves
            if not isinstance(description, Static)
        ]
        arrays = [
            np.asarray(operand, aval.dtype)
            for operand, aval in zip(varying, self._functions[number].arguments, strict=True)
        ]
        return number, arrays, iterators

    @staticmethod
    def _described_leaf(
        leaf: Any, placement: Any, iterators: list[PerWorkerIterator]
    ) -> tuple[Any, Any]:
        """Returns a leaf's description and its operand; adds a new iterator to `iterators`."""
        if isinstance(leaf, RemoteValue):
            raise ValueError(
                "The result of a scheduled function cannot be the argument of another one: it may "
                "not be there yet. Fetch it first: coordinator.fetch(value)."
            )
        if isinstance(leaf, PerWorkerIterator):
            if leaf not in iterators:
                iterators.append(leaf)
            place = iterators.index(leaf)
            return Static((PerWorkerIterator, place), _IteratorOfCall(place)), None
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "SU":
            raise TypeError(
                "A scheduled function is a compiled program: an array of text has no place in it. "
                "Pass a str, which becomes a part of the program, or turn text into numbers where "
                f"the dataset is made. Received: an array of dtype {leaf.dtype}."
            )
        return describe(leaf, placement)

    def _iterator(self, maker: Any) -> PerWorkerIterator:
        with signals_held:
            iterator = PerWorkerIterator(next(self._iterator_numbers))
            self._makers[iterator.number] = maker
        weakref.finalize(iterator, self._dropped.append, iterator.number).atexit = False
        return iterator

    def _maker(self, iterator: int) -> Any:
        return self._makers[iterator]

    def _unused(self, iterators: set[int]) -> list[int]:
        """Returns which of these iterators nobody has any more; forgets their datasets."""
        while self._dropped:
            self._makers.pop(self._dropped.popleft(), None)
        return [number for number in iterators if number not in self._makers]

    def _program(self, function: int, specs: list[Any]) -> WorkerProgram:
        """Returns the program of a function for batches, made if it is new."""
        key = json.dumps([function, specs])
        with self._tracing:
            if key not in self._programs:
                batches: dict[int, list[BatchSpec]] = {}
                for iterator, structure, kinds in specs:
                    spec = BatchSpec(
                        structure, tuple((name, tuple(shape)) for name, shape in kinds)
                    )
                    batches.setdefault(iterator, []).append(spec)
                known = self._functions[function]
                if any(n > len(batches.get(own, ())) for own, n in known.takes.items()):
                    raise WantsBatchError(known.takes)
                try:
                    program = self._tracer.make(known.call, known.arguments, batches)
                except WantsBatchError as wants:
                    known.takes = wants.counts
                    raise
                self._programs[key] = program
                self._programs_by_number[program.number] = program
            return self._programs[key]

    def _commit(self, closure: _Closure, pushed: dict[int, list[int]]) -> bool:
        """Has the servers apply what workers have pushed; returns whether all of it was there."""
        workers: dict[int, list[int]] = {}
        for worker, servers in pushed.items():
            for server in servers:
                workers.setdefault(server, []).append(worker)
        settled = self._queue.settled()
        answers = self._strategy.store.ask(
            {
                server: (
                    "commit",
                    (),
                    {"closure": closure.number, "settled": settled, "workers": own},
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
        self._strategy.store.ask({server: ("install", [data], fields) for server in servers})


class _Worker:
    """The coordinator's side of one worker: a thread gives it work, and another watches it."""

    def __init__(self, coordinator: ClusterCoordinator, index: int, address: str):
        self._coordinator = coordinator
        self._index = index
        self._address = address
        self._connection: Connection | None = None
        self._pulse: Pulse | None = None
        #: The calls that it has, in order; the first one runs.
        self._running: collections.deque[_Closure] = collections.deque()
        #: How long it has waited for servers.
        self.waited_seconds = 0.0
        self._sent: set[int] = set()
        self._streams: dict[int, Iterator[Any]] = {}
        self._is_ended = threading.Event()
        self._lost_since = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, name=f"unison-coordinator-{index}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Says goodbye, when what it runs is done."""
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
        return self._coordinator.strategy.timeout_seconds

    def _work(self) -> None:
        queue = self._coordinator._queue
        while not self._is_ended.is_set():
            if self._connection is None and not self._reached():
                continue
            closure: _Closure | None = None
            if not self._running:
                closure = queue.take(self._index)
                if closure is None:
                    return
            elif len(self._running) < _AHEAD:
                closure = queue.take_more(self._index, len(self._coordinator._workers))
            if closure is not None and self._prepared(closure):
                self._running.append(closure)
                if not self._sent_off(closure) or len(self._running) < _AHEAD:
                    continue
            self._end_first()

    def _prepared(self, closure: _Closure) -> bool:
        """Sees to it that the worker has the datasets for a call; else the call goes back."""
        missing = [own.number for own in closure.iterators if own.number not in self._sent]
        while missing and self._running:
            self._end_first()  # the worker does one thing after the other
        try:
            for iterator in missing:
                if self._connection is None:
                    raise UnavailableError(message="The worker is lost.")
                self._send_dataset(self._connection, iterator)
        except Exception as error:
            self._on_failure(closure, error)
            return False
        return True

    def _reached(self) -> bool:
        """Connects to the worker; if all have been lost for too long, the calls fail."""
        try:
            connection = connect(
                self._address,
                _PAUSE,
                f"Worker {self._index}",
                role="coordinator",
                worker=self._index,
                servers=self._coordinator.strategy.store.addresses,
                patience=self._timeout,
                job=self._coordinator.strategy.store.job,
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
        self._coordinator._queue.welcome(self._index)
        return True

    def _say_that_too_many_are_lost(self, error: Exception) -> None:
        workers = self._coordinator._workers
        needed = self._coordinator.strategy.num_replicas_in_sync
        lost = [worker for worker in workers if worker.is_lost]
        if len(workers) - len(lost) >= needed:
            return
        seconds = time.monotonic() - max(worker._lost_since for worker in lost)
        if seconds > self._timeout and self._coordinator._queue.has_work():
            there = len(workers) - len(lost)
            self._coordinator._queue.fail(
                UnavailableError(
                    message=f"{there or 'None'} of the {len(workers)} workers has been there for "
                    f"{self._timeout:g} s, {needed} are needed, and calls wait. The last answer: "
                    f"{error}"
                )
            )

    def _say_that_it_is_silent(self) -> None:
        logger.warning(
            "worker %d (%s) has given no sign of life for %g s: it is given up",
            self._index,
            self._address,
            self._timeout,
        )

    def _sent_off(self, closure: _Closure) -> bool:
        """Sends a call to the worker; returns whether it has got it."""
        connection = self._connection
        assert connection is not None
        unused = self._coordinator._unused(self._sent)
        try:
            connection.send(
                "run",
                closure.arrays,
                function=closure.function,
                iterators=[iterator.number for iterator in closure.iterators],
                unused=unused,
                closure=closure.number,
                is_step=self._coordinator.strategy.synchronous,
                settled=self._coordinator._queue.settled(),
            )
        except Exception as error:
            self._running.remove(closure)
            self._on_failure(closure, error)
            return False
        for iterator in unused:
            self._sent.remove(iterator)
            self._streams.pop(iterator, None)
        return True

    def _end_first(self) -> None:
        """Waits for the end of the first call that runs."""
        if not self._running:
            return
        connection = self._connection
        assert connection is not None
        closure = self._running.popleft()
        try:
            answer = self._answered(connection)
            program = self._coordinator._programs_by_number[answer["program"]]
            value = jax.tree.unflatten(program.structure, answer.arrays)
            self.waited_seconds += answer["waited"]
            self._coordinator._queue.finish(closure, value, self._index, answer["servers"])
        except Exception as error:
            self._on_failure(closure, error)

    def _on_failure(self, closure: _Closure, error: Exception) -> None:
        queue = self._coordinator._queue
        if isinstance(error, ServerLostError):
            try:
                self._coordinator.await_server(error)
            except ServerLostError as final:
                queue.fail(final, closure, self._index)
            else:
                queue.put_back(closure, self._index)
        elif isinstance(error, UnavailableError) and not self._is_alive():
            logger.warning(
                "worker %d (%s) is lost; what it ran is run again elsewhere: %s",
                self._index,
                self._address,
                error,
            )
            self._lose()
            for late in [*reversed(self._running), closure]:
                queue.put_back(late, self._index)
            self._running.clear()
        else:
            queue.fail(error, closure, self._index)

    def _is_alive(self) -> bool:
        """Whether the worker answers: an error may be that of a function of the user."""
        return self._connection is not None and self._connection.is_open

    def _lose(self) -> None:
        for connection in (self._connection, self._pulse):
            if connection is not None:
                connection.close()
        self._connection = None
        self._coordinator._queue.dismiss(self._index)
        self._lost_since = time.monotonic()

    def _send_dataset(self, connection: Connection, iterator: int) -> None:
        maker = self._coordinator._maker(iterator)
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
        """Returns the worker's answer, and gives it what it asks for before."""
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
                store = self._coordinator.strategy.store
                server = message["server"]
                raise ServerLostError(server, store.addresses[server], message["why"])
            else:
                return message

    def _send_program(self, connection: Connection, message: Message) -> Exception | None:
        """Sends the program that the worker asks for; returns why there is none."""
        try:
            program = self._coordinator._program(message["function"], message["batches"])
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
        """Calls the host functions of a call before its push; returns what they raise."""
        try:
            program = self._coordinator._programs_by_number[message["program"]]
            program.call_host(message.arrays)
        except Exception as error:
            connection.send("cancel")
            return error
        connection.send("called")
        return None

    def _send_batch(self, connection: Connection, iterator: int) -> Exception | None:
        """Sends the next batch of a dataset that is iterated over here."""
        try:
            if iterator not in self._streams:
                with self._coordinator.strategy.scope():
                    maker = self._coordinator._maker(iterator)
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
    text = f"{message['text']}\n\nOn the worker:\n{message['traceback']}"
    kind: Any = getattr(errors, message["kind_of_error"], None)
    if isinstance(kind, type) and issubclass(kind, OpError):
        return kind(message=text)
    return errors.UnknownError(message=text)


def _say_goodbye(connection: Connection) -> None:
    try:
        connection.send("goodbye")
    except UnavailableError:
        return


def _end(coordinator: weakref.ref[ClusterCoordinator]) -> None:
    alive = coordinator()
    if alive is not None:
        alive.end()
