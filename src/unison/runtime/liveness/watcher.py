"""Monitors the other workers of this process's job, and sends them this one's progress.

Each worker counts the operations that it runs together with the others, and has a thread that sends
them its count twice a second (`star`), and evaluates theirs (`failure_detector`). When a worker is
lost, all others learn which and why; operations that wait for it are unblocked (`sockets`, and the
callbacks of `on_failure`), and raise an error that states it. If the main thread cannot be
unblocked, the process ends, with the error on its standard error.

The cost per step is the assignment of a few attributes; it sends nothing and takes no lock. Before
a program is run for the first time, the workers compare what they are about to run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from unison.errors import OpError
from unison.interrupts import wait_until
from unison.net.lines import Line
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.liveness.failure_detector import BEAT, REMEMBERED, Finding, Operation, Watch
from unison.runtime.liveness.sockets import Address, shut_down
from unison.runtime.liveness.star import REPORT, Star
from unison.runtime.liveness.stragglers import Stragglers, where_the_program_is

#: Seconds for the main thread to notice a failure, before the process ends.
_GRACE = 5.0

#: Seconds by which an error of JAX may precede the message about its cause.
_CAUSE_WITHIN = 3.0

#: Signs in an error of JAX that other processes are the cause.
_SIGNS_OF_OTHERS = re.compile(
    r"[Gg]loo|by peer|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|FAILED_PRECONDITION"
    r"|[Cc]ollective|[Tt]imed out"
)

#: The maximum length of an error's message that is sent to the others.
_MOST_TOLD = 1500

#: The message types that do not show that a worker is lost.
_QUIET = ("beat", REPORT)

#: Called with a worker's index and what it reports.
OnReport = Callable[[int, Mapping[str, Any]], None]

logger = logging.getLogger("unison")


class _Begun(NamedTuple):
    """An operation that has been begun."""

    number: int
    operation: Operation | None
    at: float

    def __str__(self) -> str:
        if self.operation is None:
            return "no operation yet"
        return f"operation {self.number} ({self.operation.name})"


class Liveness:
    """Exchanges the progress of this worker with the others, and detects lost workers.

    Args:
        names: The workers' names.
        own: The index of this worker.
        lines: The connections to the others; see `Star`.
        limit: The timeout, in seconds, for a worker that is silent or keeps others waiting.

    Attributes:
        names: The workers' names.
        own: The index of this worker.
    """

    def __init__(
        self,
        names: Sequence[str],
        own: int,
        lines: Mapping[int, Line],
        limit: float,
    ):
        self.names = names
        self.own = own
        self._limit = limit
        self._star = Star(own, lines)
        self._watch = Watch(names, own, limit, time.monotonic())
        self._stragglers = Stragglers(names, self._star.say)
        self._latest = _Begun(0, None, time.monotonic())
        #: The latest operations, by number.
        self._operations: dict[int, Operation] = {}
        self._waiting_for: tuple[str, float] | None = None
        self._is_launching = False
        self._last_output: jax.Array | None = None
        self._answered: set[int] = set()
        self._changed = threading.Condition()
        self._finding: Finding | None = None
        self._failure: OpError | None = None
        self._failed_at = 0.0
        self._is_noticed = False
        self._callbacks: list[Callable[[OpError], None]] = []
        self._listeners: Iterable[Address] = ()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="unison-liveness", daemon=True)
        self._thread.start()

    # -- calls of the program --------------------------------------------------------------

    def begin(self, operation: Operation, is_new: bool) -> None:
        """Notes that this worker begins an operation of all workers.

        Args:
            operation: The operation.
            is_new: Whether this worker runs it for the first time: then all workers compare it.

        Raises:
            OpError: A worker is lost, or runs a different operation.
        """
        if self._failure is not None:
            raise self.noticed()
        number = self._latest.number + 1
        self._latest = _Begun(number, operation, time.monotonic())
        self._operations[number] = operation
        self._operations.pop(number - REMEMBERED, None)
        if is_new:
            self._compare(number, operation)

    def launch(self, program: Callable[..., Any], args: Any, smallest: int) -> Any:
        """Calls a compiled program of all processes, and returns its outputs.

        Args:
            program: The program.
            args: Its arguments.
            smallest: The index of the smallest leaf of the outputs, in bytes.

        Raises:
            OpError: A worker is lost.
        """
        self._is_launching = True
        try:
            outputs = program(*args)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter: from an argument
            cause = self.cause_of(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._is_launching = False
        leaves = jax.tree.leaves(outputs)
        self._last_output = leaves[smallest] if leaves else None
        return outputs

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Marks this worker as waiting for messages of the others, inside the context."""
        self._raise_failure()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = self._waiting_for
        self._waiting_for = (what, time.monotonic())
        try:
            yield
        finally:
            self._waiting_for = before

    def release_at(self, listeners: Iterable[Address]) -> None:
        """Sets the addresses at which the processes' collectives listen, which are unblocked when a
        worker is lost.
        """
        self._listeners = tuple(listeners)

    def on_failure(self, callback: Callable[[OpError], None]) -> None:
        """Calls a function, in another thread, when a worker is lost; immediately if one is."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    @property
    def failure(self) -> OpError | None:
        """The error that states which worker is lost; None if none is."""
        return self._failure

    def noticed(self) -> OpError:
        """Returns the failure as an error to raise, and notes that the program knows of it."""
        assert self._failure is not None
        self._is_noticed = True
        return type(self._failure)(message=self._failure.message)

    def cause_of(self, error: BaseException) -> BaseException:
        """Returns the failure that caused an error of JAX, or the error itself if there is none."""
        failure = self._failure
        is_of_jax = not isinstance(error, OpError)
        if failure is not None and is_of_jax and failure.message in str(error):
            return self.noticed()  # XLA quotes what it was told
        if not _SIGNS_OF_OTHERS.search(str(error)):
            return error
        wait_until(self._changed, lambda: self._failure is not None, lambda: None, _CAUSE_WITHIN)
        return error if self._failure is None else self.noticed()

    def passed(self, since: float) -> set[int]:
        """Returns the workers that will not reach the point where this one has been since a time.

        Args:
            since: The time, as returned by `time.monotonic`.
        """
        return self._watch.passed(self._latest.number, since)

    def lost(self, worker: int) -> OpError | None:
        """Returns the error to raise for a worker that will send nothing more, else None."""
        if self._failure is not None:
            return self.noticed()
        if not self._watch.has_left(worker):
            return None
        about = "has left the job while others wait for its answer."
        return Finding("left", worker, self.own, about).error(self.names, self.own, self.doing())

    def doing(self) -> str:
        """Returns a description of what this worker is doing."""
        return str(self._latest) if self._waiting_for is None else self._waiting_for[0]

    def report(self, told: Mapping[str, Any]) -> None:
        """Sends a report to the first worker; any thread may call this."""
        text = json.dumps(told)
        if self.own > 0:
            self._star.say({"is": REPORT, "told": text}, may_be_dropped=True)
        else:
            _pass_on_report(0, text)

    # -- the end ---------------------------------------------------------------------------

    def leave(self) -> None:
        """Ends this worker's part: waits for its pending operations, and announces that it leaves.

        The first worker, which relays messages, stays until all others have left.
        """
        if self._failure is None:
            self._finish_last_operation()
        if self._failure is None:
            self._star.say({"is": "left"} | self._progress())
            if self.own == 0:
                wait_until(
                    self._changed, lambda: not self._star.connected, lambda: None, self._limit
                )
        self._end()

    def fail(self, error: BaseException) -> None:
        """Reports that this worker's program ends with an error."""
        if self._failure is None:
            said = ": ".join(filter(None, [type(error).__name__, str(error)]))
            self._star.say({"is": "failed", "error": said[:_MOST_TOLD]})
        self._end()

    def _finish_last_operation(self) -> None:
        last = self._last_output
        if last is None or last.is_deleted():
            return
        try:
            last.block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if isinstance(self.cause_of(error), OpError):
                self._die()

    def _end(self) -> None:
        self._is_ending = True
        self._star.wake()
        self._thread.join(2 * _GRACE)
        self._star.close()

    def abandon(self) -> None:
        """Closes this process's copies of the connections, in a child, which is not a worker."""
        self._star.abandon()

    def _die(self) -> None:
        """Ends the process because of the failure, even if its output cannot be written."""
        kind = type(self._failure)
        try:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            with contextlib.suppress(Exception):
                print(f"{kind.__module__}.{kind.__name__}: {self._failure}", file=sys.stderr)
                sys.stderr.flush()
        finally:
            os._exit(LOST_ANOTHER)

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch_others()
        except Exception as error:
            # Lost workers would no longer be detected.
            about = f"cannot watch the others: {type(error).__name__}: {error}"
            self._declare(Finding("failed", self.own, self.own, about))
            raise

    def _watch_others(self) -> None:
        interval = min(BEAT, self._limit / 4)
        next_beat = time.monotonic()
        while not self._is_ending:
            now = time.monotonic()
            is_due = now >= next_beat
            if is_due:
                next_beat = now + interval
                self._beat(now)
            # A worker that waits for an answer must not wait for the next heartbeat.
            is_asked = bool(self._questions())
            heard = self._star.hear(0.02 if is_asked else next_beat - now)
            now = time.monotonic()
            for worker, message in heard:
                finding = self._watch.hear(worker, message, now)
                self._declare(finding)
                is_known = worker != self.own and 0 <= worker < len(self.names)
                if finding is not None or message is None or not is_known:
                    continue  # there is nothing further to handle, or it is invalid
                self._hear_of_stragglers(worker, message, now)
                if message["is"] == REPORT:
                    _pass_on_report(worker, message.get("told", ""))
            self._answer()
            # Avoids a check of all workers for each heartbeat of a thousand workers.
            if is_due or any(not said or said.get("is") not in _QUIET for _, said in heard):
                self._declare(self._watch.look(self._latest.number, self.doing(), now))
                self._look_for_stragglers(now)
            self._declare(self._watch.compare_latest(self._operations.get))
            with self._changed:
                self._changed.notify_all()
            if self._failure is not None and now > self._failed_at + _GRACE:
                self._end_if_stuck()

    def _look_for_stragglers(self, now: float) -> None:
        count = self._latest.number
        self._stragglers.look(count, self._watch.late(), self._watch.is_first_of(count), now)

    def _hear_of_stragglers(self, worker: int, message: Mapping[str, Any], now: float) -> None:
        if message.get("is") == "where" and message["worker"] == self.own:
            self._star.say({"is": "stack", "stack": where_the_program_is()})
        elif message.get("is") == "stack":
            self._stragglers.hear(worker, message["stack"], now)

    def _beat(self, now: float) -> None:
        since = self._latest.at if self._waiting_for is None else self._waiting_for[1]
        self._star.say(
            {
                "is": "beat",
                "doing": self.doing(),
                "seconds": round(now - since, 3),
            }
            | self._progress(),
            may_be_dropped=True,
        )

    def _progress(self) -> dict[str, Any]:
        """Returns the number of operations that this worker has begun, and the last one's mark."""
        number, operation, _ = self._latest
        return {"count": number, "mark": "" if operation is None else operation.mark}

    def _questions(self) -> list[int]:
        return [number for number in self._watch.asked() if number not in self._answered]

    def _answer(self) -> None:
        """Describes this worker's operations that others are comparing."""
        self._watch.forget(self._latest.number - REMEMBERED)
        for number in self._watch.asked():
            operation = self._operations.get(number)
            if operation is None:
                continue
            if number not in self._answered:
                self._state(number, operation)
            self._declare(self._watch.compare(number, operation))

    def _state(self, number: int, operation: Operation) -> None:
        self._answered.add(number)
        self._star.say({"is": "operation", "number": number, "text": str(operation)})

    def _compare(self, number: int, operation: Operation) -> None:
        """Waits until all workers have described their operation of a number."""
        with self.waiting(f"{self._latest}, before its first run"):
            self._state(number, operation)
            wait_until(
                self._changed,
                lambda: self._failure is not None or not self._watch.unheard_of(number),
                lambda: None,
            )
            self._declare(self._watch.compare(number, operation))
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self.noticed()

    def _declare(self, finding: Finding | None) -> None:
        """Announces that the workers cannot continue."""
        if finding is None:
            return
        with self._changed:
            if self._failure is not None or self._is_ending:
                return
            self._finding = finding
            self._failure = finding.error(self.names, self.own, self.doing())
            self._failed_at = time.monotonic()
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        self._star.say(
            {
                "is": "finding",
                "kind": finding.kind,
                "worker": finding.worker,
                "by": finding.by,
                "about": finding.about,
            }
        )
        try:
            for callback in callbacks:
                try:
                    callback(self._failure)
                except Exception:
                    logger.exception("A callback of unison.runtime.liveness.on_failure has failed.")
        finally:
            shut_down(self._listeners)

    def _end_if_stuck(self) -> None:
        """Ends a process whose main thread waits for something that will not happen."""
        assert self._finding is not None
        is_culprit = self._finding.worker == self.own
        if not self._is_noticed and (is_culprit or self._is_stuck()):
            self._die()

    def _is_stuck(self) -> bool:
        last = self._last_output
        try:
            is_computing = last is not None and not last.is_deleted() and not _is_ready(last)
        except RuntimeError:  # it was deleted in the meantime
            is_computing = False
        return self._is_launching or self._waiting_for is not None or is_computing


