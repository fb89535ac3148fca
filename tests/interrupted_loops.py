"""Training loops that signals interrupt: the interface, and loops with state of many kinds.

What a step changes in these beside weights and an optimizer's slots: moving statistics of each
replica's own, seeds, metrics, accumulated gradients, moving averages of weights that replace them,
a loss scale that grows, and variables that replicas keep apart.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import unison.tf as tf
from unison.interrupts import without_signals
from unison.train import Checkpoint

BATCH = 8


class Loop:
    """A training whose state follows from its number of steps."""

    #: Numbers may differ by round-off where steps that run together are compiled otherwise. Half a
    #: step would show as the difference of a whole update.
    tolerance = 2e-4

    def run(self, steps: int) -> None:
        """Trains for so many steps."""
        raise NotImplementedError

    def step_alone(self) -> None:
        """Trains for the fewest steps after which the state can be looked at."""
        self.run(1)

    def steps(self) -> int:
        """How many steps the variables have taken part in."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Reads all variables that follow from the number of steps."""
        raise NotImplementedError

    def metrics(self) -> list[np.ndarray]:
        """Reads the metrics' variables, which add up since they were reset."""
        return []

    def metrics_of_evaluation(self) -> list[np.ndarray] | None:
        """Returns what a batch of an evaluation adds to the metrics, with the present weights."""
        return None

    def endings(self, state: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Returns what an undisturbed loop that ends after some step may make of its state."""
        return []

    def go_on_from(self, state: dict[str, np.ndarray]) -> None:
        """Undoes the end of the loop, with the state that was there before."""

    def save(self, folder: pathlib.Path) -> None:
        """Saves the state."""

    def close(self) -> None:
        """Ends what the loop has started."""

    #: Makes a training of the same steps that is cheaper. None: it is this one.
    undisturbed: Callable[[], Loop] | None = None


def hard_model(keras: Any) -> tuple[Any, Any]:
    """Returns a model and an optimizer with state of many kinds."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    # A bias would have no gradient but round-off, by which Adam divides.
    hidden = keras.layers.Dense(16, use_bias=False)(inputs)
    normalized = keras.layers.BatchNormalization()(hidden)
    dropped = keras.layers.Dropout(0.3, seed=5)(normalized)
    model = keras.Model(inputs, keras.layers.Dense(1)(dropped))
    inner = keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.99),
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
        gradient_accumulation_steps=2,
    )
    # It grows by so little that no gradient overflows: steps that are skipped are not counted.
    return model, keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=2.0**-20, dynamic_growth_steps=20
    )


