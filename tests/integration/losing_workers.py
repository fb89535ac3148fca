"""Programs of workers of which one is lost; `test_lost_workers.py` runs each in several processes.

    python losing_workers.py PROGRAM TIMEOUT_SECONDS IMPLEMENTATION

What a worker catches it prints, so that the test can look at it.
"""

from __future__ import annotations

import os
import signal
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np

import unison
from unison.errors import OpError
from unison.runtime import liveness, process_group
from unison.runtime.liveness import watcher
from unison.runtime.liveness.failure_detector import BEAT

#: Seconds in which all have heard where all are.
HEARD = 3 * BEAT


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def looping():
    while True:
        pass


def returning():
    sys.exit(0)


def raising():
    raise ValueError("one is unwell")


def steps(strategy, who, what, count=6, pause=0.0):
    """Training steps; before the fourth, all pause, and `who` does something else."""
    with strategy.scope():
        weight = unison.Variable(
            np.ones(1000, np.float32), aggregation=unison.VariableAggregation.MEAN
        )

    def train_step(x):
        total = unison.get_replica_context().all_reduce("SUM", weight * x)
        weight.assign(total)
        return total

    for step in range(count):
        if step == 3:
            time.sleep(pause)
            if jax.process_index() == who:
                what()
        total = strategy.run(train_step, (np.float32(0.5),))
    return float(strategy.reduce("SUM", total, axis=None)[0])


def interrupted():
    signal.raise_signal(signal.SIGINT)


def first_of_three_is_killed(strategy):
    steps(strategy, 0, killed)


def second_of_three_is_killed(strategy):
    told = []
    liveness.on_failure(told.append)
    try:
        steps(strategy, 1, killed)
    finally:
        last = time.monotonic() + 30
        while not told and time.monotonic() < last:  # another thread calls
            time.sleep(0.01)
        assert [str(error) for error in told] == [str(liveness.failure())]


def one_raises(strategy):
    steps(strategy, 1, raising)


def a_function_on_the_host_fails_on_one_replica(strategy):
    with strategy.scope():
        total = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
    failing = 2  # the first replica of the second worker, whose other one waits for it

    def unwell(index):
        if index == failing:
            raising()
        return np.float32(1)

    def train_step():
        index = unison.get_replica_context().replica_id_in_sync_group
        one = jax.pure_callback(unwell, jax.ShapeDtypeStruct((), np.float32), index)
        total.assign_add(one)

    strategy.run(train_step)


def one_is_interrupted(strategy):
    steps(strategy, 1, interrupted)


def one_is_stopped(strategy):
    steps(strategy, 1, stopped, pause=HEARD)


def the_first_is_stopped(strategy):
    steps(strategy, 0, stopped, pause=HEARD)


def nothing_releases():
    """Collectives go on waiting when a worker is lost, as those between GPUs do."""
    watcher.shut_down = lambda listeners: 0


def one_is_stopped_and_nothing_released(strategy):
    nothing_releases()
    steps(strategy, 1, stopped, pause=HEARD)


def a_result_is_read_and_nothing_released(strategy):
    nothing_releases()

    def step(x):
        return unison.get_replica_context().all_reduce("SUM", x)

    strategy.run(step, (np.float32(1),))
    if jax.process_index() == 1:
        time.sleep(HEARD)
        stopped()
    float(strategy.experimental_local_results(strategy.run(step, (np.float32(1),)))[0])


def one_loops(strategy):
    steps(strategy, 0, looping)


def one_exits(strategy):
    steps(strategy, 1, returning)


def one_takes_fewer_steps(strategy):
    steps(strategy, None, None, count=6 - jax.process_index())


def fit(strategy, units=4, at_end=lambda batch: None):
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(1)], name="net")
        model.compile("sgd", "mse")

    class AtEnd(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            at_end(batch)

    data = np.ones((64, 3), np.float32), np.ones((64, 1), np.float32)
    model.fit(*data, batch_size=4, epochs=3, verbose=0, callbacks=[AtEnd()])


def one_ends_in_keras(strategy):
    def end(batch):
        if batch == 5 and jax.process_index() == 1:
            os._exit(3)

    fit(strategy, at_end=end)


def models_differ(strategy):
    fit(strategy, units=4 + jax.process_index())


def one_is_killed_in_an_agreement(strategy):
    process_group.all_gather_json(0, "Whether all are there")
    if jax.process_index() == 0:
        time.sleep(3)  # the other one has heard that all are there, and waits again
        killed()
    process_group.all_gather_json(1, "The number of the day")


def one_exits_in_an_agreement(strategy):
    process_group.all_gather_json(0, "Whether all are there")
    if jax.process_index() == 0:
        time.sleep(3)  # the other one has heard that all are there, and waits again
        returning()
    process_group.all_gather_json(1, "The number of the day")


def shapes_differ(strategy):
    value = np.ones(2 + jax.process_index(), np.float32)

    def step_of_shapes(x):
        return unison.get_replica_context().all_reduce("SUM", x)

    strategy.run(step_of_shapes, (value,))


def orders_differ(strategy):
    def first(x):
        return unison.get_replica_context().all_reduce("SUM", x)

    def second(x):
        return unison.get_replica_context().all_reduce("MAX", x)

    for function in (first, second):
        strategy.run(function, (np.float32(1),))
    time.sleep(1)
    order = (first, second) if jax.process_index() == 0 else (second, first)
    for function in order:
        print(strategy.run(function, (np.float32(1),)))
        time.sleep(3)


def all_end_one_by_one(strategy):
    steps(strategy, None, None)
    time.sleep(3 * jax.process_index())


def the_first_ends_last(strategy):
    steps(strategy, None, None)
    time.sleep(3 * (1 - jax.process_index()))


def no_one_reads_the_last_step(strategy):
    def step(x):
        return unison.get_replica_context().all_reduce("SUM", x)

    for _ in range(20):
        strategy.run(step, (np.ones(100000, np.float32),))


def nobody_catches(strategy):
    steps(strategy, 1, killed)


if __name__ == "__main__":
    name, timeout, implementation = sys.argv[1:]
    options = unison.CommunicationOptions(
        timeout_seconds=float(timeout), implementation=implementation
    )
    strategy = unison.MultiWorkerMirroredStrategy(communication_options=options)
    try:
        globals()[name](strategy)
    except (OpError, jax.errors.JaxRuntimeError) as caught:  # the latter: of an array that is read
        if name == "nobody_catches":
            raise
        error = caught if isinstance(caught, OpError) else liveness.failure()
        print(f"CAUGHT {type(error).__name__}: {error}", flush=True)
    print("END", flush=True)
