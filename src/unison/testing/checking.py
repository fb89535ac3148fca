"""Checks the history that the workers of a job have recorded for violations of invariants.

A step of a view is complete when all its members have committed it. The next view begins at the
greatest step of its members; steps that only some of the other members have committed are then
discarded. This is at most one program, the one that was running; it may contain several steps, and
commits without a program (at the end of an epoch) may follow it.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: The records of one process, in order.
Records = Sequence[Mapping[str, Any]]

TWICE = "a step committed twice"
HALF = "a step committed by half a group"
LOST = "a committed step lost"
TWO_GROUPS = "two groups at once"
EXAMPLES = "examples lost or repeated"
STATES = "unequal states"


class Finding(NamedTuple):
    """A violation of an invariant.

    Attributes:
        kind: "a step committed twice", "a step committed by half a group", "a committed step lost",
            "two groups at once", "examples lost or repeated" or "unequal states".
        what: A description.
    """

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def read_history(folder: str | os.PathLike[str]) -> list[list[dict[str, Any]]]:
    """Returns the records of a job's workers, one list per process.

    Args:
        folder: The folder in their environment variable `UNISON_HISTORY`.
    """
    processes = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        lines = path.read_text().split("\n")
        processes.append([json.loads(line) for line in lines[:-1]])  # the last may be incomplete
    return processes


def check(history: str | os.PathLike[str] | Iterable[Records]) -> list[Finding]:
    """Returns the violations of the invariants of elastic jobs in this job.

    Args:
        history: The folder with the workers' records, or the result of `read_history`.

    Examples:
        >>> view = {"is": "view", "view": 1, "members": ["a", "b"], "step": 0}
        >>> a = [view | {"member": "a"}, {"is": "commit", "view": 1, "step": 1},
        ...      {"is": "commit", "view": 1, "step": 2}, {"is": "left", "view": 1, "step": 2}]
        >>> b = [view | {"member": "b"}, {"is": "left", "view": 1, "step": 0}]
        >>> for finding in check([a, b]):
        ...     print(finding)
        a step committed by half a group: view 1: a has come to step 2, and b has left it at step 0
    """
    if isinstance(history, str | os.PathLike):
        history = read_history(history)
    job = _Job([list(records) for records in history])
    found = [
        *job.two_groups(),
        *job.twice(),
        *job.lost(),
        *job.half_groups(),
        *job.unequal_states(),
        *job.miscounted_examples(),
    ]
    return list(dict.fromkeys(found))


class _View:
    """The records of a view.

    Attributes:
        number: Its number.
        members: The members' ids.
        begins: The step with which each member began it; members that were lost may be missing.
        commits: The steps that each has committed in it.
        without_program: Those of them that were committed without having run a program.
        left: The step with which each has left it.
        digests: The digests of each member's state, by step and number of variables.
    """

    def __init__(self, number: int):
        self.number = number
        self.members: tuple[str, ...] = ()
        self.begins: dict[str, int] = {}
        self.commits: dict[str, list[int]] = collections.defaultdict(list)
        self.without_program: set[tuple[str, int]] = set()
        self.left: dict[str, int] = {}
        self.digests: dict[tuple[int, int], dict[str, set[str]]] = collections.defaultdict(
            lambda: collections.defaultdict(set)
        )

    @property
    def base(self) -> int:
        """The step with which it began."""
        return max(self.begins.values(), default=0)

    @property
    def complete(self) -> set[int]:
        """The steps that all members are known to have committed."""
        steps = [set(self.commits[member]) for member in self.members]
        return set.intersection(*steps) if steps else set()

    def programs_after(self, member: str, step: int) -> int:
        """Returns how many programs of a member have taken effect after a step."""
        return sum(
            committed > step and (member, committed) not in self.without_program
            for committed in self.commits[member]
        )


class _Job:
    """The records of all processes of a job."""

    def __init__(self, processes: Sequence[Records]):
        self._processes = processes
        self._found: list[Finding] = []
        self._views: dict[int, _View] = {}
        for records in processes:
            self._take(records)
        self._in_order = [self._views[number] for number in sorted(self._views)]

    def _take(self, records: Records) -> None:
        member = ""
        before: int | None = None
        for record in records:
            what, step, number = record["is"], record.get("step", 0), record.get("view")
            if what == "examples" or number is None:
                continue
            view = self._views.setdefault(number, _View(number))
            if what == "view":
                member = record["member"]
                self._begin(view, record, before)
            elif what == "commit":
                if before is None or step > before:
                    view.commits[member].append(step)
                    if record.get("programs") == 0:
                        view.without_program.add((member, step))
            elif what == "resumed":
                view.begins[member] = step
            elif what == "left":
                view.left[member] = step
            elif what == "state":
                view.digests[step, record["of"]][member].add(record["digest"])
            before = step

    def _begin(self, view: _View, record: Mapping[str, Any], before: int | None) -> None:
        member, members, step = record["member"], tuple(record["members"]), record["step"]
        if view.members and view.members != members:
            what = f"view {view.number} has the members {view.members}, and {members}"
            self._found.append(Finding(TWO_GROUPS, what))
        view.members = members
        view.begins[member] = step
        if before is not None and step != before and not record.get("has_taken_over"):
            what = (
                f"view {view.number}: {member} begins it at step {step} without having got its "
                f"state from another one. It was at step {before}"
            )
            self._found.append(Finding(STATES, what))

    def _pairs(self) -> Iterator[tuple[_View, _View]]:
        """Yields each view with the next one."""
        yield from zip(self._in_order, self._in_order[1:], strict=False)

    def two_groups(self) -> Iterator[Finding]:
        yield from self._found
        for view, following in self._pairs():
            for member, steps in view.commits.items():
                # A single program may have been in flight for some; two show that the group went
                # on.
                if view.programs_after(member, following.base) > 1:
                    yield Finding(
                        TWO_GROUPS,
                        f"{member} has gone on in view {view.number} to step {steps[-1]}, and view "
                        f"{following.number} from step {following.base}",
                    )

    def twice(self) -> Iterator[Finding]:
        by_step = collections.defaultdict(list)
        for view in self._in_order:
            for step in view.complete:
                by_step[step].append(view.number)
        for step, numbers in sorted(by_step.items()):
            if len(numbers) > 1:
                yield Finding(TWICE, f"step {step}, in the views {numbers}")

    def lost(self) -> Iterator[Finding]:
        for view, following in self._pairs():
            for step in sorted(view.complete):
                if step > following.base:
                    yield Finding(
                        LOST,
                        f"step {step} is complete in view {view.number}, and view "
                        f"{following.number} begins at step {following.base}",
                    )
            for member in following.begins:
                steps = view.commits.get(member, [])
                if steps and steps[-1] > following.base:
                    yield Finding(
                        LOST,
                        f"{member} has committed step {steps[-1]} in view {view.number}, and is in "
                        f"view {following.number}, which begins at step {following.base}",
                    )

    def half_groups(self) -> Iterator[Finding]:
        for view in self._in_order:
            is_last = view is self._in_order[-1] and set(view.left) == set(view.members)
            may_differ = 0 if is_last else 1
            for other, left in view.left.items():
                for member, steps in view.commits.items():
                    if view.programs_after(member, left) > may_differ:
                        yield Finding(
                            HALF,
                            f"view {view.number}: {member} has come to step {steps[-1]}, and "
                            f"{other} has left it at step {left}",
                        )
            for member, steps in view.commits.items():
                for other, others in view.commits.items():
                    for step in steps:
                        if step not in others and others[:1] < [step] < others[-1:]:
                            yield Finding(
                                HALF,
                                f"view {view.number}: {member} has committed step {step}, and "
                                f"{other} has gone past it",
                            )
            if len(set(view.begins.values())) > 1:
                what = f"view {view.number} is begun with the steps {view.begins}"
                yield Finding(STATES, what)

    def unequal_states(self) -> Iterator[Finding]:
        limits = {view.number: following.base for view, following in self._pairs()}
        for view in self._in_order:
            for (step, _), digests in sorted(view.digests.items()):
                if step > limits.get(view.number, step):
                    continue  # it was discarded
                first, *others = sorted(digests)
                for other in others:
                    if digests[other].isdisjoint(digests[first]):
                        yield Finding(
                            STATES,
                            f"view {view.number}: after step {step}, {first} has "
                            f"{sorted(digests[first])}, and {other} {sorted(digests[other])}",
                        )

    def miscounted_examples(self) -> Iterator[Finding]:
        for records in self._processes:
            for record in records:
                if record["is"] != "examples":
                    continue
                due = record["epoch"] + 1
                for words, ids in (
                    ("lost", [i for i, count in enumerate(record["seen"]) if count < due]),
                    ("repeated", [i for i, count in enumerate(record["seen"]) if count > due]),
                ):
                    if ids:
                        shown = ", ".join(map(str, ids[:10])) + (", ..." if ids[10:] else "")
                        yield Finding(
                            EXAMPLES,
                            f"by the end of epoch {record['epoch']}, {len(ids)} of "
                            f"{len(record['seen'])} are {words}: {shown}",
                        )
