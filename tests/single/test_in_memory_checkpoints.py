"""Checkpoints in the memory of a worker's host: what is kept, and what is restored."""

import sys
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest

import unison
from unison.runtime.elastic.group import Entry
from unison.runtime.host_memory import HostMemory, WorkerMemory, about_process, worker_memory
from unison.storage.memory_slots import MemorySlots
from unison.train import in_memory, memory_record
from unison.train.in_memory import InMemoryCheckpoints
from unison.train.loop_state import LoopState

ON_READ = unison.VariableSynchronization.ON_READ
SUM = unison.VariableAggregation.SUM


@pytest.fixture
def memory():
    slots = MemorySlots.create("test")
    yield WorkerMemory([slots], 0)
    slots.close()


@pytest.fixture
def strategy():
    return unison.MirroredStrategy(["CPU:0", "CPU:1"])


def run_steps(checkpoints, state, count, step=lambda: None, position=None):
    """Runs steps, before each of which the state is kept if it is due."""
    for _ in range(count):
        if checkpoints.is_due:
            checkpoints.keep(state, position)
        checkpoints.steps += 1
        step()
    checkpoints._writer.wait()


def kept(memory, state, count=30, **given):
    checkpoints = InMemoryCheckpoints(memory)
    assert checkpoints.enter(state) is Entry.NEW
    run_steps(checkpoints, state, count, **given)
    return checkpoints


def test_without_the_memory_of_a_host_there_are_none():
    assert worker_memory() is None
    assert in_memory.in_memory_checkpoints() is None


def test_a_state_comes_back_as_it_was_before_its_step(memory, strategy):
    with strategy.scope():
        count = unison.Variable(0.0, aggregation=SUM)
    state = LoopState(strategy.placement, count=count)
    before = kept(memory, state, step=lambda: count.assign_add(1.0))
    (newest, *_) = memory.own.steps()
    assert 0 < newest < 30
    assert before.steps == 30
    count.assign(-1.0)
    after = InMemoryCheckpoints(memory)
    assert after.enter(state) is Entry.RESUMED
    assert (after.steps, float(count)) == (newest, newest)


def test_each_replica_gets_its_own_copy_back(memory, strategy):
    with strategy.scope():
        seen = unison.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        draws = unison.Variable(np.zeros(3, ml_dtypes.bfloat16))

    def step():
        place = unison.get_replica_context().replica_id_in_sync_group
        seen.assign_add(place + 0.25)

    strategy.run(step)
    draws.assign(np.arange(3, dtype=ml_dtypes.bfloat16))
    state = LoopState(strategy.placement, seen=seen, draws=draws)
    kept(memory, state)
    copies = [np.asarray(copy) for copy in seen.cell.copies()]
    seen.assign(8.0)
    draws.assign(np.zeros(3, ml_dtypes.bfloat16))
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    np.testing.assert_array_equal(seen.cell.copies(), copies)
    assert copies[0] != copies[1]
    np.testing.assert_array_equal(np.asarray(draws), [0, 1, 2])


def test_what_programs_made_different_on_replicas_is_so_again(memory, strategy):
    def made():
        with strategy.scope():
            return unison.Variable(0.0)

    different = made()
    strategy.run(
        lambda: different.assign(unison.get_replica_context().replica_id_in_sync_group + 1.0)
    )
    kept(memory, LoopState(strategy.placement, value=different))
    new = made()  # of a program that starts again: no step has made its copies differ
    state = LoopState(strategy.placement, value=new)
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    np.testing.assert_array_equal(new.cell.copies(), [1.0, 2.0])


def test_divided_variables_come_back_to_their_devices(memory):
    strategy = unison.ModelParallelStrategy(["CPU:0", "CPU:1"], mesh={"batch": 2}, zero=3)
    numbers = np.random.default_rng(1).random((64, 64), np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, use_bias=False)])
    model.set_weights([numbers])
    cell = model.layers[0].kernel.cell
    assert cell.is_divided
    state = LoopState(strategy.placement, model=model)
    kept(memory, state)
    (record_size, *_) = [len(record.data) for record in opened(memory)]
    assert record_size < 1.5 * numbers.nbytes  # each part once
    model.set_weights([numbers * 0])
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    np.testing.assert_array_equal(model.get_weights()[0], numbers)
    assert cell.is_divided


