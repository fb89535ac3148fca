"""Training loops that signals interrupt at random moments, and what must hold after each.

`UNISON_CPU_DEVICES=2 python tests/interruption_program.py FORM SIGNALS SEED [LOOP ...]` interrupts
loops, again and again, by an alarm whose handler raises. The form is how Keras comes to the program
(see `keras_forms`). Each time all variables must be readable
and hold what an undisturbed training has after as many steps as they say; the loop then resumes
from there. It prints for each loop how many interruptions came in which function of Unison.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp
import numpy as np

import unison
import unison.tf as tf
from interrupted_loops import HardFit, HardFunction, HardFunctionOfIterator, Loop
from parameter_server_threads import clusters
from unison.cells import VariableAggregation, VariableSynchronization
from unison.data import Dataset
from unison.parameter_server import FixedShardsPartitioner, read_rows, shards_of

#: No loop lets metrics add up over more batches.
MOST_BATCHES = 10
#: A loop that has not ended so many seconds after a signal is interrupted once more.
SECONDS_TO_END = 5.0
#: A loop is made anew after so many interruptions, so that some come while it is built.
ROUNDS = 12
SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN


#: One of `keras_forms.FORMS`.
FORM = sys.argv[1] if __name__ == "__main__" else "keras"


def keras_of_the_form() -> Any:
    """Returns Keras; first before all scopes, or in one, by the form."""
    return tf.keras if FORM == "tf" else importlib.import_module("keras")


class Interrupted(BaseException):
    """Raised by a signal handler."""


def mirrored(replicas: int) -> Any:
    return unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


class Variables(Loop):
    """A loop of `strategy.run` over variables of several kinds."""

    def __init__(self, strategy: Any):
        self.strategy = strategy
        with strategy.scope():
            self.variables = {
                "count": unison.Variable(0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA),
                "sum": unison.Variable(np.zeros(100, np.float32), aggregation=SUM),
                "mean": unison.Variable(np.zeros((3, 4), np.float32), aggregation=MEAN),
                "own": unison.Variable(
                    0.0, synchronization=VariableSynchronization.ON_READ, aggregation=SUM
                ),
                "last": unison.Variable(np.zeros(5, np.float32), aggregation=MEAN),
            }

    def step(self, x: Any) -> Any:
        variables = self.variables
        variables["sum"].assign_add(jnp.full(100, jnp.sum(x)))
        variables["mean"].assign_add(jnp.full((3, 4), jnp.mean(x)))
        variables["own"].assign_add(jnp.sum(x))
        variables["last"].assign(jnp.full(5, variables["count"].value(), jnp.float32))
        variables["count"].assign_add(1)
        return variables["count"].value()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.strategy.run(self.step, args=(np.ones(4, np.float32),))

    def steps(self) -> int:
        return int(self.variables["count"].numpy())

    def state(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def save(self, folder: pathlib.Path) -> None:
        unison.train.Checkpoint(**self.variables).write(folder / "checkpoint")


class InFunction(Variables):
    """The same in a `tf.function` that runs several steps."""

    def __init__(self, strategy: Any):
        super().__init__(strategy)
        self.train = tf.function(lambda: [strategy.run(self.step, args=(np.ones(4, "f"),))])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.train()


class Keras(Loop):
    """Keras' `fit`. The loss is linear in the weights, so that no step is like the one before."""

    steps_per_epoch = 20

    def __init__(
        self,
        strategy: Any,
        callback: bool = False,
        own_step: bool = False,
        as_dataset: bool = False,
        all_rows_alike: bool = False,
        **compiled: Any,
    ):
        rng = np.random.default_rng(0)
        self.x = rng.uniform(0.1, 1.0, (8 * self.steps_per_epoch, 6)).astype(np.float32)
        self.x[8:] = np.tile(self.x[:8], (self.steps_per_epoch - 1, 1))  # all batches alike
        if all_rows_alike:  # workers take any of them
            self.x[:] = self.x[0]
        self.y = np.zeros((len(self.x), 1), np.float32)
        dataset = Dataset.from_tensor_slices((self.x, self.y)).batch(8).prefetch(2)
        self.data = {"x": dataset} if as_dataset else {"x": self.x, "y": self.y, "batch_size": 8}
        with strategy.scope():
            keras = keras_of_the_form()
            keras.utils.set_random_seed(1)
            inputs = keras.Input((6,))
            outputs = keras.layers.Dense(1)(keras.layers.Dense(256, name="hidden")(inputs))
            self.model = (taped_model() if own_step else keras.Model)(inputs, outputs)
            metrics = [] if own_step else ["mae"]
            self.model.compile(keras.optimizers.Adam(0.01), linear, metrics=metrics, **compiled)
        # A callback that looks at every step: steps then run one by one.
        self.callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=look)] * callback

    def run(self, steps: int) -> None:
        epochs = max(1, steps // self.steps_per_epoch)
        self.model.fit(
            **self.data, epochs=epochs, shuffle=False, verbose=0, callbacks=self.callbacks
        )

    def step_alone(self) -> None:
        self.model.train_on_batch(self.x[:8], self.y[:8])

    def steps(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def state(self) -> dict[str, np.ndarray]:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        # Keras numbers the names of a process.
        values = {f"variable {place}": np.asarray(v) for place, v in enumerate(variables)}
        return values | {"metrics are readable": np.float32(bool(self.read_metrics()))}

    def read_metrics(self) -> bool:
        return all(np.all(np.isfinite(np.asarray(v))) for v in self.model.metrics_variables)

    def save(self, folder: pathlib.Path) -> None:
        self.model.save_weights(folder / "model.weights.h5")
        self.model.save(folder / "model.keras")


class OnBatches(Keras):
    """`train_on_batch`."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model.train_on_batch(self.x[:8], self.y[:8])


class Evaluating(Keras):
    """`fit` of an epoch, and evaluation and prediction for most of the time."""

    def run(self, steps: int) -> None:
        for _ in range(0, steps, self.steps_per_epoch):
            super().run(self.steps_per_epoch)
            for _ in range(4):
                self.model.evaluate(self.x, self.y, 8, verbose=0)
                self.model.predict(self.x, 8, verbose=0)


def look(batch: int, logs: Any) -> None:
    """Looks at a step."""


def linear(y_true: Any, y_pred: Any) -> Any:
    return keras_of_the_form().ops.mean(y_pred - y_true, axis=-1)


class Scheduled(Loop):
    """Functions that a coordinator schedules on workers, with variables on parameter servers."""

    #: How many calls wait at a time.
    ahead = 8

    def __init__(self, cluster: dict[str, Any]):
        self.cluster = contextlib.ExitStack()
        start = self.cluster.enter_context(clusters())
        self.strategy, self.coordinator = start(**cluster)
        with self.strategy.scope():
            self.variables = {
                "count": unison.Variable(0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA),
                "table": unison.Variable(np.zeros((6, 3), np.float32), aggregation=SUM),
                "large": unison.Variable(np.zeros((200, 100), np.float32), aggregation=SUM),
            }

    def step(self, x: Any) -> Any:
        variables = self.variables
        variables["table"].assign_add(jnp.full((6, 3), jnp.sum(x)))
        variables["large"].assign_add(jnp.full((200, 100), jnp.mean(x)))
        variables["count"].assign_add(1)
        return variables["count"].value()

    def run(self, steps: int) -> None:
        x = np.ones(4, np.float32)
        while steps > 0:
            count = min(steps, self.ahead)
            values = [self.coordinator.schedule(self.step, args=(x,)) for _ in range(count)]
            self.coordinator.join()
            for value in values:
                value.fetch()
            steps -= count

    def steps(self) -> int:
        self.coordinator.join()
        return int(self.variables["count"].numpy())

    def state(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def save(self, folder: pathlib.Path) -> None:
        unison.train.Checkpoint(**self.variables).write(folder / "checkpoint")

    def close(self) -> None:
        self.cluster.close()


class Assigned(Scheduled):
    """The same variables, which the coordinator itself reads, assigns and updates by a program."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.strategy.run(self.step, args=(np.ones(4, np.float32),))
            self.assign()

    def assign(self) -> None:
        """Reads a value and assigns it again: a step is all of it or nothing."""
        for variable in self.variables.values():
            variable.assign(variable.numpy())
        for part in shards_of(self.variables["large"]):
            part.assign(part.numpy())
        rows = read_rows(self.variables["table"], [5, 0, 5])
        assert rows.shape == (3, 3), rows.shape


class OnServers(Keras):
    """`fit` with variables on parameter servers."""

    def __init__(self, cluster: dict[str, Any]):
        self.cluster = contextlib.ExitStack()
        strategy, _ = self.cluster.enter_context(clusters())(**cluster)
        super().__init__(strategy, all_rows_alike=True)

    @staticmethod
    def undisturbed() -> Keras:
        return Keras(unison.OneDeviceStrategy("CPU:0"), all_rows_alike=True)

    def close(self) -> None:
        self.cluster.close()


class HardOnServers(HardFit):
    """The same of a hard model."""

    tolerance = Loop.tolerance

    def __init__(self, cluster: dict[str, Any]):
        self.cluster = contextlib.ExitStack()
        strategy, _ = self.cluster.enter_context(clusters())(**cluster)
        # A worker may take batches in another order.
        super().__init__(strategy, keras_of_the_form, all_batches_alike=True)

    def close(self) -> None:
        self.cluster.close()


SERVERS = {"workers": 1, "servers": 2, "partitioner": FixedShardsPartitioner(2)}


@functools.cache
def taped_model() -> Any:
    """A class of models with a step of its own, which assigns."""

    class Taped(keras_of_the_form().Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"part": loss}

    return Taped


LOOPS: dict[str, Callable[[], Loop]] = {
    "run on one device": lambda: Variables(unison.OneDeviceStrategy("CPU:0")),
    "run": lambda: Variables(mirrored(2)),
    "function": lambda: InFunction(mirrored(2)),
    "fit": lambda: Keras(mirrored(2)),
    "fit on one device": lambda: Keras(unison.OneDeviceStrategy("CPU:0")),
    "fit with a callback": lambda: Keras(mirrored(2), callback=True),
    "fit with central storage": lambda: Keras(
        unison.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:0")
    ),
    "fit of a step of one's own": lambda: Keras(mirrored(2), own_step=True),
    "fit of a dataset": lambda: Keras(mirrored(2), as_dataset=True),
    "fit of several steps in one execution": lambda: Keras(mirrored(2), steps_per_execution=4),
    "fit of divided weights": lambda: Keras(
        unison.ModelParallelStrategy(["CPU:0", "CPU:1"], mesh={"batch": 2}, zero=3)
    ),
    "fit of a hard model": lambda: HardFit(mirrored(2), keras_of_the_form),
    "function of a hard model": lambda: HardFunction(keras_of_the_form),
    "function of a hard model and an iterator": lambda: HardFunctionOfIterator(
        keras_of_the_form, mirrored(2)
    ),
    "train_on_batch": lambda: OnBatches(mirrored(2)),
    "evaluate": lambda: Evaluating(mirrored(2)),
    "schedule": lambda: Scheduled({**SERVERS, "workers": 2}),
    "schedule synchronous steps": lambda: Scheduled({**SERVERS, "workers": 2, "synchronous": True}),
    "assign on servers": lambda: Assigned(SERVERS),
    "fit on servers": lambda: OnServers(SERVERS),
    "fit of a hard model on servers": lambda: HardOnServers(SERVERS),
    "fit on servers in synchronous steps": lambda: OnServers(
        {**SERVERS, "workers": 2, "synchronous": True}
    ),
}


class Reference:
    """The states of an undisturbed training, by its number of steps."""

    def __init__(self, make: Callable[[], Loop]):
        self._loop = make()
        if self._loop.undisturbed is not None:
            self._loop.close()
            self._loop = self._loop.undisturbed()
        self._states = {0: self._loop.state()}
        #: What the steps until this number have added to the metrics.
        self._added: dict[int, list[np.ndarray]] = {}

    def after(self, steps: int) -> dict[str, np.ndarray]:
        while self._loop.steps() < steps:
            self._loop.step_alone()
            self._states[self._loop.steps()] = self._loop.state()
            self._added[self._loop.steps()] = self._loop.metrics()
        whole = sorted(self._states)
        assert steps in whole, f"Step {steps} is none after which a program ends: {whole[-5:]}"
        return self._states[steps]

    def added_until(self, steps: int) -> list[list[np.ndarray]]:
        """Returns what the latest steps have added to the metrics, beginning with the last."""
        numbers = [number for number in self._added if number <= steps]
        return [self._added[number] for number in numbers[-MOST_BATCHES:][::-1]]

    def close(self) -> None:
        self._loop.close()


def interrupt(run: Callable[[], None], rng: random.Random, longest: float) -> BaseException | None:
    """Runs until a signal, whose handler raises, and returns the error; now and then, a second one
    comes while the first is handled.
    """
    is_double = rng.random() < 0.2
    is_armed = True
    count = 0
    latest = 0.0
    raised: BaseException | None = None

    def handler(number: int, frame: Any) -> None:
        nonlocal is_armed, count, latest
        # Python clears a second error that comes while it prints that it has ignored the first.
        if is_armed or (raised is None and time.monotonic() - latest > SECONDS_TO_END):
            count += 1
            latest = time.monotonic()
            is_armed = not is_double or count < 2  # a third one could come while this one is caught
            raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    # Of an error that a garbage collector's callback swallows, there is another one.
    next_one = rng.uniform(1e-5, 1e-3) if is_double else 0.5
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, longest), next_one)
            run()
        except Interrupted as error:
            raised = error
            while True:  # with a condition here, Python 3.13 would not catch the second one
                if not (is_double and is_armed):
                    break
            is_armed = False
    except Interrupted as error:
        raised = raised or error
        is_armed = False
    except RuntimeError as error:
        # A `threading.Condition` that is interrupted while it waits for its lock.
        if not isinstance(error.__context__, Interrupted):
            raise
        raised = error
        is_armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    return raised


