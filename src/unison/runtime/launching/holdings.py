"""The records that the machines of a job hold in memory: what each says, and what follows from it.

A record is the state of one worker at one step. A worker is known by its index in the job, and by
the number of the job's workers: if that changes, the records of all former workers are needed. All
machines decide from the same list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unison.net.addresses import host_and_port
from unison.net.lines import Message

#: The largest number of workers whose records a machine holds, and of the records of one.
_MOST_WORKERS = 1 << 14
_MOST_RECORDS = 2

#: The steps of workers' records, by their indices in the job.
Steps = Mapping[int, Sequence[int]]


class Holding(NamedTuple):
    """The records that a machine holds.

    Attributes:
        at: The address at which they can be fetched, as host:port.
        rank: The rank that the machine had; None if it holds no records.
        total: The number of the job's workers when they were written.
        steps: The steps of each worker's records, by its index in the job.
        former: Those of a run with another number of workers before: the number, and the steps.
        meetings: The number of the job's meetings, the last of which this machine was in.
    """

    at: str
    rank: int | None
    total: int
    steps: Steps
    former: tuple[int, Steps] | None = None
    meetings: int = 0

    def steps_of(self, total: int) -> Steps:
        """Returns the steps of the records of a job with so many workers, by worker."""
        if total == self.total:
            return self.steps
        return self.former[1] if self.former is not None and self.former[0] == total else {}

    def message(self) -> Message:
        """Returns it as a message.

        Examples:
            >>> holding = Holding("127.0.0.1:4000", 1, 2, {0: [7], 1: [7, 6]})
            >>> holding.message()["records"]
            [[0, [7]], [1, [7, 6]]]
            >>> parsed_holding(holding.message()) == holding
            True
        """
        said: Message = {"at": self.at, "rank": self.rank, "total": self.total}
        said["meetings"] = self.meetings
        if self.former is not None:
            said["former"] = [self.former[0], _entries(self.former[1])]
        return said | {"records": _entries(self.steps)}


def parsed_holding(said: Any) -> Holding | None:
    """Returns what a machine has said; None if it is invalid."""
    if not isinstance(said, dict):
        return None
    at, rank, total, records = (said.get(name) for name in ("at", "rank", "total", "records"))
    former, meetings = said.get("former"), said.get("meetings")
    if (
        not isinstance(at, str)
        or host_and_port(at) is None
        or not (rank is None or _is_number(rank))
        or not (_is_number(total) and _is_number(meetings))
        or not _are_records(records)
        or not (former is None or _is_former(former))
    ):
        return None
    assert isinstance(total, int) and isinstance(records, list) and isinstance(meetings, int)
    before = None if former is None else (former[0], dict(former[1]))
    return Holding(at, rank, total, dict(records), before, meetings)


def current_holdings(holdings: Sequence[Holding]) -> list[Holding]:
    """Returns what counts of what all machines hold.

    A machine that missed a meeting may hold records of steps that the others have done again.

    Examples:
        >>> late = Holding("127.0.0.1:4000", 0, 2, {0: [9]}, meetings=3)
        >>> other = Holding("127.0.0.1:4001", 1, 2, {1: [9]}, meetings=4)
        >>> [holding.steps for holding in current_holdings([late, other])]
        [{}, {1: [9]}]
    """
    latest = max((holding.meetings for holding in holdings), default=0)
    return [
        holding if holding.meetings == latest else Holding(holding.at, None, 0, {})
        for holding in holdings
    ]


def _entries(steps: Steps) -> list[Any]:
    return [[worker, list(of_worker)] for worker, of_worker in steps.items()]


def _is_former(said: Any) -> bool:
    return _is_pair(said) and _is_number(said[0]) and _are_records(said[1])


def _are_records(records: Any) -> bool:
    return (
        isinstance(records, list) and len(records) <= _MOST_WORKERS and all(map(_is_entry, records))
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_entry(entry: Any) -> bool:
    return (
        _is_pair(entry)
        and _is_number(entry[0])
        and isinstance(entry[1], list)
        and len(entry[1]) <= _MOST_RECORDS
        and all(map(_is_number, entry[1]))
    )


class Meeting(NamedTuple):
    """The result of a meeting of all machines.

    Attributes:
        run: A name of the run of the workers that begins, the same on all machines.
        rank: This machine's rank.
        workers: The number of workers of each machine, by rank.
        holdings: The records that each machine holds, by rank.

    Examples:
        >>> held = [Holding(f"127.0.0.1:{4000 + rank}", None, 0, {}) for rank in range(3)]
        >>> met = Meeting("run", 1, [2, 1, 2], held)
        >>> met.total, met.own, met.copied, met.next_at
        (5, range(2, 3), range(0, 2), '127.0.0.1:4002')
    """

    run: str
    rank: int
    workers: Sequence[int]
    holdings: Sequence[Holding]

    @property
    def total(self) -> int:
        """The number of the job's workers."""
        return sum(self.workers)

    @property
    def own(self) -> range:
        """The indices of this machine's workers in the job."""
        return self._workers_of(self.rank)

    @property
    def copied(self) -> range:
        """The indices of the workers whose records this machine keeps copies of."""
        is_alone = len(self.workers) < 2
        return range(0) if is_alone else self._workers_of((self.rank - 1) % len(self.workers))

    @property
    def next_at(self) -> str:
        """The address of the machine that keeps copies of this one's records."""
        return self.holdings[(self.rank + 1) % len(self.workers)].at

    def _workers_of(self, rank: int) -> range:
        start = sum(self.workers[:rank])
        return range(start, start + self.workers[rank])