def hard_data(batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, and labels of two classes, of so many different batches."""
    x = np.random.default_rng(0).normal(size=(BATCH * batches, 6)).astype(np.float32)
    return x, (x[:, :1] > 0).astype(np.int32)


def copies(variables: Iterable[Any]) -> list[np.ndarray]:
    """Reads variables: their values outside the replicas, and every replica's copy of several."""
    values = []
    for variable in variables:
        cell = getattr(variable, "cell", None)  # none of Keras' own before its first program
        of_replicas = [] if cell is None else cell.copies()
        value = np.asarray(variable.numpy())
        values.append(np.stack([value, *(of_replicas if len(of_replicas) > 1 else ())]))
    return values


class HardFit(Loop):
    """`fit`, in executions of several steps, with class weights and validation between epochs."""

    tolerance = 0.0
    #: Executions of several steps do not divide it.
    steps_per_epoch = 8
    steps_per_execution = 3
    class_weight = {0: 1.0, 1: 2.0}  # noqa: RUF012

    def __init__(self, strategy: Any, keras: Callable[[], Any], all_batches_alike: bool = False):
        self.x, self.y = hard_data(self.steps_per_epoch)
        if all_batches_alike:
            self.x = np.tile(self.x[:BATCH], (self.steps_per_epoch, 1))
            self.y = np.tile(self.y[:BATCH], (self.steps_per_epoch, 1))
        with strategy.scope():
            of_form = keras()
            self.model, optimizer = hard_model(of_form)
            self.model.compile(
                optimizer,
                of_form.losses.BinaryCrossentropy(from_logits=True),
                metrics=["mae"],
                weighted_metrics=["acc"],
                steps_per_execution=self.steps_per_execution,
            )

    def fit(self, x: np.ndarray, y: np.ndarray, **given: Any) -> None:
        given |= {"class_weight": self.class_weight, "shuffle": False, "verbose": 0}
        self.model.fit(x, y, BATCH, **given)

    def run(self, steps: int) -> None:
        done = BATCH * self.steps()
        self.fit(
            np.roll(self.x, -done, axis=0),
            np.roll(self.y, -done, axis=0),
            epochs=max(1, steps // self.steps_per_epoch),
            validation_data=(np.tile(self.x[:BATCH], (4, 1)), np.tile(self.y[:BATCH], (4, 1))),
            validation_batch_size=BATCH,
            validation_freq=2,
        )

    def step_alone(self) -> None:
        # The program is that of `run`, which takes groups of any size.
        vars(self.model.optimizer)["finalize_variable_values"] = lambda variables: None
        first = BATCH * (self.steps() % self.steps_per_epoch)
        rows = slice(first, first + BATCH)
        self.fit(self.x[rows], self.y[rows])

    def steps(self) -> int:
        return int(self.model.optimizer.inner_optimizer._iterations.numpy())

    def state(self) -> dict[str, np.ndarray]:
        of_model = self.model.variables
        values = copies([*of_model, *self.model.optimizer.variables])
        return {f"variable {place}": value for place, value in enumerate(values)}

    def endings(self, state: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Keras replaces the weights by their averages where `fit` ends, by an error as well."""
        if not self.steps():
            return []
        averages = self.model.optimizer.inner_optimizer._model_variables_moving_average
        names = [*self.model.variables, *self.model.optimizer.variables]
        place_of = {id(variable): f"variable {place}" for place, variable in enumerate(names)}
        pairs = zip(
            self.model.trainable_variables, averages, strict=False
        )  # none before it is built
        ended = {place_of[id(weight)]: state[place_of[id(average)]] for weight, average in pairs}
        return [state | ended]

    def go_on_from(self, state: dict[str, np.ndarray]) -> None:
        for place, variable in enumerate(self.model.variables):
            if variable.trainable:
                variable.assign(state[f"variable {place}"][0])

    def metrics(self) -> list[np.ndarray]:
        return copies(self.model.metrics_variables)

    def metrics_of_evaluation(self) -> list[np.ndarray] | None:
        self.model.evaluate(self.x[:BATCH], self.y[:BATCH], BATCH, verbose=0)
        return self.metrics()

    def save(self, folder: pathlib.Path) -> None:
        self.model.save_weights(folder / "model.weights.h5")
        self.model.save(folder / "model.keras")


class HardFunction(Loop):
    """A `tf.function` of several steps, without a strategy: one program."""

    tolerance = 0.0
    steps_per_call = 2
    calls_per_report = 5
    batches = 8

    def __init__(self, keras: Callable[[], Any], strategy: Any = None):
        self.strategy = strategy or tf.distribute.get_strategy()
        self.x, self.y = hard_data(self.batches)
        with self.strategy.scope():
            self.keras = keras()
            self.model, self.optimizer = hard_model(self.keras)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = self.keras.metrics.BinaryAccuracy()
            self.variables = {
                "count": tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA),
                "sum": on_read(tf.VariableAggregation.SUM),
                "mean": on_read(tf.VariableAggregation.MEAN),
            }
        # Of a metric outside of scopes, one variable is reset after the other, as on TensorFlow.
        self.reset = without_signals(self.metric.reset_state)
        self.train = tf.function(self.several_steps)
        self.test = tf.function(lambda x, y: self.strategy.run(self.test_step, args=(x, y)))

    def several_steps(self, first: Any) -> None:
        for number in range(self.steps_per_call):
            rows = (first + number) % self.batches * BATCH + tf.range(BATCH)
            self.step(tf.gather(self.x, rows), tf.gather(self.y, rows))

    def call(self) -> None:
        self.train(tf.constant(self.steps()))

    def step(self, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = self.model(x, training=True)
            losses = self.keras.losses.binary_crossentropy(y, outputs, from_logits=True)
            loss = tf.reduce_sum(losses) / BATCH
            scaled = self.optimizer.scale_loss(loss)
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        self.metric.update_state(y, outputs)
        self.variables["sum"].assign_add(loss)
        self.variables["mean"].assign(loss)
        self.variables["count"].assign_add(1)

    def test_step(self, x: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.abs(self.model(x) - tf.cast(y, tf.float32)))

    def run(self, steps: int) -> None:
        self.reset()
        for call in range(1, max(1, steps // self.steps_per_call) + 1):
            self.call()
            if call % self.calls_per_report == 0:
                self.test(*hard_data(1))
                self.metric.result()
                self.reset()

    def step_alone(self) -> None:
        self.reset()
        self.call()

    def steps(self) -> int:
        return int(self.variables["count"].numpy())

    def state(self) -> dict[str, np.ndarray]:
        values = copies([*self.model.variables, *self.optimizer.variables])
        state = {f"variable {place}": value for place, value in enumerate(values)}
        return state | dict(zip(self.variables, copies(self.variables.values()), strict=True))

    def metrics(self) -> list[np.ndarray]:
        return copies(self.metric.variables)

    def save(self, folder: pathlib.Path) -> None:
        saved = {"model": self.model, "optimizer": self.optimizer, "metric": self.metric}
        Checkpoint(**saved, **self.variables).write(folder / "checkpoint")


class HardFunctionOfIterator(HardFunction):
    """A `tf.function` of several steps of `strategy.run`, which are programs of their own."""

    def __init__(self, keras: Callable[[], Any], strategy: Any):
        super().__init__(keras, strategy)
        numbered = (np.repeat(np.arange(self.batches), BATCH), self.x, self.y)
        self.dataset = tf.data.Dataset.from_tensor_slices(numbered).batch(BATCH).repeat()
        self.iterator: Any = None

    def several_steps(self, iterator: Any) -> None:
        for _ in range(self.steps_per_call):
            self.strategy.run(self.step_on, args=(next(iterator),))

    def step_on(self, batch: Any) -> None:
        _, x, y = batch
        self.step(x, y)

    def call(self) -> None:
        self.train(self.iterator)

    def run(self, steps: int) -> None:
        self.find_place()
        super().run(steps)

    def find_place(self) -> None:
        """Continues with the batch after the last that was trained on.

        An interruption loses the batches of at most one call.
        """
        steps = self.steps()
        iterator, self.iterator = self.iterator, None
        if iterator is not None:
            (number, *_), *_ = self.strategy.experimental_local_results(next(iterator)[0])
            lost = (int(number) - steps) % self.batches
            assert lost <= self.steps_per_call, (steps, number)
        dataset = self.dataset.skip(steps % self.batches)
        self.iterator = iter(self.strategy.experimental_distribute_dataset(dataset))

    def step_alone(self) -> None:
        self.reset()
        if self.iterator is None:
            self.find_place()
        self.strategy.run(self.step_on, args=(next(self.iterator),))


def on_read(aggregation: Any) -> Any:
    """Returns a variable of which every replica has its own value."""
    synchronization = tf.VariableSynchronization.ON_READ
    return tf.Variable(0.0, synchronization=synchronization, aggregation=aggregation)