@pytest.mark.parametrize("zero", [0, 3])
def test_a_restored_state_does_not_change_with_the_memory(memory, zero):
    strategy = unison.ModelParallelStrategy(["CPU:0", "CPU:1"], mesh={"batch": 2}, zero=zero)
    numbers = np.random.default_rng(1).random((256, 256), np.float32)
    with strategy.scope():
        layer = keras.layers.Dense(256, use_bias=False)
        model = keras.Sequential([keras.Input((256,)), layer])
    model.set_weights([numbers])
    state = LoopState(strategy.placement, model=model)
    kept(memory, state)
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    overwrite(memory)
    np.testing.assert_array_equal(model.get_weights()[0], numbers)


def test_a_state_at_a_home_on_the_host_does_not_change_with_the_memory(memory, monkeypatch):
    """As that of replicas on GPUs, whose home is a CPU device."""
    strategy = unison.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        value = unison.Variable(np.arange(4096.0, dtype=np.float32))
    monkeypatch.setattr(strategy.placement, "is_host", False)
    state = LoopState(strategy.placement, value=value)
    kept(memory, state)
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    overwrite(memory)
    np.testing.assert_array_equal(np.asarray(value), np.arange(4096.0))


def overwrite(memory):
    """Replaces both records by further ones."""
    for step in (100, 101):
        size = memory.own.capacity
        memory.own.begin(size)[:] = bytes(size)
        memory.own.commit(step, {})


def opened(memory):
    with memory.own.records() as records:
        yield from records


@pytest.fixture
def regrouped(monkeypatch):
    """Makes this process one of two, after it has been the only one."""

    def regroup():
        monkeypatch.setattr("unison.runtime.process_group.count", lambda: 2)

    return regroup


@pytest.mark.parametrize(
    ("aggregation", "dtype", "copies", "value"),
    [
        ("SUM", "float32", [1.0, 2.0], 3.0),
        ("SUM", "int32", [1, 2], 3),
        ("MEAN", "float32", [1.0, 2.0], 1.5),
        ("ONLY_FIRST_REPLICA", "float32", [1.0, 2.0], 1.0),
    ],
)
def test_copies_are_combined_for_another_number_of_replicas(
    memory, strategy, regrouped, aggregation, dtype, copies, value
):
    def made(strategy):
        with strategy.scope():
            return unison.Variable(
                np.zeros((), dtype),
                synchronization=ON_READ,
                aggregation=unison.VariableAggregation[aggregation],
            )

    own = made(strategy)
    own.cell.put(strategy.placement.spread(np.array(copies, dtype)))
    kept(memory, LoopState(strategy.placement, value=own))
    regrouped()
    more = unison.MirroredStrategy([f"CPU:{index}" for index in range(4)])
    new = made(more)
    state = LoopState(more.placement, value=new)
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    assert np.asarray(new) == value
    assert len(new.cell.copies()) == 4


def test_copies_without_a_common_value_are_those_of_the_first_replicas(memory, strategy, regrouped):
    def made(strategy):
        with strategy.scope():
            return unison.Variable(0.0, synchronization=ON_READ)

    own = made(strategy)
    own.cell.put(strategy.placement.spread(np.array([1.0, 2.0], np.float32)))
    kept(memory, LoopState(strategy.placement, value=own))
    regrouped()
    more = unison.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    new = made(more)
    state = LoopState(more.placement, value=new)
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    np.testing.assert_array_equal(new.cell.copies(), [1.0, 2.0, 1.0])


@pytest.mark.parametrize(("devices", "zero"), [(4, 3), (1, 0)])
def test_divided_variables_are_put_together_for_another_division(memory, regrouped, devices, zero):
    numbers = np.random.default_rng(1).random((64, 64), np.float32)

    def made(count, zero):
        names = [f"CPU:{index}" for index in range(count)]
        strategy = unison.ModelParallelStrategy(names, mesh={"batch": count}, zero=zero)
        with strategy.scope():
            layer = keras.layers.Dense(64, use_bias=False)
            model = keras.Sequential([keras.Input((64,)), layer])
        return LoopState(strategy.placement, model=model), model

    state, model = made(2, 3)
    model.set_weights([numbers])
    kept(memory, state)
    regrouped()
    state, model = made(devices, zero)
    assert InMemoryCheckpoints(memory).enter(state) is Entry.RESUMED
    np.testing.assert_array_equal(model.get_weights()[0], numbers)


