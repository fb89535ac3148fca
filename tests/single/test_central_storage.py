"""`CentralStorageStrategy`: one copy of the variables; the results are those of mirrored ones."""

from __future__ import annotations

import collections
import gc
import os
import pathlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from single import test_variable_table as table
from subprocess_program import PYTHON_PATH, run_program
from unison import (
    CentralStorageStrategy,
    MirroredStrategy,
    PerReplica,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from unison.data import Dataset
from unison.runtime.placement import Placement
from unison.train import Checkpoint
from unison.train.optimizers import Adam

SUM, MEAN, FIRST = (
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
COMPUTE = ["CPU:0", "CPU:1"]
#: Another device, one of the compute devices, and memories of the host.
HOMES = ["CPU:3", "CPU:0", "pinned_host", "unpinned_host"]
at_every_home = pytest.mark.parametrize("home", HOMES)

IMAGES = np.random.default_rng(0).normal(size=(75, 64)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 10, 75)


def central(home="CPU:3") -> CentralStorageStrategy:
    return CentralStorageStrategy(COMPUTE, home)


def variable_of(strategy, value=0.0, **keywords) -> unison.Variable:
    with strategy.scope():
        return unison.Variable(value, **keywords)


def place_of(array) -> tuple[int, str]:
    """The device and the memory of an array with one copy."""
    (shard,) = array.addressable_shards
    return shard.device.id, shard.data.sharding.memory_kind


def live_bytes() -> dict[tuple[int, str], int]:
    """The bytes of all arrays that live, by device and memory."""
    gc.collect()
    pieces = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    sizes: collections.Counter[tuple[int, str]] = collections.Counter()
    # Two arrays may share a buffer.
    for piece in {piece.unsafe_buffer_pointer(): piece for piece in pieces}.values():
        sizes[piece.device.id, piece.sharding.memory_kind] += piece.nbytes
    return sizes


def network(dropout=0.2) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(300, "relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(300, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def trained(strategy) -> tuple[keras.Model, list]:
    """A model after two epochs whose last batches are uneven, and all that it said."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network()
    history = model.fit(IMAGES, LABELS, batch_size=32, epochs=2, verbose=0).history
    scores = model.evaluate(IMAGES, LABELS, batch_size=32, verbose=0)
    outputs = model.predict(IMAGES, batch_size=32, verbose=0)
    state = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    return model, [history, scores, outputs, state]


@pytest.fixture(scope="module", params=["CPU:0", "pinned_host"])
def trained_centrally(request):
    """The home, a trained model, and the bytes of memory that came with it."""
    before = live_bytes()
    model, _ = trained(central(request.param))
    held = {place: size - before.get(place, 0) for place, size in live_bytes().items()}
    return request.param, model, held


# -- one copy ------------------------------------------------------------------------------


@at_every_home
def test_a_variable_has_one_copy_where_it_was_asked_for(home):
    variable = variable_of(central(home), jnp.arange(3.0), aggregation=SUM)
    expected = {
        "CPU:3": (3, "device"),
        "CPU:0": (0, "device"),
        "pinned_host": (0, "pinned_host"),
        "unpinned_host": (0, "unpinned_host"),
    }[home]
    assert place_of(variable.cell.array) == expected
    variable.assign([3.0, 2.0, 1.0])
    assert place_of(variable.cell.array) == expected
    strategy = central(home)
    strategy.run(lambda: variable.assign_add([1.0, 1.0, 1.0]))
    assert place_of(variable.cell.array) == expected
    assert variable.numpy().tolist() == [5.0, 4.0, 3.0]


def test_by_default_variables_are_on_the_first_cpu():
    assert CentralStorageStrategy(COMPUTE).extended.parameter_devices == (
        "/job:localhost/replica:0/task:0/device:CPU:0",
    )


def test_with_one_compute_device_variables_are_there():
    strategy = CentralStorageStrategy(["CPU:2"])
    assert place_of(variable_of(strategy).cell.array) == (2, "device")
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices


def test_one_compute_device_may_have_its_variables_elsewhere():
    strategy = CentralStorageStrategy(["CPU:2"], "CPU:1")
    variable = variable_of(strategy, 1.0)
    assert float(strategy.run(lambda: variable.assign_add(2.0))) == 3.0
    assert place_of(variable.cell.array) == (1, "device")


def test_a_value_that_was_read_is_on_the_first_compute_device():
    strategy = central("CPU:3")
    variable = variable_of(strategy, 2.0, aggregation=SUM)
    total = strategy.reduce("SUM", strategy.run(lambda: variable.value()))
    assert float(variable.value() + total) == 6.0


@at_every_home
def test_a_value_that_was_read_stays_what_it_was(home):
    strategy = central(home)
    variable = variable_of(strategy, jnp.ones(8), aggregation=SUM)
    before = variable.value()
    strategy.run(lambda: variable.assign_add(jnp.ones(8)))
    assert before.tolist() == [1.0] * 8
    assert variable.numpy().tolist() == [3.0] * 8


def test_weights_and_slots_take_memory_once(trained_centrally):
    home, model, held = trained_centrally
    state = [*model.trainable_variables, *model.optimizer.variables]
    size = sum(variable.numpy().nbytes for variable in state)
    at_home = {"CPU:0": (0, "device"), "pinned_host": (0, "pinned_host")}[home]
    # Elsewhere: metrics and moving statistics, of which each replica has its own.
    assert size <= held.pop(at_home) < 1.02 * size
    assert all(elsewhere < 0.02 * size for elsewhere in held.values())


def test_slots_never_leave_and_weights_travel_once_a_step(monkeypatch):
    brought = []
    from_home = Placement.from_home

    def recorded(placement, stored):
        brought.extend(stored)
        return from_home(placement, stored)

    monkeypatch.setattr(Placement, "from_home", recorded)
    with central().scope():
        model = network()
    model.fit(IMAGES[:32], LABELS[:32], batch_size=32, verbose=0)
    shapes = sorted(x.shape for x in brought if x.size > 300 and x.sharding == model_home(model))
    assert shapes == [(64, 300), (300, 10), (300, 300)]


def model_home(model: keras.Model):
    return model.trainable_variables[0].cell.placement.home


# -- the results of mirrored variables -----------------------------------------------------


def test_keras_loops_give_what_mirrored_variables_give_to_the_bit():
    """In a process of its own, whose programs are compiled as users have them."""
    source = """
import sys
import jax, numpy as np
from single.test_central_storage import COMPUTE, MirroredStrategy, central, trained

_, mirrored = trained(MirroredStrategy(COMPUTE))
for home in sys.argv[1:]:
    _, said = trained(central(home))
    jax.tree.map(np.testing.assert_array_equal, said, mirrored)
    print("equal", home)
"""
    tests = pathlib.Path(__file__).parents[1]
    path = os.pathsep.join([PYTHON_PATH, str(tests)])
    environment = {"PYTHONPATH": path, "UNISON_CPU_DEVICES": "4"}
    outcome = run_program(
        source, "CPU:0", "pinned_host", env=environment, timeout=110, imported=("jax", "unison")
    )
    assert outcome.stdout.splitlines()[-2:] == ["equal CPU:0", "equal pinned_host"], outcome.stderr


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loop_of_ones_own_gives_what_mirrored_variables_give(dtype):
    def weights_under(strategy):
        with strategy.scope():
            weights = unison.Variable(jnp.ones((4, 3), dtype), aggregation=MEAN)
            seen = unison.Variable(0, aggregation=SUM)
            optimizer = Adam(0.1)

        def step(x):
            gradient = jax.grad(lambda w: jnp.sum((x.astype(dtype) @ w) ** 2))(weights.value())
            optimizer.apply([gradient], [weights])
            seen.assign_add(x.shape[0])

        for batch in strategy.experimental_distribute_dataset(
            Dataset.from_tensor_slices(
                np.linspace(0, 1, 44, dtype=np.float32).reshape(11, 4)
            ).batch(4)
        ):
            strategy.run(step, args=(batch,))
        return weights.numpy(), seen.numpy()

    expected = weights_under(MirroredStrategy(COMPUTE))
    jax.tree.map(np.testing.assert_array_equal, weights_under(central()), expected)
    assert expected[1] == 11


OF_ONE_COPY = [
    row
    for row in table.TABLE
    if (row.synchronization, row.aggregation)
    != (VariableSynchronization.ON_WRITE, VariableAggregation.NONE)
]


@pytest.mark.parametrize("home", ["CPU:3", "pinned_host"])
@pytest.mark.parametrize("place", range(3), ids=table.METHODS)
def test_every_synchronization_and_aggregation_means_what_it_means_mirrored(
    home, place, monkeypatch
):
    monkeypatch.setattr(table, "TABLE", OF_ONE_COPY)
    strategy = central(home)
    variables = [table.variable_of(strategy, row) for row in OF_ONE_COPY]
    method = table.METHODS[place]
    written = table.AllRows(table.written._question)
    for row in OF_ONE_COPY:
        for way in table.IN_REPLICAS:
            assert written(strategy, row, way, method) == table.expected(row.written[place])
        answers = written(strategy, row, "run", method, 3)
        assert answers == table.expected(row.written_numbers[place])
    del variables
    assigned = table.AllRows(table.assigned_by)
    for row in OF_ONE_COPY:
        for way in table.OUTSIDE:
            assert assigned(strategy, row, way, method) == table.expected(row.assigned[place])
            apart = assigned(strategy, row, way, method, apart=True)
            assert apart == table.expected(row.assigned_apart[place])


def test_reads_and_reductions_mean_what_they_mean_mirrored(monkeypatch):
    monkeypatch.setattr(table, "TABLE", OF_ONE_COPY)
    strategy = central()
    read = table.AllRows(table.read_by._question)
    reduced = table.AllRows(table.reduced_by._question)
    for row in OF_ONE_COPY:
        for way in table.OUTSIDE:
            assert read(strategy, row, way, "value", apart=True) == table.expected(row.read)
            for op, expected in zip(("SUM", "MEAN"), row.reduced, strict=True):
                assert reduced(strategy, row, way, op, apart=True) == table.expected(expected)


def test_gather_concatenates_what_the_replicas_computed():
    strategy = central()
    bias = variable_of(strategy, 10.0, aggregation=SUM)
    values = strategy.run(lambda x: x + bias, args=(PerReplica([jnp.zeros(2), jnp.ones(1)]),))
    assert strategy.gather(values, axis=0).tolist() == [10.0, 10.0, 11.0]


def test_the_update_of_a_variable_is_called_on_its_one_copy():
    strategy = central()
    variable = variable_of(strategy, 1.0, aggregation=SUM)
    strategy.extended.update(variable, lambda v, x: v.assign_sub(x), args=(0.25,))
    assert float(variable) == 0.75


def test_the_update_of_a_variable_in_merge_call_is_called_on_its_one_copy():
    strategy = central()
    variable = variable_of(strategy, 1.0, aggregation=SUM)

    def merge(strategy, x):
        total = strategy.extended.reduce_to(unison.ReduceOp.SUM, x, variable)
        return strategy.extended.update(variable, lambda v, x: v.assign_sub(x), args=(total,))

    def step(x):
        get_replica_context().merge_call(merge, args=(x,))
        return variable.value()

    read = strategy.run(step, args=(PerReplica([0.25, 0.5]),))
    assert [float(value) for value in read.values] == [0.25, 0.25]
    assert float(variable) == 0.25


def test_an_update_sees_what_a_variable_was_before_the_replicas_wrote_it():
    """An aggregation by exchanges stays on the replicas; an update at home looks at its result."""
    strategy = central()
    with strategy.scope():
        weight = unison.Variable(1.0, aggregation=MEAN)
        total = unison.Variable(0.0, aggregation=SUM)
        optimizer = Adam(0.1)

    def step(x):
        total.assign_add(get_replica_context().all_reduce("SUM", x) * weight)
        optimizer.apply([x], [weight], aggregation_method="TREE")

    for _ in range(2):
        before = float(weight)
        total.assign(0.0)
        strategy.run(step, args=(PerReplica([1.0, 2.0]),))
        assert float(total) == pytest.approx(2 * 3 * before)
        assert float(weight) < before


def test_what_one_replica_knows_is_not_taken_for_what_all_know():
    strategy = central()
    variable = variable_of(strategy, 0.0, aggregation=SUM)

    def step(x):
        index = get_replica_context().replica_id_in_sync_group.astype(jnp.float32)
        variable.assign(x * index)

    strategy.run(step, args=(5.0,))
    assert float(variable) == 5.0


@at_every_home
def test_random_streams_stay_at_home_however_often_a_program_draws(home):
    strategy = CentralStorageStrategy(COMPUTE, home)
    with strategy.scope():
        seeds = keras.random.SeedGenerator(3)
    for _ in range(4):
        strategy.run(lambda: keras.random.uniform((2,), seed=seeds))
        assert seeds.state.cell.stored().sharding == strategy.placement.home


def test_random_streams_differ_between_replicas_as_they_do_mirrored():
    def drawn(strategy):
        with strategy.scope():
            seeds = keras.random.SeedGenerator(3)
        results = [strategy.run(lambda: keras.random.uniform((2,), seed=seeds)) for _ in range(2)]
        return [[value.tolist() for value in result.values] for result in results]

    first, second = drawn(central())
    assert first[0] != first[1] != second[1]
    assert drawn(MirroredStrategy(COMPUTE)) == [first, second]


def test_a_checkpoint_goes_from_mirrored_variables_to_one_copy_and_back(tmp_path):
    mirrored, one_copy = MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]), central("pinned_host")
    saved = variable_of(mirrored, jnp.arange(3.0), aggregation=SUM)
    path = Checkpoint(variable=saved).write(str(tmp_path / "mirrored"))
    restored = variable_of(one_copy, jnp.zeros(3), aggregation=SUM)
    Checkpoint(variable=restored).read(path).assert_consumed()
    assert restored.numpy().tolist() == [0.0, 1.0, 2.0]
    assert place_of(restored.cell.array) == (0, "pinned_host")
    one_copy.run(lambda: restored.assign_add(jnp.ones(3)))
    path = Checkpoint(variable=restored).write(str(tmp_path / "central"))
    Checkpoint(variable=saved).read(path).assert_consumed()
    assert saved.numpy().tolist() == [2.0, 3.0, 4.0]


def test_training_goes_on_from_a_saved_model_as_if_it_had_not_stopped(tmp_path):
    def go_on(model):
        data = IMAGES[:64], LABELS[:64]
        return model.fit(*data, batch_size=32, shuffle=False, verbose=0).history

    keras.utils.set_random_seed(1)
    strategy = central()
    with strategy.scope():
        model = network(dropout=0.0)
    go_on(model)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert place_of(loaded.trainable_variables[0].cell.array) == (3, "device")
    assert go_on(loaded) == go_on(model)


# -- what is refused -----------------------------------------------------------------------


@at_every_home
def test_a_program_that_fails_leaves_the_values_where_they_were(home, monkeypatch):
    strategy = central(home)
    total = variable_of(strategy, np.ones(300_000, np.float32), aggregation=SUM)
    mean = variable_of(strategy, 2.0, aggregation=MEAN)

    def step():
        total.assign_add(jnp.ones(300_000))
        mean.assign(mean * 2.0)
        return mean.value()

    strategy.run(step)
    (program,) = strategy._programs._programs.values()
    execute = program.execute

    def fail(*args):
        jax.block_until_ready(execute(*args))
        raise RuntimeError("out of memory")

    fail.jitted = None
    monkeypatch.setattr(program, "execute", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        strategy.run(step)
    assert (total.numpy()[0], float(mean)) == (3.0, 4.0)


def test_replicas_cannot_write_different_values_to_one_copy():
    strategy = central()
    variable = variable_of(strategy, name="weights")
    with pytest.raises(ValueError, match=r"'weights' has one copy.*aggregation=SUM, MEAN"):
        strategy.run(lambda x: variable.assign(x), args=(PerReplica([1.0, 2.0]),))
    assert float(variable) == 0.0


def test_components_cannot_be_assigned_to_one_copy():
    variable = variable_of(central(), name="weights")
    with pytest.raises(ValueError, match="'weights' has one copy"):
        variable.assign(PerReplica([1.0, 2.0]))


def test_variables_of_one_copy_are_not_those_of_a_mirrored_strategy():
    variable = variable_of(central(), aggregation=SUM)
    with pytest.raises(RuntimeError, match="belongs to another strategy"):
        MirroredStrategy(COMPUTE).run(lambda: variable.value())


@pytest.mark.parametrize(
    ("home", "message"),
    [("CPU:9", "one of the devices of this job"), ("CPU 1", "Expected a device string")],
)
def test_a_parameter_device_that_is_not_there_is_refused_by_name(home, message):
    with pytest.raises(ValueError, match=message) as caught:
        central(home)
    assert home in str(caught.value)
