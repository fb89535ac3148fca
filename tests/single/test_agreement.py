"""Workers that agree, here threads of one process, and what they do when one is lost."""

import threading

import pytest

from unison.errors import DeadlineExceededError, UnavailableError
from unison.runtime.agreement import ConnectedWorkers, MemoryStore


class StoreOfTheLost(MemoryStore):
    """Says that the workers in `gone` will put nothing more."""

    def __init__(self):
        super().__init__()
        self.gone = set()

    def lost(self, worker):
        return UnavailableError(message=f"worker {worker} is lost") if worker in self.gone else None


def talks(store, count, patience=30.0):
    return [
        ConnectedWorkers(count, index, store, "test", patience).talk("numbers")
        for index in range(count)
    ]


def test_each_learns_what_all_have_said_in_order():
    first, second = talks(MemoryStore(), 2)
    heard = []
    other = threading.Thread(target=lambda: heard.extend(second.ask("b")), daemon=True)
    other.start()
    assert first.ask("a") == ["a", "b"]
    other.join(30)
    assert heard == ["a", "b"]


def test_a_worker_that_is_lost_is_not_waited_for():
    store = StoreOfTheLost()
    first, _ = talks(store, 2)
    store.gone.add(1)
    with pytest.raises(UnavailableError, match="worker 1 is lost"):
        first.ask("a")


def test_what_a_worker_said_before_it_was_lost_counts():
    store = StoreOfTheLost()
    first, second = talks(store, 2)
    other = threading.Thread(target=lambda: second.ask("b"), daemon=True)
    other.start()
    while not len(store):
        pass
    store.gone.add(1)
    assert first.ask("a") == ["a", "b"]
    other.join(30)


def test_one_that_does_not_come_is_named_after_a_while():
    first, _ = talks(MemoryStore(), 2, patience=0.1)
    with pytest.raises(DeadlineExceededError, match="Worker 1 of 2 has not reached"):
        first.ask("a")
