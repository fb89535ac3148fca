"""Agreement between workers that run the same program, on what only one of them knows.

Each worker publishes its value and reads the values of all others. All workers compute the same
keys from the order of their calls, so every worker must run the same program: they ask the same
questions in the same order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from unison.errors import AbortedError, DeadlineExceededError

#: Seconds that a worker waits for the others.
PATIENCE = 600.0

#: The number of a worker's answers that are deleted together.
_QUESTIONS_A_FOLDER = 64

#: Seconds between a waiting worker's checks of whether to keep waiting.
_LOOK_AFTER = 0.5


class Codec(NamedTuple):
    """The serialization of answers."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


#: Values that JSON can represent; a tuple is read back as a list.
AS_JSON = Codec(lambda answer: json.dumps(answer).encode(), json.loads)


class Workers:
    """A worker's position among all workers; this base class is that of a single worker."""

    #: Whether the number of workers, and the index of this one, may change.
    may_change = False
    #: The number of processes that count as this worker.
    team_size = 1

    def __init__(self) -> None:
        #: The number of workers.
        self.num_workers = 1
        #: The index of this worker.
        self.index = 0

    @property
    def are_several(self) -> bool:
        """Whether they are several processes, even if these count as one worker."""
        return self.num_workers * self.team_size > 1

    def talk(self, matter: str) -> Talk:
        """Returns the `Talk` in which the workers agree on `matter`, one question at a time.

        The n-th talk about a matter on one worker is matched with the n-th on the others.
        """
        del matter
        return Talk()

    def talk_in_team(self, matter: str) -> Talk:
        """Returns the `Talk` of the workers that count as this one: it is alone, as a rule."""
        del matter
        return Talk()


class Talk:
    """Questions that all workers answer in the same order; here, those of a single worker."""

    def ask(self, answer: Any) -> Sequence[Any]:
        """Gives this worker's answer to the next question, and returns everyone's, in order.

        Raises:
            DeadlineExceededError: A worker has not answered.
            UnavailableError: A worker is lost.
            AbortedError: A worker has failed.
        """
        return [answer]

    def fail(self, reason: str) -> None:
        """Answers the next question with the message that this worker cannot continue.

        Args:
            reason: Where and why, as the other workers report it: "in its input: ...".
        """
        del reason

    def leave(self) -> None:
        """Ends the wait for the others, in any thread: the answers are no longer needed."""