def test_a_part_that_is_missing_is_an_error(memory, regrouped, monkeypatch):
    strategy = unison.ModelParallelStrategy(["CPU:0", "CPU:1"], mesh={"batch": 2}, zero=3)
    with strategy.scope():
        layer = keras.layers.Dense(64, use_bias=False)
        model = keras.Sequential([keras.Input((64,)), layer])
    state = LoopState(strategy.placement, model=model)
    parts = memory_record._own_parts
    monkeypatch.setattr(memory_record, "_own_parts", lambda stored: parts(stored)[-1:])
    monkeypatch.setattr(memory_record.PartsSnapshot, "add", lambda *given: None)
    kept(memory, state)
    regrouped()
    with pytest.raises(unison.errors.DataLossError, match="expected all parts of a variable"):
        InMemoryCheckpoints(memory).enter(state)


def test_a_state_that_this_host_has_in_part_is_not_found(memory, strategy, regrouped):
    with strategy.scope():
        count = unison.Variable(0.0, aggregation=SUM)
    state = LoopState(strategy.placement, count=count)
    regrouped()
    kept(memory, state)  # the record of the first of two workers
    after = InMemoryCheckpoints(memory._replace(place=0))
    process_group_count = "unison.runtime.process_group.count"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_group_count, lambda: 3)
        assert after.enter(state) is Entry.NEW


def test_objects_with_state_come_back(memory, strategy):
    class Position:
        def __init__(self):
            self.value = {"epoch": 0, "order": np.arange(0), "name": None}

        def get_state(self):
            return self.value

        def set_state(self, state):
            self.value = state

    position = Position()
    state = LoopState(strategy.placement, position=position)
    position.value = {"epoch": 3, "order": np.arange(5), "name": "train"}
    kept(memory, state)
    position.value = None
    InMemoryCheckpoints(memory).enter(state)
    assert (position.value["epoch"], position.value["name"]) == (3, "train")
    np.testing.assert_array_equal(position.value["order"], np.arange(5))


def test_a_loop_before_that_of_the_state_runs_again(memory, strategy):
    first, second = (LoopState(strategy.placement, value=unison.Variable(0.0)) for _ in range(2))
    checkpoints = InMemoryCheckpoints(memory)
    for state in (first, second):
        with checkpoints.loop() as is_outermost:
            assert is_outermost
            checkpoints.enter(state)
            run_steps(checkpoints, state, 30)
    kept_steps = memory.own.steps()
    after = InMemoryCheckpoints(memory)
    with after.loop():
        assert after.enter(first) is Entry.NEW
        run_steps(after, first, 30)
        assert memory.own.steps() == kept_steps  # that of the second loop is still needed
    with after.loop():
        assert after.enter(second) is Entry.RESUMED
        assert after.steps == kept_steps[0]
    with after.loop():
        assert after.enter(second) is Entry.NEW  # what follows begins


def test_an_inner_loop_is_none_of_its_own(memory, strategy):
    checkpoints = InMemoryCheckpoints(memory)
    state = LoopState(strategy.placement, value=unison.Variable(0.0))
    with checkpoints.loop():
        checkpoints.enter(state)
        with checkpoints.loop() as is_outermost:
            assert not is_outermost
        run_steps(checkpoints, state, 30)
    after = InMemoryCheckpoints(memory)
    with after.loop():
        assert after.enter(state) is Entry.RESUMED


def test_arrays_of_objects_are_those_of_the_moment(memory, strategy):
    class Counter:
        counts = np.zeros(3)

        def get_state(self):
            return {"counts": self.counts}

        def set_state(self, state):
            self.counts = state["counts"]

    counter = Counter()
    state = LoopState(strategy.placement, counter=counter)
    checkpoints = InMemoryCheckpoints(memory)
    checkpoints.enter(state)
    for _ in range(40):
        if checkpoints.is_due:
            checkpoints.keep(state)
        checkpoints.steps += 1
        counter.counts += 1  # in place, while it may still be written
    checkpoints._writer.wait()
    after = InMemoryCheckpoints(memory)
    assert after.enter(state) is Entry.RESUMED
    np.testing.assert_array_equal(counter.counts, [after.steps] * 3)


