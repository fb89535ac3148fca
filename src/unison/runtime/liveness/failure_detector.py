"""A worker's knowledge of the others, and the rules for declaring one lost.

Workers launch the same operations in the same order, so each counts its own, and sends its count to
the others. A worker that dies, leaves early, falls behind, is silent, or runs a different operation
with the same number is at fault: a `Finding`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unison.errors import DeadlineExceededError, InvalidArgumentError, OpError, UnavailableError

#: Seconds between two heartbeats, unless the timeout is short.
BEAT = 0.5

#: The prefix of a worker's activity while all workers exchange values.
AGREEMENT = "an agreement"

#: The maximum duration of an agreement that all workers have reached, in seconds.
_LONGEST_EXCHANGE = 2.0

#: The number of the latest operations that are kept for comparison.
REMEMBERED = 1024


#: The types of the fields of messages, by message type.
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "beat": {"count": int, "mark": str, "doing": str, "seconds": (int, float)},
    "left": {"count": int, "mark": str},
    "failed": {"error": str},
    "operation": {"number": int, "text": str},
    "finding": {"kind": str, "worker": int, "by": int, "about": str},
    "where": {"worker": int},
    "stack": {"stack": str},
    "report": {},  # an invalid report must not end the job
    "gone": {},
}


def invalid(message: Mapping[str, Any], count: int) -> str | None:
    """Returns the error in a message of another worker; None if it is valid.

    Args:
        message: The message.
        count: The number of workers.

    Examples:
        >>> invalid({"is": "left", "count": 3, "mark": ""}, 2)
        >>> invalid({"is": "left", "count": None, "mark": ""}, 2)
        "the field 'count' of 'left' is None"
        >>> invalid({"is": "where", "worker": 7}, 2)
        'there is no worker 7'
    """
    what = message.get("is")
    fields = _FIELDS.get(what) if isinstance(what, str) else None
    if fields is None:
        return f"there is no message {what!r}"
    for name, kind in fields.items():
        if not isinstance(message.get(name), kind):
            return f"the field {name!r} of {what!r} is {message.get(name)!r}"
    for name in ("worker", "by", "from"):
        if name in message and not 0 <= message[name] < count:
            return f"there is no worker {message[name]!r}"
    return None


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that all workers run together.

    Attributes:
        name: Its name, for messages.
        detail: Further details that must be the same on all workers; shown if they differ.
    """

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name

    @functools.cached_property
    def mark(self) -> str:
        """A short identifier of the operation."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=4).hexdigest()
        return f"{self.name} (#{digest})"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The reason why the workers cannot continue.

    Attributes:
        kind: "died", "failed", "left", "silent", "stuck" or "differs".
        worker: The worker that it is about.
        by: The worker that detected it.
        about: A description of what it did.
    """

    kind: str
    worker: int
    by: int
    about: str

    def error(self, names: Sequence[str], own: int, doing: str) -> OpError:
        """Returns the error for a worker.

        Args:
            names: The workers' names.
            own: The worker that raises the error.
            doing: What that worker is doing.
        """
        name = names[self.worker]
        here = f" This worker, {names[own]}, is in {doing}."
        if self.worker == own and self.kind in ("silent", "stuck"):
            return DeadlineExceededError(
                message=f"The others have given up on this worker, {names[own]}: {self.about}"
            )
        if self.kind in ("silent", "stuck"):
            return DeadlineExceededError(message=f"{name} {self.about}{here}")
        if self.kind == "differs":
            return InvalidArgumentError(
                message=f"{name} runs a different program than {names[self.by]}. {self.about}\nAll "
                f"workers must run the same operations in the same order and shapes.{here}"
            )
        return UnavailableError(message=f"{name} {self.about}{here}")


@dataclasses.dataclass(frozen=True)
class Late:
    """A worker that is behind this one, and makes no progress.

    Attributes:
        worker: Its index.
        count: The number of operations that it has begun.
        since: Since when this worker has been waiting, by its own clock.
        doing: What it is doing, as text.
    """

    worker: int
    count: int
    since: float
    doing: str


