"""What the state of a training loop goes back to, and where it says that its passes are."""

import gc
import random
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state

import unison
import unison.tf as tf
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


#: Generators of the process, which belong to no object.
GLOBAL = {
    "numpy": lambda: np.random.rand(3).tolist(),
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "keras": lambda: np.asarray(keras.random.normal((3,))).tolist(),
    "tf": lambda: np.asarray(tf.random.normal((3,))).tolist(),
    "a-program-of-tf": lambda: numbers_of(strategy.run(lambda: tf.random.normal((3,)))),
}


@pytest.fixture
def of_these_replicas(monkeypatch):
    """Makes the replicas of this process those of a job whose workers may change."""
    gc.collect()  # a commit reads all variables, also those of servers that other tests had
    group = SimpleNamespace(placement=strategy.placement, settle=lambda most: None, is_over=False)
    group.tell, group.runs = lambda point, **about: None, 0
    monkeypatch.setattr(unison.elastic, "elastic_group", lambda: group)


# In an elastic job, the counter of programs is one of the variables that a commit keeps.
@pytest.mark.parametrize("generator", sorted({*GLOBAL} - {"a-program-of-tf"}))
@pytest.mark.parametrize("drawn", [0, 2])
def test_the_last_commit_has_where_the_random_generators_were(of_these_replicas, generator, drawn):
    draw, state = GLOBAL[generator], unison.elastic.State(step=0)
    for _ in range(drawn):
        draw()
    state.commit()
    expected = [draw(), draw()]
    state.restore()
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("generator", GLOBAL)
@pytest.mark.parametrize("drawn", [0, 2])
def test_whoever_joins_draws_what_the_others_do(of_these_replicas, generator, drawn):
    draw = GLOBAL[generator]
    old, new = unison.elastic.State(step=0), unison.elastic.State(step=0)
    for _ in range(1 + drawn):
        draw()
    held = old.pack()
    expected = [draw(), draw()]
    new.unpack(held)
    assert [draw(), draw()] == expected


def test_a_generator_of_keras_that_only_the_others_have_is_made():
    old, new = unison.elastic.State(step=0), unison.elastic.State(step=0)
    GLOBAL["keras"]()
    held, python = old.pack(), random.getstate()
    expected = GLOBAL["keras"]()
    global_state.set_global_attribute("global_seed_generator", None)
    new.unpack(held)
    assert GLOBAL["keras"]() == expected
    assert random.getstate() == python


@pytest.fixture
def variables(monkeypatch):
    """Makes variables of a job whose workers may change."""
    group = SimpleNamespace(
        settle=lambda most: None, tell=lambda point, **about: None, is_over=False, runs=0
    )
    group.placement = ElasticPlacement(jax.devices()[:1], group)
    monkeypatch.setattr(unison.elastic, "elastic_group", lambda: group)

    def make(name, **options):
        with scoped_placement(group.placement):
            made = unison.Variable(1.0, name=name, **options)
        cells.append(made.cell)
        return made

    cells = []
    monkeypatch.setattr(unison.elastic, "live_cells", lambda _: cells)
    return make


def overwrite(variable):
    """As a program does."""
    variable.cell.put(variable.cell.take() + 1)


def test_variables_that_change_and_that_no_worker_would_get_are_named_once(variables, caplog):
    frozen, slot, weight = map(variables, ["frozen", "slot", "weight"])
    state = unison.elastic.State(step=0, weight=weight)
    state.commit()
    for _ in range(2):
        overwrite(slot)
        overwrite(weight)
        state.commit()
    (record,) = [each for each in caplog.records if "elastic.State does not hold" in each.message]
    assert "does not hold: slot. A worker that joins" in record.message
    assert float(frozen) == 1


def test_what_each_replica_has_of_its_own_may_be_left_out_of_a_state(variables, caplog):
    weight = variables("weight")
    seen = variables(
        "seen",
        synchronization=unison.VariableSynchronization.ON_READ,
        aggregation=unison.VariableAggregation.SUM,
    )
    state = unison.elastic.State(step=0, weight=weight)
    state.commit()
    overwrite(seen)
    state.commit()
    assert "does not hold" not in caplog.text


def test_what_is_made_after_the_state_is_held_by_what_it_belongs_to(variables, caplog):
    module = unison.Module()
    state = unison.elastic.State(step=0, module=module)
    module.late = variables("late")
    state.commit()
    overwrite(module.late)
    state.commit()
    assert "does not hold" not in caplog.text


def test_a_commit_copies_only_what_is_overwritten_after_it(variables):
    frozen, trained = variables("frozen"), variables("trained")
    state = unison.elastic.State(step=0, frozen=frozen, trained=trained)
    state.commit()
    for value in (2.0, 3.0):
        overwrite(trained)
        state.commit()
        assert float(trained) == value
    committed = frozen.cell.stored()
    overwrite(trained)
    state.restore()
    assert float(trained) == 3
    assert frozen.cell.stored() is committed
