"""One iteration of a job: who computes what, and when it is complete. Decisions only, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unison.data.service.configuration import ShardingPolicy

#: A split is at most this part of the rest of a source, for each worker: the last ones are small,
#: so that all workers end at about the same time.
_PARTS_OF_REST = 4

#: The rounds of coordinated reads that are assigned to workers together.
ROUNDS_OF_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """The properties of a job on which all its consumers must agree.

    Attributes:
        dataset: The id of the dataset.
        description: The dataset's plan in one line.
        policy: The division between the workers.
        num_consumers: The number of coordinated consumers; None: first come, first served.
        is_shared: Whether elements are kept for several trainers.
    """

    dataset: str
    description: str
    policy: ShardingPolicy
    num_consumers: int | None = None
    is_shared: bool = False

    def difference_to(self, other: JobSpec) -> str | None:
        """Returns what differs from another spec, in words; None if nothing does.

        Equal pipelines that were registered separately are equal.
        """
        for name in ("description", "policy", "num_consumers", "is_shared"):
            own, theirs = getattr(self, name), getattr(other, name)
            if own != theirs:
                return f"Expected {name} {own!r}. Received: {theirs!r}"
        return None


class Iteration:
    """One iteration of a job.

    Args:
        number: Its number.
        job: The name of the job.
        index: The number of the iteration of this job.
        spec: The job.
        split_sizes: The number of rows of each source, under dynamic sharding.
        num_places: The number of shares, under static sharding.
    """

    def __init__(
        self,
        number: int,
        job: str,
        index: int,
        spec: JobSpec,
        split_sizes: Sequence[int],
        num_places: int,
    ):
        self.number = number
        self.job = job
        self.index = index
        self.spec = spec
        self._split_sizes = split_sizes
        self._num_places = num_places
        #: The next row of each source in each of its repetitions.
        self._cursors: dict[tuple[int, int], int] = {}
        #: Whether there will be no further elements; it stays so.
        self.is_complete = False
        #: The workers whose task has ended, with their places.
        self._ended: dict[str, int | None] = {}
        #: The number of the latest request of each worker, and the rows that it got.
        self._latest: dict[str, tuple[int, tuple[int, int]]] = {}
        #: The workers that serve each block of rounds.
        self._blocks: dict[int, list[str]] = {}
        #: The time at which each consumer was heard last, and since which there has been none.
        self.consumers: dict[str, float] = {}
        self.idle_since: float | None = None

    # -- splits ----------------------------------------------------------------------------

    def next_split(
        self, source: int, repetition: int, most: int, num_workers: int
    ) -> tuple[int, int] | None:
        """Returns the next rows of a source; None if all have been handed out.

        Args:
            source: The number of the source.
            repetition: The number of the pass over it.
            most: The most rows.
            num_workers: The number of workers.

        Raises:
            IndexError: There is no such source.
        """
        size = self._split_sizes[source]
        begin = self._cursors.get((source, repetition), 0)
        if begin >= size:
            return None
        # One worker has nobody to end at the same time with.
        parts = _PARTS_OF_REST * num_workers if num_workers > 1 else 1
        share = -(-(size - begin) // parts)
        return begin, begin + max(min(most, share), 1)

    def answer_to(self, worker: str, request: int) -> tuple[int, int] | None:
        """Returns the rows of a worker's latest request, if it repeats that one: the answer was
        lost with a connection, or with the dispatcher.
        """
        latest, rows = self._latest.get(worker, (-1, (0, 0)))
        return rows if latest == request else None

    def note_split(
        self, source: int, repetition: int, rows: tuple[int, int], worker: str, request: int
    ) -> None:
        """Records that rows have been handed out to a worker."""
        key = (source, repetition)
        self._cursors[key] = max(self._cursors.get(key, 0), rows[1])
        self._latest[worker] = request, rows

    # -- tasks -----------------------------------------------------------------------------

    def note_ended(self, worker: str, place: int | None) -> None:
        """Records that a worker's task has no elements left."""
        self._ended[worker] = place

    def has_ended_for(self, worker: str, place: int | None) -> bool:
        """Whether a worker's task has no elements left: its own, or that of an earlier worker which
        had the same static share.
        """
        if worker in self._ended:
            return True
        return self.spec.policy.is_static and place is not None and place in self._ended.values()

    def completes_with(self, present: Iterable[str]) -> bool:
        """Whether there will be no further elements if these workers are present.

        - Static shares: every share has ended. That of a lost worker begins again elsewhere.
        - Otherwise: the tasks of all present workers have ended, and at least one. What a lost
          worker had been given under dynamic sharding is not given to another one.

        Args:
            present: The workers that are not lost.
        """
        if self.spec.policy.is_static:
            return len(set(self._ended.values()) - {None}) >= self._num_places
        return bool(self._ended) and all(worker in self._ended for worker in present)

    # -- rounds ----------------------------------------------------------------------------

    def workers_of_block(self, block: int) -> list[str] | None:
        """Returns the workers of a block of rounds, one after the other; None if not assigned."""
        return self._blocks.get(block)

    def assign_block(self, block: int, workers: Sequence[str]) -> None:
        """Assigns a block of rounds to workers."""
        self._blocks[block] = list(workers)

    def without_lost(
        self, workers: Sequence[str], lost: Iterable[str], present: Sequence[str]
    ) -> list[str]:
        """Returns a block's workers, with present ones in the places of those that are lost."""
        gone = set(lost)
        return [
            present[place % len(present)] if worker in gone and present else worker
            for place, worker in enumerate(workers)
        ]


def worker_of_round(workers: Sequence[str], number: int) -> str:
    """Returns the worker that serves a round.

    Examples:
        >>> [worker_of_round(["a", "b"], number) for number in range(4)]
        ['a', 'b', 'a', 'b']
    """
    return workers[number % len(workers)]


def described_spec(spec: JobSpec) -> dict[str, Any]:
    """Returns a spec as JSON."""
    return {**dataclasses.asdict(spec), "policy": int(spec.policy)}


def spec_of(described: Mapping[str, Any]) -> JobSpec:
    """Returns the spec that `described_spec` has converted to JSON.

    Raises:
        ValueError, KeyError, TypeError: It is not one.
    """
    consumers = described["num_consumers"]
    return JobSpec(
        str(described["dataset"]),
        str(described["description"]),
        ShardingPolicy(int(described["policy"])),
        None if consumers is None else int(consumers),
        bool(described["is_shared"]),
    )