class Store(Protocol):
    """A store that all workers share; see `unison.runtime.coordination.CoordinationStore`."""

    def put(self, key: str, value: bytes) -> None:
        """Stores a value under a key that has none."""
        ...

    def get(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key; None if there is none within `seconds`."""
        ...

    def remove_all(self, folder: str) -> None:
        """Deletes the values of all keys that begin with `folder` and a slash."""
        ...

    def lost(self, worker: int) -> Exception | None:
        """Returns the error to raise for a worker that will put nothing more, else None."""
        ...


class MemoryStore:
    """A store for workers that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def remove_all(self, folder: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(f"{folder}/")]:
                del self._values[key]

    def lost(self, worker: int) -> Exception | None:
        """Returns None: a thread is not lost as long as its process runs."""
        del worker
        return None

    def __len__(self) -> int:
        return len(self._values)


class ConnectedWorkers(Workers):
    """A worker's position among those that share a store.

    Args:
        num_workers: The number of workers.
        index: The index of this worker.
        store: The store that they share. Two groups of workers that use the same store need
            different names.
        name: The group's name in the store.
        patience: Seconds that a worker waits for the others.
        codec: How answers are serialized.

    Raises:
        ValueError: There is no such worker.
    """

    def __init__(
        self,
        num_workers: int,
        index: int,
        store: Store,
        name: str,
        patience: float = PATIENCE,
        codec: Codec = AS_JSON,
    ):
        super().__init__()
        if not 0 <= index < num_workers:
            raise ValueError(
                f"Expected an index from 0 to {num_workers - 1}, as there are {num_workers} "
                f"workers. Received: {index}"
            )
        self.num_workers = num_workers
        self.index = index
        self._store = store
        self._name = name
        self._patience = patience
        self._codec = codec
        self._talks: dict[str, int] = {}
        self._lock = threading.Lock()

    def talk(self, matter: str) -> Talk:
        with self._lock:
            number = self._talks.get(matter, 0)
            self._talks[matter] = number + 1
        prefix = f"unison/{self._name}/{matter}/{number}"
        return _ConnectedTalk(self, self._store, prefix, self._patience, self._codec)


class TeamsOfWorkers(Workers):
    """A worker's team among those into which workers are divided: each team counts as one worker.

    Its members give the same answers; that of the first one counts.

    Args:
        workers: The workers; those of a team are consecutive.
        size: The number of workers in a team.
    """

    def __init__(self, workers: Workers, size: int):
        super().__init__()
        self.num_workers = workers.num_workers // size
        self.index = workers.index // size
        self.team_size = size
        self._workers = workers

    def talk(self, matter: str) -> Talk:
        return _PartOfTalk(self._workers.talk(matter), slice(None, None, self.team_size))

    def talk_in_team(self, matter: str) -> Talk:
        first = self.index * self.team_size
        talk = self._workers.talk(f"{matter} in a team")  # in which all workers take part
        return _PartOfTalk(talk, slice(first, first + self.team_size))


class _PartOfTalk(Talk):
    """A talk of which the answers of some workers count.

    Args:
        talk: The talk.
        counts: Those workers.
    """

    def __init__(self, talk: Talk, counts: slice):
        self._talk = talk
        self._counts = counts

    def ask(self, answer: Any) -> Sequence[Any]:
        return self._talk.ask(answer)[self._counts]

    def fail(self, reason: str) -> None:
        self._talk.fail(reason)

    def leave(self) -> None:
        self._talk.leave()


class _ConnectedTalk(Talk):
    def __init__(self, workers: Workers, store: Store, prefix: str, patience: float, codec: Codec):
        self._workers = workers
        self._codec = codec
        self._store = store
        self._prefix = prefix
        self._patience = patience
        self._question = 0
        self._has_left = threading.Event()

    def ask(self, answer: Any) -> Sequence[Any]:
        own = self._workers.index
        self._answer({"answer": answer})
        deadline = time.monotonic() + self._patience
        answers = [
            answer if worker == own else self._answer_of(worker, deadline)
            for worker in range(self._workers.num_workers)
        ]
        if self._question and self._question % _QUESTIONS_A_FOLDER == 0:
            # All have answered this question, so all have read the answers to those before.
            self._store.remove_all(self._folder(self._question - 1, own))
        self._question += 1
        return answers

    def fail(self, reason: str) -> None:
        self._answer({"failed": reason})

    def leave(self) -> None:
        self._has_left.set()

    def _answer(self, answer: Any) -> None:
        self._store.put(self._key(self._question, self._workers.index), self._codec.pack(answer))

    def _answer_of(self, worker: int, deadline: float) -> Any:
        key = self._key(self._question, worker)
        while True:
            # Checked before reading: what the worker put before it was lost can still be read.
            error = self._store.lost(worker)
            if (said := self._store.get(key, _LOOK_AFTER)) is not None:
                break
            if error is not None:
                raise error
            if self._has_left.is_set():
                raise AbortedError(message="This worker no longer waits for the others.")
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    message=f"Timed out: worker {worker} of {self._workers.num_workers} has not "
                    f"reached the same point within {self._patience:g} s ({key}). It has ended, "
                    "is stuck, or runs a different program: all workers must make the same values "
                    "and distributed datasets, and iterate over these as often."
                )
        answer = self._codec.unpack(said)
        if "failed" in answer:
            raise AbortedError(
                message=f"Worker {worker} of {self._workers.num_workers} failed {answer['failed']}"
            )
        return answer["answer"]

    def _key(self, question: int, worker: int) -> str:
        return f"{self._folder(question, worker)}/{question}"

    def _folder(self, question: int, worker: int) -> str:
        return f"{self._prefix}/worker{worker}/{question // _QUESTIONS_A_FOLDER}"
