"""Workers that run the same program, and how they agree about what only one of them knows.

Each worker says what it has, and learns what all have said. It says it under a key that all of
them compute from what they do, so programs must be the same on every worker: they ask the same
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

#: How many answers of a worker are forgotten at once.
_QUESTIONS_A_FOLDER = 64

#: Seconds after which a waiting worker looks whether it is still to wait.
_LOOK_AFTER = 0.5


class Codec(NamedTuple):
    """How answers are written and read."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


#: What JSON can say; a tuple comes back as a list.
AS_JSON = Codec(lambda answer: json.dumps(answer).encode(), json.loads)


class Workers:
    """A worker's place among all; by itself, the only one."""

    def __init__(self) -> None:
        #: How many there are.
        self.num_workers = 1
        #: Which of them this is.
        self.index = 0

    def talk(self, matter: str) -> Talk:
        """Returns where the workers agree about `matter`, one question after the other.

        The first talk about a matter of one worker is that of the first of the others, and so on.
        """
        del matter
        return Talk()


class Talk:
    """Questions that all workers answer, in one order; by itself, those of one worker."""

    def ask(self, answer: Any) -> Sequence[Any]:
        """Gives this worker's answer to the next question, and returns those of all, in order.

        Raises:
            DeadlineExceededError: A worker has not answered.
            UnavailableError: A worker is lost.
            AbortedError: A worker has failed.
        """
        return [answer]

    def fail(self, reason: str) -> None:
        """Answers the next question by the word that this worker cannot go on.

        Args:
            reason: Where, and what happened, as others are told it: "in its input: ...".
        """
        del reason

    def leave(self) -> None:
        """Ends the waiting for the others, in whichever thread: nobody wants the answers."""


class Store(Protocol):
    """Values that all workers see; see `unison.runtime.coordination.CoordinationStore`."""

    def put(self, key: str, value: bytes) -> None:
        """Keeps a value under a key that has none."""
        ...

    def get(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key; None if there is none within `seconds`."""
        ...

    def remove_all(self, folder: str) -> None:
        """Forgets the values of all keys that begin with `folder` and a slash."""
        ...

    def lost(self, worker: int) -> Exception | None:
        """Returns the error of waiting for a worker, if it will put nothing more."""
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
        """Returns None: threads end with their process."""
        del worker
        return None

    def __len__(self) -> int:
        return len(self._values)


class ConnectedWorkers(Workers):
    """A worker's place among those that see one store.

    Args:
        num_workers: How many there are.
        index: Which of them this is.
        store: What they see. Two groups of workers that share one need different names.
        name: The group's name in it.
        patience: Seconds that a worker waits for the others.
        codec: How answers are written.

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
            # Before the look: what it has put before it was lost is there to be seen.
            error = self._store.lost(worker)
            if (said := self._store.get(key, _LOOK_AFTER)) is not None:
                break
            if error is not None:
                raise error
            if self._has_left.is_set():
                raise AbortedError(message="The iterator was dropped.")
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    message=f"Worker {worker} of {self._workers.num_workers} has not come to the "
                    f"same place within {self._patience:g} s ({key}). It has ended, is stuck, or "
                    "runs another program: all workers must make the same values and distributed "
                    "datasets, and iterate over these as often."
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
