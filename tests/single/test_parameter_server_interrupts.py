"""Signal handlers that raise while the coordinator talks to parameter servers and workers."""

import signal
import threading

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from parameter_server_threads import clusters, until
from unison.errors import CancelledError
from unison.keras.step import CompiledStep
from unison.net.array_messages import Connection
from unison.parameter_server import FixedShardsPartitioner
from unison.parameter_server.store import Store


class AlarmError(Exception):
    """What the handler raises."""


@pytest.fixture
def started():
    with clusters() as start:
        yield start


@pytest.fixture
def alarm():
    """Raises the signal, whose handler raises an error."""

    def raising(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGUSR1, raising)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def alarm_in(monkeypatch, alarm):
    """Has a method send the signal, the first time that the main thread has called it."""

    def set_up(owner, name):
        method = getattr(owner, name)
        left = [True]

        def wrapped(*args, **kwargs):
            result = method(*args, **kwargs)
            if left and threading.current_thread() is threading.main_thread():
                left.clear()
                alarm()
            return result

        monkeypatch.setattr(owner, name, wrapped)

    return set_up


def two_servers(started):
    return started(workers=1, servers=2, partitioner=FixedShardsPartitioner(2))


@pytest.mark.parametrize("method", ["send", "wait", "receive"])
def test_the_answer_to_an_interrupted_read_is_not_taken_for_the_next_one(started, alarm_in, method):
    strategy, _ = two_servers(started)
    with strategy.scope():
        first = unison.Variable(np.full((4, 2), 1, np.float32))
        second = unison.Variable(np.full((4, 2), 2, np.float32))
    alarm_in(Connection, method)
    with pytest.raises(AlarmError):
        first.numpy()
    np.testing.assert_array_equal(second.numpy(), np.full((4, 2), 2))
    np.testing.assert_array_equal(first.numpy(), np.full((4, 2), 1))


@pytest.mark.parametrize("method", ["send", "wait", "receive"])
def test_an_interrupted_assignment_reaches_all_shards(started, alarm_in, method):
    strategy, _ = two_servers(started)
    with strategy.scope():
        variable = unison.Variable(np.zeros((4, 2), np.float32))
    alarm_in(Connection, method)
    with pytest.raises(AlarmError):
        variable.assign(np.ones((4, 2), np.float32))
    np.testing.assert_array_equal(variable.numpy(), np.ones((4, 2)))


def test_an_interrupted_program_of_the_coordinator_writes_all_its_variables(started, alarm_in):
    strategy, _ = two_servers(started)
    with strategy.scope():
        variables = [unison.Variable(np.zeros((4, 2), np.float32)) for _ in range(3)]

    def step():
        for variable in variables:
            variable.assign_add(jnp.ones((4, 2)))

    for _ in range(4):
        strategy.run(step)
    alarm_in(Store, "assign")
    with pytest.raises(AlarmError):
        strategy.run(step)
    assert [variable.numpy()[0, 0] for variable in variables] == [5.0, 5.0, 5.0]


def test_an_interrupted_wait_for_functions_leaves_them_running(started, alarm_in):
    strategy, coordinator = started(workers=2, servers=1)
    with strategy.scope():
        total = unison.Variable(0.0)
    values = [coordinator.schedule(lambda: total.assign_add(1.0)) for _ in range(20)]
    alarm_in(type(coordinator._dispatcher.queue), "_is_empty")
    with pytest.raises(AlarmError):
        coordinator.join()
    coordinator.join()
    assert float(total.numpy()) == 20.0
    assert all(value.is_ready for value in values)


def test_an_interrupted_fetch_can_be_repeated(started, alarm_in):
    strategy, coordinator = started(workers=1, servers=1)
    with strategy.scope():
        total = unison.Variable(0.0)
    value = coordinator.schedule(lambda: total.assign_add(1.0))
    alarm_in(threading.Event, "wait")
    with pytest.raises(AlarmError):
        value.fetch()
    assert float(value.fetch()) == 1.0


def model_on(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


X, Y = np.ones((64, 4), np.float32), np.ones((64, 2), np.float32)


def test_an_interrupted_fit_trains_no_further(started, alarm):
    strategy, coordinator = started(workers=1, servers=1)
    model = model_on(strategy)
    model.fit(X, Y, 8, verbose=0)

    def interrupt(batch, logs):
        if batch == 30:
            alarm()

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(AlarmError):
        model.fit(X, Y, 8, steps_per_epoch=5000, verbose=0, callbacks=[callback])
    steps = int(model.optimizer.iterations.numpy())
    assert steps <= 8 + 31
    assert coordinator.done()
    model.fit(X, Y, 8, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == steps + 8


def test_a_fit_that_is_interrupted_where_it_cancels_its_calls_trains_no_further(
    started, alarm, monkeypatch
):
    strategy, coordinator = started(workers=1, servers=1)
    model = model_on(strategy)
    model.fit(X, Y, 8, verbose=0)

    def interrupt(*anything):
        alarm()

    monkeypatch.setattr("unison.parameter_server.loops.ScheduledLoop.__exit__", interrupt)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(AlarmError):
        model.fit(X, Y, 8, steps_per_epoch=5000, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.numpy()) <= 8 + 1
    assert coordinator.done()


def test_steps_after_an_interrupted_evaluation_are_kept(started, alarm_in):
    strategy, _ = started(workers=1, servers=1)
    model = model_on(strategy)
    model.fit(X, Y, 8, verbose=0)
    loss = model.evaluate(X, 3 * Y, 8, verbose=0)

    def interrupted_evaluation():
        alarm_in(CompiledStep, "__call__")
        with pytest.raises(AlarmError):
            model.evaluate(X, Y, 8, verbose=0)

    interrupted_evaluation()
    assert model.evaluate(X, 3 * Y, 8, verbose=0) == loss  # without the interrupted one's batch
    interrupted_evaluation()
    model.fit(X, Y, 8, epochs=2, verbose=0)
    trained = model.get_weights()
    model.evaluate(X, Y, 8, verbose=0)
    for weight, expected in zip(model.get_weights(), trained, strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_calls_of_an_interrupted_loop_are_cancelled_and_those_of_others_run(started):
    strategy, coordinator = started(workers=1, servers=1)
    gate = threading.Event()
    with strategy.scope():
        total = unison.Variable(0.0)

    def first():
        gate.wait(60)  # while it is traced
        return total.assign_add(1.0)

    begun = coordinator.schedule_in("loop", first)
    until(lambda: coordinator._dispatcher.queue.begun == 1, "a worker begins the first call")
    waiting = coordinator.schedule_in("loop", lambda: total.assign_add(10.0))
    other = coordinator.schedule(lambda: total.assign_add(100.0))
    coordinator.call_off("loop")
    gate.set()
    coordinator.join()
    assert float(total.numpy()) == 101.0
    assert begun.is_ready
    assert other.is_ready
    with pytest.raises(CancelledError, match="was cancelled"):
        waiting.fetch()
