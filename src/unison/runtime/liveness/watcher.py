"""Watches the other workers of this process's job, and tells them of this one.

Each worker counts the operations that it does together with the others, and has a thread that tells
them twice a second how far it has come (`star`), and judges what they tell (`verdict`). When one
is lost, all learn who and why; what waits for it is released (`sockets`, and whoever has asked by
`on_failure`), and raises the one error that says so.
Where the main thread cannot be released, the process ends, with the error on its standard error.

A step costs this a few attributes; nothing is sent and no lock is taken for it. Before a program is
run for the first time, the workers compare what they are about to run.
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
from unison.net.lines import Line
from unison.runtime.liveness.sockets import Address, shut_down
from unison.runtime.liveness.star import REPORT, Star
from unison.runtime.liveness.stragglers import Stragglers, where_the_program_is
from unison.runtime.liveness.verdict import BEAT, REMEMBERED, Finding, Operation, Watch

#: How a process ends that has to end because another one is lost.
LOST_ANOTHER_EXIT_CODE = 75

#: Seconds that the main thread has to notice a failure, before the process ends.
_GRACE = 5.0

#: Seconds for which an error of JAX may come before the news of its cause.
_CAUSE_WITHIN = 3.0

#: How JAX says that other processes are the matter.
_SIGNS_OF_OTHERS = re.compile(
    r"[Gg]loo|by peer|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|FAILED_PRECONDITION"
    r"|[Cc]ollective|[Tt]imed out"
)

#: More of an error's message is not told to the others.
_MOST_TOLD = 1500

#: What says nothing of who is lost.
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
    """What this worker knows of the others, and tells them of itself.

    Args:
        names: What each worker is called.
        own: Which of them this is.
        lines: The connections to the others; see `Star`.
        limit: Seconds for which a worker may be silent, or keep others waiting.

    Attributes:
        names: What each worker is called.
        own: Which of them this is.
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

    # -- what the program says -------------------------------------------------------------

    def begin(self, operation: Operation, is_new: bool) -> None:
        """Notes that this worker begins something that all do.

        Args:
            operation: What it is.
            is_new: Whether this worker does it for the first time: then all compare.

        Raises:
            OpError: A worker is lost, or does something else.
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
            program: What is called.
            args: With what.
            smallest: Which leaf of the outputs takes the least memory.

        Raises:
            OpError: A worker is lost.
        """
        self._is_launching = True
        try:
            outputs = program(*args)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter: of an argument
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
        """Inside, this worker waits for what the others say."""
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
        """Says at which addresses the processes' collectives listen, whose waits are to be ended
        when a worker is lost.
        """
        self._listeners = tuple(listeners)

    def on_failure(self, callback: Callable[[OpError], None]) -> None:
        """Has a function called, in another thread, when a worker is lost; at once if one is."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    @property
    def failure(self) -> OpError | None:
        """The error that says who is lost; None while all is well."""
        return self._failure

    def noticed(self) -> OpError:
        """Returns the failure as an error to be raised: the program knows of it."""
        assert self._failure is not None
        self._is_noticed = True
        return type(self._failure)(message=self._failure.message)

    def cause_of(self, error: BaseException) -> BaseException:
        """Returns the failure that an error of JAX comes of; if there is none, the error."""
        if not _SIGNS_OF_OTHERS.search(str(error)):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _CAUSE_WITHIN)
        return error if self._failure is None else self.noticed()

    def passed(self, since: float) -> set[int]:
        """Returns the workers that do not come to where this one has been since a time.

        Args:
            since: The time, as `time.monotonic` says it.
        """
        return self._watch.passed(self._latest.number, since)

    def lost(self, worker: int) -> OpError | None:
        """Returns the error of waiting for what a worker says, if it will say nothing more."""
        if self._failure is not None:
            return self.noticed()
        if not self._watch.has_left(worker):
            return None
        about = "has left the job, while others wait for what it has to say."
        return Finding("left", worker, self.own, about).error(self.names, self.own, self.doing())

    def doing(self) -> str:
        """Says what this worker does."""
        return str(self._latest) if self._waiting_for is None else self._waiting_for[0]

    def report(self, told: Mapping[str, Any]) -> None:
        """Tells the first worker what this one does; for any thread."""
        text = json.dumps(told)
        if self.own > 0:
            self._star.say({"is": REPORT, "told": text}, may_be_dropped=True)
        else:
            _pass_on_report(0, text)

    # -- the end ---------------------------------------------------------------------------

    def leave(self) -> None:
        """Ends this worker's part: waits for the operations that it has begun, and says so.

        The first worker, through which the others talk, stays until all have left.
        """
        if self._failure is None:
            self._finish_last_operation()
        if self._failure is None:
            self._star.say({"is": "left"} | self._progress())
            if self.own == 0:
                with self._changed:
                    self._changed.wait_for(lambda: not self._star.connected, self._limit)
        self._end()

    def fail(self, error: BaseException) -> None:
        """Says that this worker's program ends by an error."""
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
        """Closes this process's copy of the connections, as in a child, which is no worker."""
        self._star.abandon()

    def _die(self) -> None:
        """Ends the process by the failure, also where its output cannot be written."""
        kind = type(self._failure)
        try:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            with contextlib.suppress(Exception):
                print(f"{kind.__module__}.{kind.__name__}: {self._failure}", file=sys.stderr)
                sys.stderr.flush()
        finally:
            os._exit(LOST_ANOTHER_EXIT_CODE)

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch_others()
        except Exception as error:
            # Nobody would see who is lost any more.
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
            # Somebody who waits for an answer is not to wait for the next beat.
            is_asked = bool(self._questions())
            heard = self._star.hear(0.02 if is_asked else next_beat - now)
            now = time.monotonic()
            for worker, message in heard:
                finding = self._watch.hear(worker, message, now)
                self._declare(finding)
                is_known = worker != self.own and 0 <= worker < len(self.names)
                if finding is not None or message is None or not is_known:
                    continue  # there is nothing more to it, or it is invalid
                self._hear_of_stragglers(worker, message, now)
                if message["is"] == REPORT:
                    _pass_on_report(worker, message.get("told", ""))
            self._answer()
            # The beats of a thousand workers do not each need a look at all of them.
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
        """Says how many operations this worker has begun, and what the latest one is."""
        number, operation, _ = self._latest
        return {"count": number, "mark": "" if operation is None else operation.mark}

    def _questions(self) -> list[int]:
        return [number for number in self._watch.asked() if number not in self._answered]

    def _answer(self) -> None:
        """Says what this worker's operations are that others have asked about."""
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
        """Waits until all workers have said what their operation of a number is."""
        with self.waiting(f"{self._latest}, before its first run"):
            self._state(number, operation)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._failure is not None or not self._watch.unheard_of(number)
                )
            self._declare(self._watch.compare(number, operation))
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self.noticed()

    def _declare(self, finding: Finding | None) -> None:
        """Makes it known that the workers cannot go on."""
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
        """Ends a process whose main thread waits for what will not come."""
        assert self._finding is not None
        is_culprit = self._finding.worker == self.own
        if not self._is_noticed and (is_culprit or self._is_stuck()):
            self._die()

    def _is_stuck(self) -> bool:
        last = self._last_output
        try:
            is_computing = last is not None and not last.is_deleted() and not _is_ready(last)
        except RuntimeError:  # it was deleted meanwhile
            is_computing = False
        return self._is_launching or self._waiting_for is not None or is_computing


