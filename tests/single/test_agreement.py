"""Workers that agree, here threads of one process, and what they do when one is lost."""

import threading
from types import SimpleNamespace

import pytest

from unison.data import Dataset
from unison.data.distribution.distributed_dataset import distribute_dataset
from unison.data.distribution.input_workers import workers_of_group
from unison.errors import DeadlineExceededError, UnavailableError
from unison.runtime.agreement import ConnectedWorkers, MemoryStore, TeamsOfWorkers, Workers
from unison.runtime.placement import placement_in_scope


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


def test_workers_are_several_if_there_are_several_processes():
    pair = [ConnectedWorkers(2, index, MemoryStore(), "test") for index in range(2)]
    assert [workers.are_several for workers in pair] == [True, True]
    assert not Workers().are_several
    assert TeamsOfWorkers(pair[0], 2).are_several  # which count as one worker


@pytest.mark.parametrize("members", [1, 2])
def test_members_of_an_elastic_group_agree_on_seeds_if_they_are_several(members):
    asked = []

    def all_gather(packed):
        asked.append(packed)
        return members * [packed]

    group = SimpleNamespace(num_members=members, index=0, all_gather=all_gather)
    dataset = Dataset.range(8).shuffle(8).batch(4)
    distribute_dataset(dataset, placement_in_scope(), workers=workers_of_group(group))
    assert len(asked) == members - 1  # once, unless it is alone


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
    with pytest.raises(DeadlineExceededError, match="Timed out: worker 1 of 2 has not reached"):
        first.ask("a")