_watcher: Liveness | None = None
_on_report: OnReport | None = None


def _forget() -> None:
    """Closes a child's copies of the connections, which would hide this worker's death."""
    global _watcher
    if _watcher is not None:
        watcher, _watcher = _watcher, None
        watcher.abandon()


os.register_at_fork(after_in_child=_forget)


def _pass_on_report(worker: int, text: str) -> None:
    if _on_report is not None:
        with contextlib.suppress(Exception):  # an invalid report must not end the job
            _on_report(worker, json.loads(text))


def on_report(callback: OnReport | None) -> None:
    """Sets the callback for all workers' reports, on the first worker; None removes it.

    It is called in the thread in which this worker monitors the others: it must not block.
    """
    global _on_report
    _on_report = callback


def report(told: Mapping[str, Any]) -> None:
    """Sends a report to the first worker; see `on_report`. Without a job, does nothing."""
    if _watcher is not None:
        _watcher.report(told)


def current() -> Liveness | None:
    """Returns the monitor of the other workers; None without a job."""
    return _watcher


def is_watching() -> bool:
    """Returns whether this process belongs to a job whose workers it monitors."""
    return _watcher is not None


def start(names: Sequence[str], own: int, lines: Mapping[int, Line], limit: float) -> Liveness:
    """Starts monitoring the other workers of this process's job, and returns the monitor."""
    global _watcher
    _watcher = Liveness(names, own, lines, limit)
    return _watcher