_watcher: Liveness | None = None
_on_report: OnReport | None = None


def _forget() -> None:
    """In a child: its copy of the connections would hide from the others that this worker died."""
    global _watcher
    if _watcher is not None:
        watcher, _watcher = _watcher, None
        watcher.abandon()


os.register_at_fork(after_in_child=_forget)


def _pass_on_report(worker: int, text: str) -> None:
    if _on_report is not None:
        with contextlib.suppress(Exception):  # a look at the job is not worth its end
            _on_report(worker, json.loads(text))


def on_report(callback: OnReport | None) -> None:
    """Has `callback` called, on the first worker, with what each worker reports; None: nobody is.

    It is called in another thread, by which this worker watches the others: it must not wait.
    """
    global _on_report
    _on_report = callback


def report(told: Mapping[str, Any]) -> None:
    """Tells the first worker what this one does; see `on_report`. Without a job, nobody is told."""
    if _watcher is not None:
        _watcher.report(told)


def current() -> Liveness | None:
    """Returns who watches the other workers; None without a job."""
    return _watcher


def is_watching() -> bool:
    """Whether this process belongs to a job whose workers it watches."""
    return _watcher is not None


def start(names: Sequence[str], own: int, lines: Mapping[int, Line], limit: float) -> Liveness:
    """Begins to watch the other workers of this process's job, and returns who does it."""
    global _watcher
    _watcher = Liveness(names, own, lines, limit)
    return _watcher


def stop() -> None:
    """Ends the watching, as after a failure before a new job; the others see this worker leave."""
    global _watcher
    if _watcher is not None:
        watcher, _watcher = _watcher, None
        watcher.leave()


def fail(error: BaseException) -> None:
    """Ends the watching because the program ends by an error; the others hear of it."""
    global _watcher
    if _watcher is not None:
        watcher, _watcher = _watcher, None
        watcher.fail(error)


def failure() -> OpError | None:
    """Returns the error that says which worker of the job is lost; None while all is well."""
    return None if _watcher is None else _watcher.failure


def check() -> None:
    """Raises the error that says which worker is lost, if one is."""
    if _watcher is not None and _watcher.failure is not None:
        raise _watcher.noticed()


def on_failure(callback: Callable[[OpError], None]) -> None:
    """Has `callback` called with the error, once, when a worker of the job is lost.

    It is called in another thread, so that it can release what waits in this one. Without a job,
    it never is.
    """
    if _watcher is not None:
        _watcher.on_failure(callback)


def lost(worker: int) -> OpError | None:
    """Returns the error of waiting for what a worker says, if it will say nothing more."""
    return None if _watcher is None else _watcher.lost(worker)


def passed(since: float) -> set[int]:
    """Returns the workers that do not come to where this one has been since a time.

    They have left, have begun operations that this one has not, or wait for an agreement of all
    about something else.

    Args:
        since: The time, as `time.monotonic` says it.
    """
    return set() if _watcher is None else _watcher.passed(since)


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """Inside, this worker waits for what the others say."""
    return contextlib.nullcontext() if _watcher is None else _watcher.waiting(what)


def cause_of(error: BaseException) -> BaseException:
    """Returns the loss of a worker that an error of JAX comes of; if there is none, the error."""
    return error if _watcher is None else _watcher.cause_of(error)


def _is_ready(array: Any) -> bool:
    """Whether an array has been computed; JAX's declarations leave its method out."""
    return bool(array.is_ready())
