"""Saving a checkpoint at the same step of all workers when one of them will be preempted.

A worker is notified by SIGTERM, or by polling a function. It publishes a notice, and a
thread of each worker replies with the number of steps that the worker has begun. From then on, no
worker begins another step before the maximum of these numbers is known; all train up to it, save,
and exit. So no worker waits for one that is blocked in a step, however far some are
ahead, and a step costs nothing but an uncontended lock.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from unison.errors import InvalidArgumentError, OpError
from unison.runtime import liveness, process_group
from unison.runtime.agreement import ConnectedWorkers, Talk
from unison.runtime.cluster_resolvers import ClusterResolver
from unison.runtime.coordination import CoordinationStore
from unison.runtime.exit_codes import PREEMPTED
from unison.runtime.placement import scoped_placement
from unison.strategies.default import default_strategy
from unison.train.checkpoint import Checkpoint
from unison.train.manager import CheckpointManager
from unison.variables import Variable

logger = logging.getLogger("unison")

#: The attribute of the checkpoint with its number of steps.
_COUNTER = "checkpointed_runs"

_SECONDS_BETWEEN_QUESTIONS = 1.0
_SECONDS_BETWEEN_LOOKS = 0.1

#: The number of steps before the end of a grace period at which the last checkpoint begins.
_STEPS_BEFORE_THE_END = 6

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """The detection of a preemption by `PreemptionCheckpointHandler`, and its actions.

    Attributes:
        termination_watcher_fn: Called every second; returns whether this process will be preempted.
            Default: it will be after SIGTERM.
        exit_fn: Called when the checkpoint has been saved. Default: `sys.exit(42)`.
        grace_period: Seconds from the notice to the end, if they suffice for training to
            continue: a checkpoint is saved immediately, and another one shortly before the end.
        save_fn: Called instead of the checkpoint manager's `save`.

    TF: `tf.distribute.experimental.TerminationConfig`.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