def stop() -> None:
    """Stops monitoring, as after a failure before a new job; the others see this worker leave."""
    global _watcher
    if _watcher is not None:
        watcher, _watcher = _watcher, None
        watcher.leave()


def fail(error: BaseException) -> None:
    """Stops monitoring because the program ends with an error, which the others are sent."""
    global _watcher
    if _watcher is not None:
        watcher, _watcher = _watcher, None
        watcher.fail(error)


def failure() -> OpError | None:
    """Returns the error that states which worker of the job is lost; None if none is."""
    return None if _watcher is None else _watcher.failure


def check() -> None:
    """Raises the error that states which worker is lost, if one is."""
    if _watcher is not None and _watcher.failure is not None:
        raise _watcher.noticed()


def on_failure(callback: Callable[[OpError], None]) -> None:
    """Calls `callback` with the error, once, when a worker of the job is lost.

    It is called in another thread, so that it can unblock what waits in this one. Without a job, it
    is never called.
    """
    if _watcher is not None:
        _watcher.on_failure(callback)


def lost(worker: int) -> OpError | None:
    """Returns the error to raise for a worker that will send nothing more, else None."""
    return None if _watcher is None else _watcher.lost(worker)


def passed(since: float) -> set[int]:
    """Returns the workers that will not reach the point where this one has been since a time.

    They have left, have begun operations that this one has not, or wait for an agreement of all
    about something else.

    Args:
        since: The time, as returned by `time.monotonic`.
    """
    return set() if _watcher is None else _watcher.passed(since)


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """Marks this worker as waiting for messages of the others, inside the context."""
    return contextlib.nullcontext() if _watcher is None else _watcher.waiting(what)


def cause_of(error: BaseException) -> BaseException:
    """Returns the loss of a worker that caused an error of JAX, or the error itself."""
    return error if _watcher is None else _watcher.cause_of(error)


def _is_ready(array: Any) -> bool:
    """Returns whether an array has been computed; JAX's type declarations lack the method."""
    return bool(array.is_ready())
