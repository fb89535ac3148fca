"""What the state of a training loop goes back to, and where it says that its passes are."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import unison
from unison.data import Dataset
from unison.runtime.elastic import ElasticPlacement
from unison.runtime.placement import scoped_placement

strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])


def distributed():
    """As in a function that `unison.elastic.run` calls, which distributes in every call."""
    dataset = Dataset.range(24).shuffle(24, seed=3).batch(6)
    return strategy.experimental_distribute_dataset(dataset)


def numbers_of(batch):
    parts = strategy.experimental_local_results(batch)
    return np.concatenate([np.asarray(part) for part in parts]).tolist()


@pytest.fixture(scope="module")
def passes():
    batches = distributed()
    return [[numbers_of(batch) for batch in batches] for _ in range(3)]


@pytest.mark.parametrize("whole_passes", [0, 1, 2])
@pytest.mark.parametrize("batches_more", [0, 1, 4])
def test_passes_go_on_as_if_the_function_had_not_been_called_again(
    passes, whole_passes, batches_more
):
    state = unison.elastic.State(epoch=0)
    batches = distributed()
    for _ in range(whole_passes):
        assert len([*state.iterate(batches)]) == 4
        state.epoch += 1
        state.commit()
    begun = state.iterate(batches)
    seen = []
    for _ in range(batches_more):
        seen.append(numbers_of(next(begun)))
        state.commit()
    if batches_more < 4:
        next(begun)  # is not committed
    state.restore()
    batches = distributed()
    seen += [numbers_of(batch) for batch in state.iterate(batches)]
    assert seen == passes[whole_passes]
    for following in passes[whole_passes + 1 :]:
        assert [numbers_of(batch) for batch in state.iterate(batches)] == following


#: Datasets of which each pass leaves something behind for the next one.
OF_PASSES = {
    "shuffled": lambda: Dataset.range(24).shuffle(24, seed=3).batch(6),
    "shuffled-in-a-buffer": lambda: Dataset.range(24).map(lambda x: x).shuffle(5, seed=3).batch(6),
    "repeated": lambda: Dataset.range(12).shuffle(12, seed=3).repeat(2).batch(6),
    "random": lambda: Dataset.random(seed=3).take(24).batch(6),
    "with-keys": lambda: (
        Dataset.range(24).map(lambda x, key: x + jax.random.randint(key, (), 0, 99), seed=3)
    ).batch(6),
}


@pytest.mark.parametrize("kind", OF_PASSES)
@pytest.mark.parametrize("passes_before", [0, 1])
def test_what_was_never_committed_begins_as_if_it_had_not_begun(kind, passes_before):
    undisturbed = strategy.experimental_distribute_dataset(OF_PASSES[kind]())
    expected = [[numbers_of(batch) for batch in undisturbed] for _ in range(3)]
    dataset = OF_PASSES[kind]()
    state = unison.elastic.State(epoch=0)
    batches = strategy.experimental_distribute_dataset(dataset)
    for _ in range(passes_before):
        assert len([*state.iterate(batches)]) == 4
    next(state.iterate(batches))
    state.restore()
    batches = strategy.experimental_distribute_dataset(dataset)
    seen = [[numbers_of(batch) for batch in state.iterate(batches)] for _ in range(3)]
    assert seen == expected


def test_what_another_loop_has_left_behind_stays():
    dataset = OF_PASSES["shuffled"]()
    batches = strategy.experimental_distribute_dataset(dataset)
    expected = [[numbers_of(batch) for batch in batches] for _ in range(3)]
    dataset = OF_PASSES["shuffled"]()
    seen = [[numbers_of(batch) for batch in strategy.experimental_distribute_dataset(dataset)]]
    state = unison.elastic.State(epoch=0)
    next(state.iterate(strategy.experimental_distribute_dataset(dataset)))
    state.restore()
    batches = strategy.experimental_distribute_dataset(dataset)
    seen += [[numbers_of(batch) for batch in state.iterate(batches)] for _ in range(2)]
    assert seen == expected


def test_a_worker_that_joins_between_two_passes_begins_the_next_one(passes):
    old, new = unison.elastic.State(epoch=0), unison.elastic.State(epoch=0)
    assert len([*old.iterate(distributed())]) == 4
    old.commit()
    new.unpack(old.pack())
    assert [numbers_of(batch) for batch in new.iterate(distributed())] == passes[1]


def test_a_commit_copies_only_what_is_overwritten_after_it(monkeypatch):
    group = SimpleNamespace(
        settle=lambda most: None, tell=lambda point: None, is_over=False, runs=0
    )
    group.placement = ElasticPlacement(jax.devices()[:1], group)
    monkeypatch.setattr(unison.elastic, "elastic_group", lambda: group)
    with scoped_placement(group.placement):
        frozen, trained = unison.Variable(1.0), unison.Variable(1.0)
    monkeypatch.setattr(unison.elastic, "live_cells", lambda _: [frozen.cell, trained.cell])
    state = unison.elastic.State(step=0, frozen=frozen, trained=trained)
    state.commit()
    for value in (2.0, 3.0):
        trained.cell.put(trained.cell.take() + 1)  # as a program does
        state.commit()
        assert float(trained) == value
    committed = frozen.cell.stored()
    trained.cell.put(trained.cell.take() + 1)
    state.restore()
    assert float(trained) == 3
    assert frozen.cell.stored() is committed