@pytest.mark.parametrize("restored", [[2, 5], [2, 6], [3, 0]])
def test_a_later_state_that_the_program_has_restored_is_kept(memory, strategy, restored):
    variable = unison.Variable(0.0)
    state = LoopState(strategy.placement, value=variable)
    kept(memory, state, position=[2, 5])
    variable.assign(7.0)
    entry = InMemoryCheckpoints(memory).enter(state, lambda position: restored > position)
    is_later = restored != [2, 5]
    assert entry is (Entry.NEW if is_later else Entry.RESUMED)
    assert float(variable) == (7.0 if is_later else 0.0)
    assert bool(memory.own.steps()) != is_later  # an older one would come back at the next start


def test_a_state_of_a_job_of_another_size_is_not_restored(memory, strategy, monkeypatch):
    state = LoopState(strategy.placement, value=unison.Variable(0.0))
    monkeypatch.setattr(in_memory.process_group, "count", lambda: 3)
    kept(memory, state)
    monkeypatch.undo()
    assert InMemoryCheckpoints(memory).enter(state) is Entry.NEW


def test_a_state_of_other_shapes_is_refused(memory, strategy):
    kept(memory, LoopState(strategy.placement, value=unison.Variable([1.0, 2.0])))
    other = LoopState(strategy.placement, value=unison.Variable([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="has shape"):
        InMemoryCheckpoints(memory).enter(other)


# -- how often ---------------------------------------------------------------------------------


def interval_after(memory, measured):
    checkpoints = InMemoryCheckpoints(memory)
    for step, each in enumerate(measured):
        checkpoints._take_in(step, each)
    return checkpoints._interval()


def test_the_interval_is_that_of_the_wanted_share(memory):
    assert interval_after(memory, []) == in_memory._FIRST_INTERVAL
    # 5 ms beside steps of 10 ms: 50 steps for 1 %.
    assert interval_after(memory, [[[0.005, 0.01]]]) == 50
    double = memory._replace(overhead=0.02)
    assert interval_after(double, [[[0.005, 0.01]]]) == 25


def test_the_interval_is_that_of_the_worker_which_needs_the_longest(memory):
    measured = [[0.005, 0.01], [0.02, 0.01], [0.001, 0.01]]
    assert interval_after(memory, [measured]) == 200


def test_the_cost_is_that_of_this_worker_at_the_interval_that_is_kept(memory):
    checkpoints = InMemoryCheckpoints(memory)
    assert checkpoints.cost() is None
    checkpoints.steps = 40
    checkpoints._begin_interval(20)  # it grows to 200
    checkpoints._take_in(40, [[0.005, 0.01], [0.02, 0.01]])
    checkpoints.steps = 50
    assert checkpoints.cost() == pytest.approx((10, 20, 0.025))


def test_a_single_slow_checkpoint_and_steps_with_compilation_do_not_count(memory):
    usual, disturbed, compiling = [[0.005, 0.01]], [[0.9, 0.01]], [[0.005, 8.0]]
    assert interval_after(memory, [compiling, disturbed, usual]) == 50


def test_there_is_a_step_between_two_checkpoints(memory):
    assert interval_after(memory, [[[1e-6, 10.0]]]) == 1


def test_intervals_grow_slowly(memory, strategy, monkeypatch):
    state = LoopState(strategy.placement, value=unison.Variable(0.0))
    monkeypatch.setattr(InMemoryCheckpoints, "_interval", lambda self: 10_000)
    checkpoints = InMemoryCheckpoints(memory)
    checkpoints.enter(state)
    kept_before = []
    for _ in range(200):
        if checkpoints.is_due:
            kept_before.append(checkpoints.steps)
            checkpoints.keep(state)
        checkpoints.steps += 1
    checkpoints._writer.wait()
    assert kept_before == [1, 9, 25, 57, 121]


# -- the process -------------------------------------------------------------------------------


def test_a_host_has_slots_for_each_worker():
    with HostMemory(3, overhead=0.5) as host:
        assert len({each for slots in host.slots for each in slots.descriptors}) == 6
        told = {worker: host.environment(worker) for worker in range(3)}
    assert len({str(each) for each in told.values()}) == 3


def test_a_process_tells_its_modules_and_variables(monkeypatch):
    monkeypatch.setenv("JAX_UNISON_EXAMPLE", "set here")
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    told = about_process()
    assert __name__ not in told["modules"]  # it is the program's own
    assert told["environment"]["JAX_UNISON_EXAMPLE"] == "set here"
    assert {"numpy", "keras", "unison"} <= set(told["modules"])
    assert told["modules"].index("numpy") < told["modules"].index("unison.train.in_memory")
    assert "__main__" not in told["modules"]