@dataclasses.dataclass
class _Known:
    """The known state of another worker.

    Attributes:
        heard_at: When its last message was received.
        count: The number of operations that it has begun.
        doing: What it is doing, as text.
        mark: The mark of its latest operation.
        doing_since: Since when, by this worker's clock.
        behind_since: Since when it has been behind this worker without progress.
        has_left: Whether it has announced that it is leaving.
        is_gone: Whether its connection has closed.
    """

    heard_at: float
    count: int = 0
    doing: str = "no operation yet"
    mark: str = ""
    doing_since: float = 0.0
    behind_since: float | None = None
    has_left: bool = False
    is_gone: bool = False


class Watch:
    """One worker's knowledge of the others.

    Args:
        names: The workers' names.
        own: The index of this worker.
        limit: The timeout, in seconds, for a worker that is silent or behind.
        now: The time, in seconds.
    """

    def __init__(self, names: Sequence[str], own: int, limit: float, now: float):
        self._names = names
        self._own = own
        self._limit = limit
        self._known = {
            worker: _Known(heard_at=now, doing_since=now)
            for worker in range(len(names))
            if worker != own
        }
        self._looked_at = now
        #: The workers whose latest operations have not been compared yet.
        self._uncompared: set[int] = set()
        #: The other workers' descriptions of their operations, by number.
        self._statements: dict[int, dict[int, str]] = {}

    def hear(self, worker: int, message: Mapping[str, Any] | None, now: float) -> Finding | None:
        """Handles a message of a worker; None: its connection was closed."""
        known = self._known.get(worker)
        if known is None:
            return None
        known.heard_at = now
        wrong = None if message is None else invalid(message, len(self._names))
        if wrong is not None:
            known.has_left = True
            about = f"has sent an invalid message: {wrong}. {self._last_of(known, now)}"
            return self._finding("failed", worker, about)
        kind = "gone" if message is None else message.get("is")
        if kind == "gone":
            known.is_gone = True
            if not known.has_left:
                return self._finding(
                    "died",
                    worker,
                    "has died: its connection was closed without notice (it was killed, or its "
                    f"machine is lost). {self._last_of(known, now)}",
                )
            return None
        assert message is not None
        if kind == "beat":
            if message["count"] != known.count:
                known.behind_since = None
            self._note_progress(worker, message)
            known.doing = message["doing"]
            known.doing_since = now - message["seconds"]
        elif kind == "left":
            known.has_left = True
            self._note_progress(worker, message)
        elif kind == "failed":
            known.has_left = True
            return self._finding(
                "failed", worker, f"has failed: {message['error']}. {self._last_of(known, now)}"
            )
        elif kind == "operation":
            self._statements.setdefault(message["number"], {})[worker] = message["text"]
        elif kind == "finding":
            return Finding(*(message[field] for field in ("kind", "worker", "by", "about")))
        return None

    def _note_progress(self, worker: int, message: Mapping[str, Any]) -> None:
        known = self._known[worker]
        known.count, known.mark = message["count"], message["mark"]
        self._uncompared.add(worker)

    def look(self, count: int, doing: str, now: float) -> Finding | None:
        """Returns a finding if a worker is lost.

        Args:
            count: The number of operations that this worker has begun.
            doing: What it is doing.
            now: The time, in seconds.
        """
        gap = now - self._looked_at
        self._looked_at = now
        if gap > max(self._limit / 2, 4 * BEAT):
            # This process was stopped, so it received no messages.
            for known in self._known.values():
                known.heard_at = now
                known.behind_since = None
            return None
        for worker, known in self._known.items():
            if known.has_left and known.count < count:
                return self._finding(
                    "left",
                    worker,
                    f"has left after {known.count} operations, while {self._names[self._own]} is "
                    f"in {doing}. All workers must take the same number of steps: let none "
                    "return, break out of a loop, or run out of input earlier than the others.",
                )
        present = {w: k for w, k in self._known.items() if not (k.has_left or k.is_gone)}
        hub = self._known.get(0)
        if hub is not None and 0 not in present:
            return None  # it no longer relays any messages
        silent = [w for w, k in present.items() if now - k.heard_at > self._limit]
        if silent:
            # If the first worker is silent, so are all others, whose messages it relays.
            if hub is not None and now - hub.heard_at > self._limit - 2 * BEAT:
                silent = [0]
            known = present[silent[0]]
            return self._finding(
                "silent",
                silent[0],
                f"has sent nothing for {now - known.heard_at:.0f} s: it is stopped, or cannot "
                f"be reached. {self._last_of(known, now)}",
            )
        for known in present.values():
            if known.count >= count:
                known.behind_since = None
            elif known.behind_since is None:
                known.behind_since = now
        late = [
            (known.count, known.behind_since, worker)
            for worker, known in present.items()
            # By its last message: a worker whose messages are not relayed may have caught up.
            if known.behind_since is not None and known.heard_at - known.behind_since > self._limit
        ]
        if late:
            _, since, worker = min(late)
            return self._finding(
                "stuck",
                worker,
                f"has kept {self._names[self._own]} waiting for {now - since:.0f} s in {doing}. "
                f"{self._last_of(self._known[worker], now)}",
            )
        return None

    def late(self) -> list[Late]:
        """Returns the workers that were behind this one at the last `look`."""
        return [
            Late(worker, known.count, known.behind_since, known.doing)
            for worker, known in self._known.items()
            if known.behind_since is not None and not (known.has_left or known.is_gone)
        ]

    def is_first_of(self, count: int) -> bool:
        """Returns whether no worker with a lower index has begun as many operations."""
        return all(
            known.count < count or known.has_left or known.is_gone
            for worker, known in self._known.items()
            if worker < self._own
        )

    def passed(self, count: int, since: float) -> set[int]:
        """Returns the workers that will not reach the point where this one has been since a time.

        They have left, have begun operations that this one has not, or wait for an agreement of
        all about something else.

        Args:
            count: The number of operations that this worker has begun.
            since: The time, in seconds.
        """
        return {
            worker
            for worker, known in self._known.items()
            if known.has_left
            or known.is_gone
            or known.count > count
            or (
                known.doing.startswith(AGREEMENT)
                and known.heard_at > since
                and known.heard_at - known.doing_since > _LONGEST_EXCHANGE
            )
        }

    def compare(self, number: int, own: Operation) -> Finding | None:
        """Compares this worker's operation of a number with the others' descriptions of theirs."""
        for worker, said in self._statements.get(number, {}).items():
            if said != str(own):
                return self._differs(number, worker, said, own)
        return None

    def compare_latest(self, operation_of: Callable[[int], Operation | None]) -> Finding | None:
        """Compares the others' latest operations with this worker's of the same numbers.

        Operations that this worker has not begun yet are kept for the next call.
        """
        for worker in list(self._uncompared):
            known = self._known[worker]
            own = operation_of(known.count)
            if own is None and known.mark:
                continue
            self._uncompared.remove(worker)
            if own is not None and own.mark != known.mark:
                said = self._statements.get(known.count, {}).get(worker, known.mark)
                return self._differs(known.count, worker, said, own)
        return None

    def asked(self) -> list[int]:
        """Returns the numbers of operations that others have compared, or are comparing."""
        return list(self._statements)

    def forget(self, number: int) -> None:
        """Discards the others' descriptions of operations up to a number."""
        for old in [old for old in self._statements if old <= number]:
            del self._statements[old]

    def unheard_of(self, number: int) -> list[int]:
        """Returns the workers that have not described their operation of this number."""
        said = self._statements.get(number, {})
        return [w for w, known in self._known.items() if w not in said and not known.is_gone]

    def has_left(self, worker: int) -> bool:
        """Returns whether a worker has announced that it is leaving."""
        return worker in self._known and self._known[worker].has_left

    def _last_of(self, known: _Known, now: float) -> str:
        return f"Last reported: {known.doing}, for {max(now - known.doing_since, 0):.1f} s."

    def _differs(self, number: int, worker: int, said: str, own: Operation) -> Finding:
        return self._finding(
            "differs",
            worker,
            f"Operation {number}\n  of {self._names[worker]}: {said}\n  of "
            f"{self._names[self._own]}: {own}",
        )

    def _finding(self, kind: str, worker: int, about: str) -> Finding:
        return Finding(kind, worker, self._own, about)