def place_of(error: BaseException) -> str:
    """Names where a loop was interrupted: the innermost function of Unison."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "unison" in f.filename and "tests" not in f.filename]
    return f"{pathlib.Path(own[-1].filename).name}:{own[-1].name}" if own else "outside"


def check(loop: Loop, reference: Reference, number: int) -> None:
    steps = loop.steps()
    state = loop.state()
    expected = reference.after(steps)
    if steps == 0:  # not all variables may be there
        state = {name: value for name, value in state.items() if name in expected}
    else:
        assert list(state) == list(expected), (number, steps, list(state), list(expected))
    if not any(equal(state, ended, loop.tolerance) for ended in loop.endings(expected)):
        for name, value in state.items():
            message = f"interruption {number}, after {steps} steps: {name}"
            np.testing.assert_allclose(
                value, expected[name], loop.tolerance, loop.tolerance, err_msg=message
            )
    loop.go_on_from(expected)
    metrics = loop.metrics()
    if sums_of(metrics, reference.added_until(steps)):
        return
    of_batch = loop.metrics_of_evaluation()
    assert sums_of(metrics, [of_batch or []] * MOST_BATCHES), (
        f"interruption {number}, after {steps} steps: the metrics are those of no whole step: "
        f"{metrics}"
    )


def equal(state: dict[str, np.ndarray], other: dict[str, np.ndarray], tolerance: float) -> bool:
    return all(np.allclose(v, other[name], tolerance, tolerance) for name, v in state.items())


def sums_of(metrics: list[np.ndarray], added: list[list[np.ndarray]]) -> bool:
    """Whether all metrics hold what the first of so many batches have added to them, or zeros."""
    for count in range(len(added) + 1):
        sums = [sum(of_batches) for of_batches in zip(*added[:count], strict=True)]
        sums = sums or [np.zeros_like(value) for value in metrics]
        if all(np.allclose(v, s, 1e-5, 1e-6) for v, s in zip(metrics, sums, strict=True)):
            return True
    return False


def interrupted(name: str, signals: int, seed: int) -> dict[str, int]:
    """Interrupts a loop so often; returns how often in which function."""
    make = LOOPS[name]
    rng = random.Random(f"{name} {seed}")
    places: collections.Counter[str] = collections.Counter()
    reference = Reference(make)
    while places.total() < signals:
        loop = make()
        for turn in range(min(ROUNDS, signals - places.total())):
            # Some interruptions come while the first step is traced and compiled.
            error = interrupt(lambda: loop.run(10**9), rng, 2.0 if turn == 0 else 0.15)  # noqa: B023
            if error is None:
                continue
            places[place_of(error)] += 1
            check(loop, reference, places.total())
            if turn % 4 == 3:
                with tempfile.TemporaryDirectory() as folder:
                    loop.save(pathlib.Path(folder))
        loop.close()
    reference.close()
    return dict(places.most_common())


def main() -> None:
    signals, seed, *names = sys.argv[2:]
    if FORM == "keras":
        keras_of_the_form()
    for name in names or LOOPS:
        print(f"seed {seed}, {name}:", interrupted(name, int(signals), int(seed)), flush=True)


if __name__ == "__main__":
    main()
