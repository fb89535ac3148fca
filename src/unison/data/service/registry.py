"""All that a dispatcher knows: datasets, workers, jobs. Decisions only, without sockets or threads.

What has to survive a restart is an event, which is recorded before it is applied; applying the
recorded events to a new registry gives the same one. Of workers, only the numbers are recorded:
they register again, and nothing is complete before they have had time for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import reprlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from unison.data.service.configuration import ShardingPolicy, place_in_list
from unison.data.service.iterations import (
    ROUNDS_OF_BLOCK,
    Iteration,
    JobSpec,
    described_spec,
    spec_of,
)
from unison.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

#: A change of the registry.
Event = dict[str, Any]

#: Shows the beginning and the end of a long id.
_shown = reprlib.Repr()
_shown.maxstring = 200

#: The events that workers and consumers wait for.
_AWAITED = ("iteration", "ended", "complete", "removed")

#: Seconds for which a worker whose connection is closed may connect again before it is lost, and
#: for which workers are awaited after a restart.
RECONNECTION_SECONDS = 1.0
_SECONDS_AFTER_RESTART = 5.0

#: Seconds after which a consumer that has not been heard is gone.
_CONSUMER_SECONDS = 30.0


@dataclasses.dataclass
class RegisteredDataset:
    """A dataset.

    Attributes:
        id: Its id.
        about: What was said of it: description, signature, split_sizes, split_error, cardinality.
        payload: Its signed pickle.
    """

    id: str
    about: dict[str, Any]
    payload: bytes


@dataclasses.dataclass
class Worker:
    """A worker that has registered.

    Attributes:
        id: Its id, which a restarted process does not have.
        address: Where it is reached.
        number: Its number, in the order in which workers registered.
        place: Its place in the list of workers of static sharding.
        heard: When it was heard last.
        closed: When its connection was closed; None if it is open.
    """

    id: str
    address: str
    number: int
    place: int | None
    heard: float
    closed: float | None = None


class Registry:
    """The state of a dispatcher.

    Args:
        worker_addresses: The workers of static sharding.
        now: The current time, in seconds.
        record: Called with each event, and bytes that belong to it, before it is applied.
        worker_timeout: Seconds without a heartbeat after which a worker is lost.
        job_timeout: Seconds without consumers after which a job is removed; negative: never.
    """

    def __init__(
        self,
        worker_addresses: Sequence[str],
        now: float,
        record: Callable[[Event, bytes], None] = lambda event, payload: None,
        worker_timeout: float = 60.0,
        job_timeout: float = 300.0,
    ):
        self._listed = tuple(worker_addresses)
        self._started = now
        self._record = record
        self._worker_timeout = worker_timeout
        self._job_timeout = job_timeout
        self._datasets: dict[str, RegisteredDataset] = {}
        self.workers: dict[str, Worker] = {}
        self._iterations: dict[int, Iteration] = {}
        self._by_name: dict[tuple[str, int], int] = {}
        #: Random, so that a dispatcher without the journal of an earlier one does not give its
        #: numbers to other jobs: workers and consumers may still have them. With the journal, the
        #: numbers go on.
        self._next_iteration = secrets.randbits(40) << 16
        self._next_worker = 0
        #: The numbers of workers that were present before a restart, and have not registered since.
        self._awaited: set[int] = set()
        #: Counts the changes that consumers and workers wait for.
        self.version = 0

    def apply(self, event: Event, payload: bytes = b"") -> None:
        """Applies a recorded event.

        Raises:
            ValueError, KeyError, TypeError, IndexError: It is not an event.
        """
        getattr(self, f"_apply_{event['event']}")(event, payload)

    def _happen(self, event: Event, payload: bytes = b"") -> None:
        self._record(event, payload)
        self.apply(event, payload)
        if event["event"] in _AWAITED:
            self.version += 1

    # -- datasets --------------------------------------------------------------------------

    def register_dataset(self, about: dict[str, Any], payload: bytes, given: str | None) -> str:
        """Returns the id of a dataset; an equal one, or one with the given id, is used again."""
        found = given or hashlib.sha256(payload).hexdigest()[:32]
        if found not in self._datasets:
            self._happen({"event": "dataset", "id": found, "about": about}, payload)
        return found

    def _apply_dataset(self, event: Event, payload: bytes) -> None:
        self._datasets[event["id"]] = RegisteredDataset(event["id"], event["about"], payload)

    def dataset(self, dataset_id: str) -> RegisteredDataset:
        """Returns a dataset.

        Raises:
            NotFoundError: It is not registered.
        """
        if dataset_id not in self._datasets:
            raise NotFoundError(
                message=f"Dataset {_shown.repr(dataset_id)} is not registered with this "
                "dispatcher. Call register_dataset first; without fault_tolerant_mode, a "
                "dispatcher that restarts has forgotten all datasets."
            )
        return self._datasets[dataset_id]

    # -- workers ---------------------------------------------------------------------------

    def hear_worker(self, worker_id: str, address: str, number: int | None, now: float) -> Worker:
        """Records a worker's heartbeat, and returns the worker.

        Args:
            worker_id: Its id.
            address: Where it is reached.
            number: The number that it has, from this dispatcher or the one before.
            now: The current time.
        """
        known = self.workers.get(worker_id)
        if known is not None:
            known.heard, known.closed = now, None
            return known
        for other in [each for each in self.workers.values() if each.address == address]:
            self._lose(other)  # a new process has taken its place
        if number is None:
            number = self._next_worker
        if number not in self._awaited:
            self._happen({"event": "worker", "number": number})
        taken = {each.place for each in self.workers.values() if each.place is not None}
        place = place_in_list(address, self._listed, taken)
        self._awaited.discard(number)
        worker = Worker(worker_id, address, number, place, now)
        self.workers[worker_id] = worker
        self.version += 1
        return worker

    def _apply_worker(self, event: Event, payload: bytes) -> None:
        del payload
        self._next_worker = max(self._next_worker, int(event["number"]) + 1)
        self._awaited.add(int(event["number"]))

    def _apply_lost(self, event: Event, payload: bytes) -> None:
        del payload
        self._awaited.discard(int(event["number"]))

    def close_worker(self, worker_id: str, now: float) -> None:
        """Records that the connection of a worker is closed."""
        if worker_id in self.workers:
            self.workers[worker_id].closed = now

    def leave_worker(self, worker_id: str) -> None:
        """Removes a worker that has stopped."""
        if worker_id in self.workers:
            self._lose(self.workers[worker_id])

    def _lose(self, worker: Worker) -> None:
        self._happen({"event": "lost", "number": worker.number})
        del self.workers[worker.id]
        self.version += 1
        self._note_complete()

    def tasks_of(self, worker: Worker) -> dict[int, dict[str, Any]]:
        """Returns what a worker has to compute: a description for each iteration."""
        tasks = {}
        for number, iteration in self._iterations.items():
            if iteration.has_ended_for(worker.id, worker.place) or iteration.is_complete:
                continue
            if not iteration.spec.policy.is_static or worker.place is not None:
                tasks[number] = {
                    **described_spec(iteration.spec),
                    "index": iteration.index,
                    "place": worker.place,
                    "num_places": len(self._listed),
                }
        return tasks

    def ended_of(self, worker: Worker) -> list[int]:
        """Returns the iterations that go on, but have no elements of a worker left."""
        return [
            number
            for number, iteration in self._iterations.items()
            if not iteration.is_complete and iteration.has_ended_for(worker.id, worker.place)
        ]

    def end_tasks(self, worker: Worker, numbers: Sequence[int]) -> None:
        """Records that a worker's tasks have no elements left."""
        for number in numbers:
            iteration = self._iterations.get(number)
            if iteration is not None and not iteration.has_ended_for(worker.id, worker.place):
                event = {"event": "ended", "number": number, "worker": worker.id}
                self._happen({**event, "place": worker.place})
        self._note_complete()

    def _apply_ended(self, event: Event, payload: bytes) -> None:
        del payload
        iteration = self._iterations.get(int(event["number"]))
        if iteration is not None:
            iteration.note_ended(str(event["worker"]), event["place"])

    def _note_complete(self) -> None:
        if self._awaited:
            return  # they may have elements; `expire` ends the wait
        present = self._present()
        for number, iteration in self._iterations.items():
            if not iteration.is_complete and iteration.completes_with(present):
                self._happen({"event": "complete", "number": number})

    def _apply_complete(self, event: Event, payload: bytes) -> None:
        del payload
        self._iterations[int(event["number"])].is_complete = True

    def _present(self) -> list[str]:
        return sorted(self.workers, key=lambda each: self.workers[each].number)

    # -- jobs ------------------------------------------------------------------------------

    def join(self, consumer: str, job: str, index: int, spec: JobSpec, now: float) -> Iteration:
        """Returns an iteration of a job for a consumer, the first of whom creates it.

        Raises:
            NotFoundError: The dataset is not registered.
            InvalidArgumentError: The job is another one; the dataset cannot be divided.
            FailedPreconditionError: Static sharding without a list of workers.
        """
        number = self._by_name.get((job, index))
        if number is None:
            dataset = self.dataset(spec.dataset)
            if spec.policy is ShardingPolicy.DYNAMIC and dataset.about["split_error"]:
                raise InvalidArgumentError(message=str(dataset.about["split_error"]))
            if spec.policy.is_static and not self._listed:
                raise FailedPreconditionError(
                    message=f"ShardingPolicy.{spec.policy.name} divides a dataset between a fixed "
                    "list of workers. Expected worker_addresses in the DispatcherConfig. Received: "
                    "none. Use ShardingPolicy.DYNAMIC for workers that may change."
                )
            number = self._next_iteration
            described = described_spec(spec)
            event = {"event": "iteration", "number": number, "job": job, "index": index}
            self._happen({**event, "spec": described})
        iteration = self._iterations[number]
        difference = iteration.spec.difference_to(spec)
        if difference is not None:
            raise InvalidArgumentError(
                message=f"Job {job!r} exists with other parameters. {difference}. Give datasets "
                "that are not the same another job_name."
            )
        iteration.consumers[consumer] = now
        iteration.idle_since = None
        return iteration

    def _apply_iteration(self, event: Event, payload: bytes) -> None:
        del payload
        number, job, index = int(event["number"]), str(event["job"]), int(event["index"])
        spec = spec_of(event["spec"])
        sizes = self.dataset(spec.dataset).about["split_sizes"] or ()
        made = Iteration(number, job, index, spec, sizes, len(self._listed))
        self._iterations[number] = made
        made.idle_since = self._started
        self._by_name[job, index] = number
        self._next_iteration = number + 1

    def iteration(self, number: int) -> Iteration:
        """Returns an iteration.

        Raises:
            NotFoundError: It has been removed.
        """
        if number not in self._iterations:
            raise NotFoundError(
                message=f"Iteration {number} of the input service does not exist: the dispatcher "
                "has restarted without fault_tolerant_mode, or nobody has read the job for "
                f"{self._job_timeout:g} s. Begin a new iteration over the dataset."
            )
        return self._iterations[number]

    def hear_consumer(self, number: int, consumer: str, now: float) -> dict[str, Any]:
        """Records a consumer's heartbeat; returns the workers to read from, and the state."""
        iteration = self.iteration(number)
        iteration.consumers[consumer] = now
        iteration.idle_since = None
        present = self._present()
        is_static = iteration.spec.policy.is_static
        workers = [self.workers[each] for each in present]
        return {
            "workers": {
                each.id: each.address for each in workers if not is_static or each.place is not None
            },
            "is_complete": iteration.is_complete,
            "version": self.version,
        }

    def release(self, number: int, consumer: str, now: float) -> None:
        """Removes a consumer."""
        iteration = self._iterations.get(number)
        if iteration is not None:
            iteration.consumers.pop(consumer, None)
            if not iteration.consumers:
                iteration.idle_since = now
                if iteration.job.startswith(ANONYMOUS):
                    self._happen({"event": "removed", "number": number})

    def _apply_removed(self, event: Event, payload: bytes) -> None:
        del payload
        iteration = self._iterations.pop(int(event["number"]))
        del self._by_name[iteration.job, iteration.index]

    # -- splits and rounds -----------------------------------------------------------------

    def hand_out(
        self, number: int, source: int, repetition: int, most: int, worker: str, request: int
    ) -> tuple[int, int] | None:
        """Returns rows of a source for a worker; None if all have been handed out.

        Args:
            number: The iteration.
            source: The number of the source.
            repetition: The number of the pass over it.
            most: The most rows.
            worker: The worker's id.
            request: The number of the worker's request, by which a repeated one is recognized.

        Raises:
            NotFoundError: The iteration has been removed.
        """
        iteration = self.iteration(number)
        again = iteration.answer_to(worker, request)
        if again is not None:
            return again
        found = iteration.next_split(source, repetition, most, len(self.workers))
        if found is not None:
            self._happen(
                {
                    "event": "split",
                    "number": number,
                    "source": source,
                    "repetition": repetition,
                    "rows": found,
                    "worker": worker,
                    "request": request,
                }
            )
        return found

    def _apply_split(self, event: Event, payload: bytes) -> None:
        del payload
        iteration = self._iterations[int(event["number"])]
        begin, end = event["rows"]
        iteration.note_split(
            int(event["source"]),
            int(event["repetition"]),
            (int(begin), int(end)),
            str(event["worker"]),
            int(event["request"]),
        )

    def workers_of_round(self, number: int, round_number: int, now: float) -> list[str]:
        """Returns the workers that serve the block of a round, by turns; empty if there are none.

        Raises:
            NotFoundError: The iteration has been removed.
        """
        iteration = self.iteration(number)
        block = round_number // ROUNDS_OF_BLOCK
        present = self._present()
        assigned = iteration.workers_of_block(block)
        workers = present if assigned is None else assigned
        if now - self._started > _SECONDS_AFTER_RESTART or assigned is None:
            lost = set(workers) - set(present)
            workers = iteration.without_lost(workers, lost, present)
        if workers and workers != assigned:
            self._happen({"event": "block", "number": number, "block": block, "workers": workers})
        return workers

    def _apply_block(self, event: Event, payload: bytes) -> None:
        del payload
        iteration = self._iterations[int(event["number"])]
        iteration.assign_block(int(event["block"]), [str(each) for each in event["workers"]])

    # -- time ------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Removes workers that are lost, and iterations that nobody reads."""
        if now - self._started > self._worker_timeout:
            self._awaited.clear()
        for worker in list(self.workers.values()):
            is_gone = worker.closed is not None and now - worker.closed > RECONNECTION_SECONDS
            if is_gone or now - worker.heard > self._worker_timeout:
                self._lose(worker)
        for iteration in list(self._iterations.values()):
            for consumer, heard in list(iteration.consumers.items()):
                if now - heard > _CONSUMER_SECONDS:
                    del iteration.consumers[consumer]
            if not iteration.consumers and iteration.idle_since is None:
                iteration.idle_since = now
            timeout = self._job_timeout
            if iteration.job.startswith(ANONYMOUS):
                timeout = _CONSUMER_SECONDS
            elif iteration.is_complete:
                continue  # a program that comes late does not get all elements again
            if iteration.idle_since is not None and 0 <= timeout < now - iteration.idle_since:
                self._happen({"event": "removed", "number": iteration.number})
        self._note_complete()


#: The beginning of the names of jobs that one consumer reads alone.
ANONYMOUS = "anonymous/"
