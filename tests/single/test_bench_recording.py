"""`unison bench` takes the time of a program's steps without changing the program."""

import numpy as np
import pytest

import unison
from unison.benching import loops
from unison.benching.loops import Loop
from unison.benching.recording import AllMeasured, Recorder
from unison.runtime.devices import local_devices
from unison.strategies import observing


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(loops, "_ALONE_SECONDS", 0.0)
    recorder = Recorder(warmup=2, steps=5)
    observing.observe_steps(recorder)
    yield recorder
    observing.observe_steps(None)


@pytest.fixture(scope="module")
def strategy():
    return unison.MirroredStrategy(local_devices()[:2])


def train_until_measured(strategy, step, *args):
    def program():
        for _ in range(1000):
            strategy.run(step, args=args)

    with pytest.raises(AllMeasured) as end:
        program()
    assert end.value.code == 0


def test_a_loop_of_run_is_ended_when_it_is_measured(recorder, strategy):
    batch = unison.PerReplica([np.ones((3, 2), np.float32)] * 2)

    def step(x):
        return unison.get_replica_context().all_reduce("sum", x.sum())

    train_until_measured(strategy, step, batch)
    record = recorder.record()
    assert record.loop.endswith("step")
    assert (record.replicas, record.examples) == (2, 6)
    assert (len(record.launches), record.paced_steps) == (20, 20)
    assert len(record.single) == 7
    assert record.alone > 0
    assert record.memory > 2**20


def test_a_step_that_returns_nothing_is_measured_by_its_variables(recorder, strategy):
    with strategy.scope():
        count = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)

    def step():
        count.assign_add(1.0)

    train_until_measured(strategy, step)
    record = recorder.record()
    assert record.examples is None
    assert all(seconds > 0 for _, seconds in record.launches)
    # Computing alone assigns nothing.
    assert float(count.value()) == 2 * record.steps


def test_a_fit_is_measured_with_the_steps_that_run_together(recorder, strategy):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    x, y = np.ones((64, 4), np.float32), np.ones((64, 1), np.float32)
    with pytest.raises(AllMeasured):
        model.fit(x, y, batch_size=16, epochs=1000, verbose=0, validation_data=(x, y))
    record = recorder.record()
    assert (record.examples, record.loop) == (16, f"fit of {model.name}")
    # The four steps of an epoch run as one program.
    assert {steps for steps, _ in record.launches} == {4}
    assert record.alone > 0


def test_what_does_not_end_by_itself_tells_what_it_has(recorder, strategy):
    for _ in range(10):
        strategy.run(lambda: unison.get_replica_context().replica_id_in_sync_group)
    record = recorder.record()
    assert record.alone is None
    assert record.steps <= 10


def test_without_a_step_there_is_no_record(recorder):
    assert recorder.record() is None


def test_nobody_looks_unless_somebody_measures(strategy):
    assert observing.step_observer is None


def loop_of(done):
    """A loop whose launches, after the first one, are done at those times."""
    times = iter(done)

    def watch(launch, arrays):
        launch.done = next(times)

    placement = unison.MirroredStrategy(local_devices()[:1]).placement
    loop = Loop("a loop", placement, warmup=2, steps=1000, watch=watch)
    for _ in range(len(done) + 1):
        launch(loop)
    return loop


def launch(loop, steps=1):
    with loop.calling():
        loop.launched(steps, ())


def test_the_pace_begins_when_the_warm_up_ends():
    loop = loop_of([10.0, 10.5, 12.0])
    assert loop.steps == 4
    assert loop.record().launches == [(1, 0.5), (1, 1.5)]


def test_the_time_of_other_steps_is_none_of_the_loops(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 20.0])
    monkeypatch.setattr(loops, "perf_counter", lambda: next(now))
    loop = loop_of([10.0, 10.5])
    loop._watch = lambda launch, arrays: setattr(launch, "done", 17.0)
    loop.interrupt()
    launch(loop)  # begins at 20.0
    loop._launches[-1].done = 20.25
    assert loop.record().launches == [(1, 0.5), (1, 0.25)]


def test_steps_that_run_together_are_one_launch():
    loop = loop_of([0.0, 1.0])
    loop._watch = lambda launch, arrays: setattr(launch, "done", 3.0)
    with loop.calling():
        pass
    launch(loop, steps=3)
    assert loop.record().launches == [(1, 1.0), (3, 2.0)]


def test_what_cannot_be_computed_alone_is_said():
    loop = loop_of([1.0, 2.0])

    def fails():
        raise ValueError("no part of its own")

    loop.measure_alone(fails)
    assert loop.record().why_not == "ValueError: no part of its own"
    assert loop.is_known