def newest_common_step(holdings: Sequence[Holding], total: int) -> int | None:
    """Returns the newest step of which every worker's record exists; None if there is none.

    Args:
        holdings: What all machines hold.
        total: The number of the job's workers.

    Examples:
        >>> first = Holding("127.0.0.1:4000", 0, 2, {0: [7, 6]})
        >>> second = Holding("127.0.0.1:4001", 1, 2, {1: [8, 7]})
        >>> newest_common_step([first, second], 2), newest_common_step([first], 2)
        (7, None)
    """
    found: list[set[int]] = [set() for _ in range(total)]
    for holding in holdings:
        for worker, steps in holding.steps_of(total).items():
            if worker < total:
                found[worker].update(steps)
    return max(set.intersection(*found), default=None) if found else None


class HeldState(NamedTuple):
    """A state of which the machines have the records of all workers.

    Attributes:
        step: Its step.
        total: The number of those workers.
    """

    step: int
    total: int


def newest_state(holdings: Sequence[Holding], total: int, may_regroup: bool) -> HeldState | None:
    """Returns the newest state that a job can go on from; None if there is none.

    Args:
        holdings: What all machines hold.
        total: The number of the job's workers.
        may_regroup: Whether it may be the state of another number of them.

    Examples:
        >>> first = Holding("127.0.0.1:4000", 0, 2, {0: [9, 8]}, (3, {0: [7], 1: [7], 2: [7]}))
        >>> newest_state([first], 2, may_regroup=True)
        HeldState(step=7, total=3)
        >>> newest_state([first], 2, may_regroup=False)
    """
    totals = {total}
    if may_regroup:
        totals |= {holding.total for holding in holdings}
        totals |= {holding.former[0] for holding in holdings if holding.former is not None}
    found = [
        HeldState(step, of)
        for of in totals
        if 0 < of <= _MOST_WORKERS and (step := newest_common_step(holdings, of)) is not None
    ]
    return max(found, key=lambda state: (state.step, state.total == total), default=None)


def are_records_held(holdings: Sequence[Holding]) -> bool:
    """Returns whether any machine holds a record."""
    return any(
        steps
        for holding in holdings
        for of_workers in (holding.steps, *(holding.former or ())[1:])
        for steps in of_workers.values()
    )


def ranks(asked: Sequence[int | None]) -> list[int]:
    """Returns the ranks of machines, in their order: those that they ask for, as far as possible.

    Args:
        asked: The rank that each machine asks for; None: any.

    Examples:
        >>> ranks([None, None, None]), ranks([None, 2, 0]), ranks([1, 1, 5])
        ([0, 1, 2], [1, 2, 0], [1, 0, 2])
    """
    given: dict[int, int] = {}
    taken: set[int] = set()
    for machine, rank in enumerate(asked):
        if rank is not None and rank < len(asked) and rank not in taken:
            given[machine] = rank
            taken.add(rank)
    free = (rank for rank in range(len(asked)) if rank not in taken)
    return [given[machine] if machine in given else next(free) for machine in range(len(asked))]
