"""The states of which a job's hosts have records, and the latest one that its workers can restore.

Each worker reads the records of its host. Where as many workers go on as have written a state, each
needs its own record, and that of the first worker of the host on which it was written. Otherwise
each needs the records of all.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from unison.runtime import process_group
from unison.runtime.host_memory import WorkerMemory
from unison.storage.memory_slots import Record
from unison.train.record_archive import RecordArchive, RegroupedArchive, about_record


class FoundState(NamedTuple):
    """A state that this worker can restore.

    Attributes:
        step: Its step.
        workers: The number of workers that have written it.
        records: The records that are on this host, by the index of their worker.
    """

    step: int
    workers: int
    records: dict[int, Record]

    @property
    def about(self) -> dict[str, Any]:
        """Returns what the writers have told; see `about_record`."""
        return about_record(self._base)

    def archive(self) -> RecordArchive:
        """Returns it as a checkpoint for this worker.

        Raises:
            DataLossError: A record is corrupt.
        """
        if self.workers == process_group.count():
            return RecordArchive(self._base, self.records[self.about["first"]])
        return RegroupedArchive([self.records[i] for i in range(self.workers)], self._place)

    @property
    def is_complete(self) -> bool:
        """Whether the records on this host suffice for this worker."""
        if self.workers != process_group.count():
            return self.records.keys() >= set(range(self.workers))
        return self._place in self.records and self.about["first"] in self.records

    @property
    def _place(self) -> int:
        """The worker whose objects this one gets: itself, if there was one with its index."""
        own = process_group.index()
        return own if own < self.workers else 0

    @property
    def _base(self) -> Record:
        return self.records[self._place]


@contextlib.contextmanager
def latest_state(memory: WorkerMemory) -> Iterator[FoundState | None]:
    """Yields the latest state that all workers can restore; all of them call this.

    Args:
        memory: The memory of this worker's host. The records are mapped inside only.

    Raises:
        DataLossError: The header of a record is corrupt.
    """
    with contextlib.ExitStack() as mapped:
        found: dict[tuple[int, int], dict[int, Record]] = collections.defaultdict(dict)
        for slots in (*memory.slots, *memory.former):
            for record in mapped.enter_context(slots.records()):
                about = about_record(record)
                found[record.step, about["workers"]][about["worker"]] = record
        states = {
            key: state
            for key, records in found.items()
            if (state := FoundState(*key, records)).is_complete
        }
        told = process_group.all_gather_json([*states], "The checkpoints in memory")
        common = set(states).intersection(*(map(tuple, each) for each in told))
        yield states[max(common)] if common else None
