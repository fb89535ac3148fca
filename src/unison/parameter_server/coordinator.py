"""`ClusterCoordinator`: schedules functions on the workers."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unison.interrupts import signals_held
from unison.parameter_server.calls import RemoteValue
from unison.parameter_server.dispatching import Dispatcher
from unison.parameter_server.per_worker import PerWorkerDataset
from unison.parameter_server.store import Store

if TYPE_CHECKING:
    from unison.parameter_server.strategy import ParameterServerStrategy


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`; one for each strategy.

    Args:
        strategy: The strategy.

    Raises:
        TypeError: It is another kind of strategy.

    TF: `tf.distribute.coordinator.ClusterCoordinator`.
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        if not isinstance(getattr(strategy, "store", None), Store):
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
        self._dispatcher = Dispatcher(strategy)
        self._is_ended = False
        atexit.register(_end, weakref.ref(self))
        self._dispatcher.start()

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._dispatcher.strategy

    @property
    def trace_count(self) -> int:
        """The number of programs compiled so far; constant in a steady state."""
        return self._dispatcher.functions.trace_count

    @property
    def waited_seconds(self) -> float:
        """The total time that all workers have waited for the servers."""
        return sum(worker.waited_seconds for worker in self._dispatcher.workers)

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Schedules `fn` on the next available worker; returns immediately.

        `fn` is traced for each structure, shape and dtype of its arguments and batches, as by
        `strategy.run`: its Python side effects happen during tracing. If the worker is lost,
        another one runs it again. Host functions that return nothing (assertions,
        `jax.debug.print`) run in this process, in a thread, before the variables are updated; if
        one raises, the call has no effect.

        Args:
            fn: A function, which may read and assign variables of the strategy, take batches of
                per-worker datasets, and call `strategy.run`. In synchronous mode every worker runs
                it, and its result has a `PerReplica` for every array, if there are several workers.
            args: Arrays, numbers, text, iterators of per-worker datasets, in any nesting.
            kwargs: Likewise.

        Raises:
            Exception: A previously scheduled function has failed. All waiting ones have been
                cancelled.
            TypeError: `fn` is not a function, or an argument cannot be sent.
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
        return self._dispatcher.schedule(fn, tuple(args), kwargs or {}, loop)

    def call_off(self, loop: object) -> None:
        """Cancels the calls of a loop that no worker has begun."""
        self._dispatcher.queue.call_off(loop)

    def wait_for(self, loop: object) -> None:
        """Waits until no call of a loop is waiting or running; no-op in a worker's thread."""
        if not any(worker.is_this_thread for worker in self._dispatcher.workers):
            self._dispatcher.queue.wait_for(loop)

    def join(self) -> None:
        """Waits until all scheduled functions have returned.

        Raises:
            Exception: One of them has failed. All waiting ones have been cancelled.
        """
        self._dispatcher.queue.wait()

    def done(self) -> bool:
        """Returns whether all scheduled functions have returned; raises as `join` does."""
        return self._dispatcher.queue.is_idle()

    def fetch(self, val: Any) -> Any:
        """Waits for the `RemoteValue`s in a structure, and returns it with the results instead."""
        return jax.tree.map(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf,
            val,
            is_leaf=lambda leaf: isinstance(leaf, RemoteValue),
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Returns a dataset that every worker creates for itself.

        Args:
            dataset_fn: A function of no arguments, called on every worker, that returns a dataset
                or an iterable of batches; or a dataset or iterable itself. It is pickled with its
                dependencies and sent. If that is not possible, the coordinator iterates, and sends
                batches.
        """
        if not callable(dataset_fn) and not hasattr(dataset_fn, "__iter__"):
            raise TypeError(
                "create_per_worker_dataset takes a function that returns a dataset, or a dataset. "
                f"Received: {dataset_fn!r}"
            )
        return PerWorkerDataset(self._dispatcher.iterators, dataset_fn)

    def end(self) -> None:
        """Disconnects the workers and servers, whose processes end. Called at exit."""
        with signals_held:  # else processes miss the goodbye, and report a loss
            if self._is_ended:
                return
            self._is_ended = True
            self._dispatcher.end()


def _end(coordinator: weakref.ref[ClusterCoordinator]) -> None:
    alive = coordinator()
    if alive is not None:
        alive.end()
