"""What is lost and what is not if parts of an input service fail, without sockets."""

import pytest

from unison.data.service.configuration import ShardingPolicy
from unison.data.service.iterations import JobSpec
from unison.data.service.registry import Registry
from unison.errors import NotFoundError

ABOUT = {
    "description": "Range",
    "signature": {},
    "cardinality": 10,
    "split_sizes": [10],
    "split_error": "",
}
OFF = JobSpec("d", "Range", ShardingPolicy.OFF)
DYNAMIC = JobSpec("d", "Range", ShardingPolicy.DYNAMIC)
DATA = JobSpec("d", "Range", ShardingPolicy.DATA)


def registry(*listed, kept=None, **options):
    """A registry with a dataset, whose events are kept."""
    events = [] if kept is None else kept
    made = Registry(listed, 0.0, lambda event, payload: events.append((event, payload)), **options)
    made.register_dataset(ABOUT, b"payload", "d")
    return made


def restarted(kept, now=0.0):
    """The registry of a dispatcher that has started again, with the journal of another one."""
    made = Registry((), now)
    for event, payload in kept:
        made.apply(event, payload)
    return made


def two_workers(made):
    return [made.hear_worker(name, f"h:{name}", None, 0.0) for name in ("1", "2")]


# -- a dispatcher that restarts ----------------------------------------------------------------


@pytest.mark.parametrize("spec", [OFF, DYNAMIC], ids=["off", "dynamic"])
def test_workers_that_still_compute_are_awaited_after_a_restart(spec):
    kept = []
    made = registry(kept=kept)
    first, _ = two_workers(made)
    number = made.join("c", "j", 0, spec, 0.0).number
    if spec is DYNAMIC:
        made.hand_out(number, 0, 0, 10, "2", 0)
    made.end_tasks(first, [number])
    again = restarted(kept, now=10.0)
    again.end_tasks(again.hear_worker("1", "h:1", 0, 10.1), [])
    again.expire(10.2)
    assert not again.iteration(number).is_complete
    second = again.hear_worker("2", "h:2", 1, 10.3)
    assert list(again.tasks_of(second)) == [number]
    again.end_tasks(second, [number])
    assert again.iteration(number).is_complete


def test_workers_that_were_lost_with_the_dispatcher_are_not_awaited_for_long():
    kept = []
    made = registry(kept=kept)
    first, _ = two_workers(made)
    number = made.join("c", "j", 0, DYNAMIC, 0.0).number
    made.end_tasks(first, [number])
    again = restarted(kept, now=10.0)
    again.hear_worker("1", "h:1", 0, 10.1)
    again.expire(15.1)
    assert again.iteration(number).is_complete


def test_a_dispatcher_without_a_journal_does_not_use_the_numbers_of_another_one():
    first, second = (registry().join("c", "j", 0, OFF, 0.0).number for _ in range(2))
    assert first != second
    with pytest.raises(NotFoundError, match="without fault_tolerant_mode"):
        registry().hear_consumer(first, "c", 0.0)


def test_with_a_journal_the_numbers_of_iterations_go_on():
    kept = []
    number = registry(kept=kept).join("c", "j", 0, OFF, 0.0).number
    again = restarted(kept)
    assert again.join("c", "j", 0, OFF, 0.0).number == number
    assert again.join("c", "j", 1, OFF, 0.0).number == number + 1