class PreemptionCheckpointHandler:
    """Saves a checkpoint and exits when this worker, or another one, will be preempted.

    Every worker creates one, which restores the latest checkpoint, and runs its steps by `run` (or
    calls `save_checkpoint_if_preempted` after each of them). A step must be the same for all
    workers.

    Args:
        cluster_resolver: Accepted for compatibility with TensorFlow: the workers are those of this
            process's job.
        checkpoint_or_checkpoint_manager: The checkpoint or manager to save.
        checkpoint_dir: The folder, for a checkpoint; it keeps the latest one.
        termination_config: The detection, and the actions.

    Raises:
        InvalidArgumentError: A checkpoint is given without a folder.
        ValueError: The cluster has parameter servers, or workers to which this process is not
            connected; or SIGTERM cannot be handled, because this is not the main thread.

    Examples:
        >>> import tempfile, unison
        >>> count = unison.Variable(0)
        >>> handler = PreemptionCheckpointHandler(
        ...     None, unison.train.Checkpoint(count=count), tempfile.mkdtemp()
        ... )
        >>> while handler.total_run_calls < 3:
        ...     _ = handler.run(count.assign_add, 1)
        >>> int(count)
        3
        >>> handler.stop()

    TF: `tf.distribute.experimental.PreemptionCheckpointHandler`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        _check_cluster(cluster_resolver)
        self._config = termination_config or TerminationConfig()
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._counter = _counter_of(self._manager.checkpoint)
        self._manager.restore_or_initialize()
        #: The numbers of steps that have ended, and begun.
        self._taken = self._begun = int(self._counter)
        #: The number of steps after which to save a checkpoint; None before a notice.
        self._target: int | None = None
        self._notice: float | None = None
        self._has_saved_once = False
        self._step_seconds = _Mean()
        #: Whether the next step must wait until the target is known.
        self._is_held = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._is_stopped = threading.Event()
        self._before: Any = None
        self._talk: Talk | None = None
        self._threads: list[threading.Thread] = []
        if self._config.termination_watcher_fn is None:
            self._watch_signal()
        else:
            self._start(self._ask, self._config.termination_watcher_fn)
        if _is_one_of_several():
            store = CoordinationStore()
            self._name = f"unison/preemption/{next(_numbers)}"
            self._talk = ConnectedWorkers(
                jax.process_count(), jax.process_index(), store, self._name, process_group.timeout()
            ).talk("steps")
            self._start(self._watch_others, store)
        atexit.register(self.stop)

    @property
    def total_run_calls(self) -> int:
        """The number of steps that have ended, including those before a restart."""
        return self._taken

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step: returns the function's result for the other arguments.

        Before that, it saves a checkpoint and exits if all workers should do so here.

        Raises:
            DeadlineExceededError: A worker will be preempted, and another one does not report its
                number of steps.
            UnavailableError: A worker is lost.
        """
        self._begin()
        begun = time.monotonic()
        try:
            result = distributed_train_function(*args, **kwargs)
        except BaseException:
            with self._changed:
                self._begun -= 1
            raise
        self._step_seconds.add(time.monotonic() - begun)
        self._taken += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint and exits if all workers should do so here; otherwise counts a step.

        For loops that do not call `run`: call it after each step.

        Args:
            args: For the manager's `save`, or the `save_fn`.
            kwargs: For the same.
        """
        self._begin(*args, **kwargs)
        self._taken += 1

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Inside, steps are run by `run`; its end is a place to save and exit, too."""
        yield
        self._save_if_due()

    def stop(self) -> None:
        """Stops watching, and restores the previous handler of SIGTERM."""
        self._end_threads()
        if self._before is not None:
            with contextlib.suppress(ValueError):  # in another thread than the main one
                if signal.getsignal(signal.SIGTERM) == self._take_signal:
                    signal.signal(signal.SIGTERM, self._before)
            self._before = None
        atexit.unregister(self.stop)

    # -- between two steps -----------------------------------------------------------------

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        """Counts a step that begins, once no checkpoint is due before it."""
        while not self._may_begin():
            self._save_if_due(*args, **kwargs)

    def _may_begin(self) -> bool:
        if self._notice is not None and self._talk is None:
            return self._count_if_not_due(self._target_alone())
        with self._changed:
            self._wait_for_target()
            return self._count_if_not_due(self._target)

    def _count_if_not_due(self, target: int | None) -> bool:
        if target is not None and self._begun >= target:
            return False
        self._begun += 1
        return True

    def _save_if_due(self, *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint if all workers should do so after this step; finally, exits."""
        if self._talk is None:
            self._target = self._target_alone()
        with self._changed:
            self._wait_for_target()
            if self._target is None or self._begun < self._target:
                return
        self._save(*args, **kwargs)
        is_last = self._has_saved_once or not self._config.grace_period
        self._has_saved_once = True
        with self._changed:
            self._target = None
            self._changed.notify_all()
        if is_last:
            self._exit()
        else:
            logger.info("Training continues for most of the grace period.")

    def _target_alone(self) -> int | None:
        """Returns the target of the only worker: its current step."""
        return self._begun if self._is_due() else None

    def _is_due(self) -> bool:
        """Whether this worker has a notice, and a checkpoint is due now."""
        if self._notice is None or self._is_stopped.is_set():
            return False
        if not self._has_saved_once:
            return True
        rest = self._notice + (self._config.grace_period or 0.0) - time.monotonic()
        return rest <= _STEPS_BEFORE_THE_END * self._step_seconds.value

    def _wait_for_target(self) -> None:
        if self._is_held:
            with liveness.waiting(
                f"{liveness.AGREEMENT} (how many steps are taken before the end)"
            ):
                self._changed.wait_for(lambda: not self._is_held)
        if self._error is not None:
            raise self._error

    def _save(self, *args: Any, **kwargs: Any) -> None:
        self._counter.assign(self._begun)
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            in_time = {"check_interval": False} if len(args) < 2 else {}
            self._manager.save(*args, **(in_time | kwargs))
            self._manager.sync()
        logger.warning("Saved after step %d, as a worker is about to be stopped.", self._begun)

    def _exit(self) -> None:
        """Ends the process when all workers have saved."""
        self._end_threads()
        if self._talk is not None:
            try:
                self._talk.ask("saved")
            except OpError as error:  # this worker's part is saved anyway
                logger.warning("Not all workers have saved: %s", error)
        # SIGTERM is ignored: a launcher sends it when the first worker has ended.
        (self._config.exit_fn or _exit_to_be_restarted)()
        self.stop()

    # -- the threads -----------------------------------------------------------------------

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, name="unison preemption", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end_threads(self) -> None:
        self._is_stopped.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * _SECONDS_BETWEEN_QUESTIONS)
        self._threads.clear()

    def _watch_signal(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "SIGTERM can be watched by the main thread only. Make the "
                "PreemptionCheckpointHandler there, or pass a termination_watcher_fn."
            )
        if process_group.is_elastic():  # the worker leaves, and the others continue
            self._before = signal.getsignal(signal.SIGTERM)
            return
        self._before = signal.signal(signal.SIGTERM, self._take_signal) or signal.SIG_DFL

    def _take_signal(self, *signal_and_frame: Any) -> None:
        del signal_and_frame
        # Nothing else: the main thread may hold any lock.
        self._notice = self._notice or time.monotonic()

    def _ask(self, is_told: Callable[[], bool]) -> None:
        """Polls the function until this process will be preempted."""
        has_failed = False
        while not self._is_stopped.wait(_SECONDS_BETWEEN_QUESTIONS):
            try:
                if is_told():
                    self._notice = time.monotonic()
                    return
            except Exception:
                if not has_failed:
                    logger.exception("termination_watcher_fn has failed. It will be called again.")
                has_failed = True

    def _watch_others(self, store: CoordinationStore) -> None:
        """Makes this worker save at the others' step, once or (with a grace period) twice."""
        rounds = 2 if self._config.grace_period else 1
        for number in range(rounds):
            try:
                if not self._await_notice(store, f"{self._name}/notice {number}"):
                    return
            except (OpError, jax.errors.JaxRuntimeError):
                return  # a worker is lost, which the program itself notices
            self._agree(is_last=number == rounds - 1)

    def _await_notice(self, store: CoordinationStore, key: str) -> bool:
        """Waits for a notice, and publishes this worker's own; False to stop."""
        while not self._is_stopped.is_set():
            if self._is_due():
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
                    store.put(key, str(jax.process_index()).encode())
            if (worker := store.get(key, _SECONDS_BETWEEN_LOOKS)) is not None:
                logger.warning("Worker %s is about to be stopped.", worker.decode())
                return True
        return False

    def _agree(self, is_last: bool) -> None:
        """Agrees with the others on the number of steps, and waits until this worker saves."""
        assert self._talk is not None
        with self._changed:
            self._is_held = True
            begun = self._begun
        target, error = None, None
        try:
            target = max(self._talk.ask(begun))
        except Exception as raised:  # set by the program at the end of its step
            error = raised
        with self._changed:
            self._target, self._error = target, error
            self._is_held = False
            self._changed.notify_all()
            while not is_last and self._target is not None and not self._is_stopped.is_set():
                self._changed.wait(_SECONDS_BETWEEN_LOOKS)


class _Mean:
    """A running mean."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, number: float) -> None:
        self._count += 1
        self.value += (number - self.value) / self._count


def _exit_to_be_restarted() -> None:
    sys.exit(PREEMPTED)


def _is_one_of_several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _check_cluster(resolver: ClusterResolver | None) -> None:
    if resolver is None:
        return
    cluster = resolver.cluster_spec()
    if "ps" in cluster.jobs:
        raise ValueError(
            "A PreemptionCheckpointHandler requires workers that run every step "
            "together. Received: a cluster with parameter servers, whose workers do not."
        )
    count = len(process_group.training_tasks(cluster))
    if count > 1 and not (_is_one_of_several() or process_group.is_elastic()):
        raise ValueError(
            f"Expected this process to have joined the {count} workers of the cluster. Make the "
            "MultiWorkerMirroredStrategy before the PreemptionCheckpointHandler."
        )


def _manager(
    given: Checkpoint | CheckpointManager, folder: str | os.PathLike | None
) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    if not folder:
        raise InvalidArgumentError(
            message="A PreemptionCheckpointHandler that is given a Checkpoint needs the folder "
            "where to save it: pass checkpoint_dir, or a CheckpointManager."
        )
    return CheckpointManager(given, folder, max_to_keep=1)


def _counter_of(checkpoint: Checkpoint) -> Any:
    """Returns the checkpoint's variable with its number of steps."""
    if not hasattr(checkpoint, _COUNTER):
        with scoped_placement(default_strategy().placement):
            counter = Variable(0, trainable=False, name=_COUNTER, dtype=np.int64)
        setattr(checkpoint, _COUNTER, counter)
    return getattr(checkpoint, _COUNTER)
