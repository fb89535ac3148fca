"""Backups of `fit` that somebody else has made: right checksums, and anything behind them."""

import numpy as np
import pytest

from unison.data import Dataset
from unison.data.plan import memories_of, recall
from unison.errors import DataLossError
from unison.train.random_state import numpy_and_python, set_numpy_and_python

# -- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [-1, 625, 10**6, 2**40, 1.0])
def test_random_numbers_are_not_drawn_from_memory_behind_the_state(place):
    state = numpy_and_python()
    state["numpy"][2] = place
    before = np.random.get_state()[1].tolist()
    with pytest.raises(DataLossError, match="expected a whole number from 0 to 624"):
        set_numpy_and_python(state)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_a_generator_of_zeros_alone_is_corrupt(name):
    """NumPy would never find a normal number in it."""
    state = numpy_and_python()
    state[name][1] = np.zeros_like(state[name][1])
    with pytest.raises(DataLossError, match="words of a Mersenne Twister"):
        set_numpy_and_python(state)


# -- earlier passes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.pop("_seed"),
        lambda memory: memory.update(_seed="3"),
        lambda memory: memory.update(_passes=None),
        lambda memory: memory.update(more=1),
    ],
    ids=["no seed", "seed of text", "passes", "more"],
)
def test_what_earlier_passes_left_is_checked_before_it_is_restored(change):
    plan = Dataset.range(9).shuffle(9, seed=3).plan
    memories = memories_of(plan)
    changed = [dict(memory) for memory in memories]
    change(changed[0])
    with pytest.raises(ValueError, match="expected"):
        recall(plan, changed)
    assert memories_of(plan) == memories


def test_an_earlier_position_of_a_cache_is_checked():
    plan = Dataset.range(9).cache().plan
    recall(plan, [{"is_kept": True, "begin": {"memory": "x"}}])
    with pytest.raises(DataLossError, match="The position of an iterator is corrupt"):
        plan.stream().next()
