"""Keras' own steps use variables and random numbers that are not the model's, as on TensorFlow."""

import contextlib

import jax
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf

X = np.random.default_rng(5).normal(size=(14, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True).astype("float32")


@pytest.fixture(params=["no scope", "two replicas"])
def scope(request):
    """The scope in which a model is made, if it is made in one."""
    if request.param == "no scope":
        return contextlib.nullcontext
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope


class Times(tf.keras.layers.Layer):
    """A product with a variable that is not a weight."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return x * self.factor


class Setting(tf.keras.callbacks.Callback):
    """Sets a variable to the number of each epoch."""

    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def on_epoch_begin(self, epoch, logs=None):
        self.variable.assign(float(epoch))


def ones(*layers, loss="mse", rate=0.0, **compiled):
    """A sum of three numbers after `layers`."""
    model = tf.keras.Sequential(
        [tf.keras.Input((3,)), *layers, tf.keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile(tf.keras.optimizers.SGD(rate), loss, **compiled)
    return model


def test_a_variable_in_a_layer_has_its_value_at_each_step(scope):
    with scope():
        factor = tf.Variable(1.0)
        model = ones(Times(factor))
    for value in (1.0, 2.0, 3.0):
        factor.assign(value)
        expected = np.mean((value * Y - Y) ** 2)
        assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, rel=1e-5)
        assert model.fit(X, Y, verbose=0).history["loss"] == [pytest.approx(expected, rel=1e-5)]
        assert model.train_on_batch(X, Y) == pytest.approx(expected, rel=1e-5)
        assert model.test_on_batch(X, Y) == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(model.predict(X, batch_size=4, verbose=0), value * Y, 1e-5)
        np.testing.assert_allclose(model.predict_on_batch(X), value * Y, 1e-5)


@pytest.mark.parametrize("kind", [tf.Variable, tf.keras.Variable, tf.keras.backend.variable])
def test_a_variable_in_a_loss_is_set_by_a_callback(scope, kind):
    with scope():
        weight = kind(1.0)
        model = ones(loss=lambda y, z: weight * tf.reduce_mean((y - z - 1.0) ** 2, axis=-1))
    losses = model.fit(X, Y, epochs=3, callbacks=[Setting(weight)], verbose=0).history["loss"]
    assert losses == pytest.approx([0.0, 1.0, 2.0], rel=1e-5)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(2.0, rel=1e-5)


class Mean(tf.keras.layers.Layer):
    """Subtracts a moving mean that it keeps itself."""

    def build(self, shape):
        self.mean = tf.Variable(tf.zeros(shape[-1]), trainable=False)
        self.seen = tf.Variable(0, trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
        return x - tf.stop_gradient(self.mean)


def test_a_layer_assigns_variables_from_what_its_weights_give():
    layer = Mean()
    model = ones(tf.keras.layers.Dense(4, kernel_initializer="ones"), layer, rate=0.01)
    fitted = model.fit(X, Y, batch_size=7, epochs=3, shuffle=False, verbose=0)

    mean, offset = np.zeros(4), np.zeros(1)
    kernel, bias, weights = np.ones((3, 4)), np.zeros(4), np.ones((4, 1))
    expected = []
    for _ in range(3):
        squares = []
        for rows in (slice(0, 7), slice(7, 14)):
            hidden = X[rows] @ kernel + bias
            mean = 0.5 * mean + 0.5 * hidden.mean(0)
            error = (hidden - mean) @ weights + offset - Y[rows]
            squares.append(np.mean(error**2))
            of_outputs = 2 * error / 7
            of_hidden = of_outputs @ weights.T
            weights = weights - 0.01 * (hidden - mean).T @ of_outputs
            offset = offset - 0.01 * of_outputs.sum(0)
            kernel = kernel - 0.01 * X[rows].T @ of_hidden
            bias = bias - 0.01 * of_hidden.sum(0)
        expected.append(np.mean(squares))
    assert fitted.history["loss"] == pytest.approx(expected, rel=1e-4)
    assert layer.seen.numpy() == 6
    np.testing.assert_allclose(layer.mean.numpy(), mean, 1e-4)
    outputs = (X @ kernel + bias - mean) @ weights + offset
    np.testing.assert_allclose(model.predict(X, verbose=0), outputs, 1e-3, 1e-4)


def test_generators_lose_no_batch_and_callbacks_are_called_once(scope):
    taken, called = [], []

    def batches():
        for number in range(6):
            taken.append(number)
            yield X[number : number + 2], Y[number : number + 2]

    class Noting(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            called.append(batch)

        def on_epoch_begin(self, epoch, logs=None):
            called.append("epoch")

    with scope():
        seen = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

        class Counting(tf.keras.layers.Layer):
            def call(self, x, training=False):
                if training:
                    seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
                return x

        model = ones(Counting())
    model.fit(batches(), epochs=1, steps_per_epoch=6, callbacks=[Noting()], verbose=0)
    assert called == ["epoch", *range(6)]
    assert seen.numpy() == 12


def test_several_steps_in_one_execution(scope):
    with scope():
        factor = tf.Variable(2.0)
        model = ones(Times(factor), steps_per_execution=3)
    assert model.fit(X, Y, batch_size=2, verbose=0).history["loss"] == [
        pytest.approx(np.mean(Y**2), rel=1e-5)
    ]
    factor.assign(3.0)
    np.testing.assert_allclose(model.predict(X, batch_size=4, verbose=0), 3 * Y, 1e-5)


def noises(scope, make):
    with scope():
        model = ones(make())
    zeros = np.zeros((4, 3), "float32")
    fitted = model.fit(zeros, zeros[:, :1], epochs=4, verbose=0).history["loss"]
    return fitted, model.predict(zeros, verbose=0), model.predict(zeros, verbose=0)


class Noise(tf.keras.layers.Layer):
    """Adds random numbers of the process's stream."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class OwnNoise(tf.keras.layers.Layer):
    """Adds random numbers of a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


class Dropped(tf.keras.layers.Layer):
    """Drops half of its input."""

    def call(self, x):
        return tf.nn.dropout(x + 1.0, 0.5) * tf.constant([[1.0, 3.0, 9.0]])


@pytest.mark.parametrize("make", [Noise, OwnNoise, Dropped])
@pytest.mark.smoke
def test_every_step_and_every_replica_draws_its_own_numbers(scope, make):
    fitted, first, second = noises(scope, make)
    assert len(set(fitted)) == 4
    assert not np.allclose(first, second)
    assert not np.allclose(first[:2], first[2:])


def test_weights_are_trained_as_without_the_variable(scope):
    def trained(factor, **kwargs):
        with scope():
            layer = Times(tf.Variable(factor)) if factor else tf.keras.layers.Rescaling(2.0)
            model = ones(layer, rate=0.05, metrics=["mae"])
        history = model.fit(
            X, Y, epochs=3, batch_size=4, shuffle=False, verbose=0, validation_data=(X, Y), **kwargs
        )
        return model.get_weights(), history.history

    weights = np.linspace(0.5, 2.0, len(X))
    for kwargs in ({}, {"sample_weight": weights}):
        ours, theirs = trained(2.0, **kwargs), trained(None, **kwargs)
        for one, other in zip(ours[0], theirs[0], strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)
        for name, values in theirs[1].items():
            np.testing.assert_allclose(ours[1][name], values, 1e-5, 1e-6)


def test_a_layer_that_assigns_is_built_without_an_effect():
    seen = tf.Variable(0)

    class Counting(tf.keras.layers.Layer):
        def call(self, x):
            seen.assign_add(1)
            return x

    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, Counting()(inputs))
    assert seen.numpy() == 0
    model(X)
    assert seen.numpy() == 1


def test_a_model_may_be_compiled_again(scope):
    with scope():
        factor = tf.Variable(2.0)
        model = ones(Times(factor))
        np.testing.assert_allclose(model.predict(X, verbose=0), 2 * Y, 1e-5)
        model.compile("sgd", "mae")
    factor.assign(3.0)
    np.testing.assert_allclose(model.predict(X, verbose=0), 3 * Y, 1e-5)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(np.mean(abs(2 * Y)), rel=1e-5)
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("validation_split", [0.0, 0.3])
def test_data_is_shuffled_as_without_the_variable(scope, validation_split):
    """Keras draws an order for the batch on which it builds, after each `compile`."""

    def outcome(*layers):
        keras.utils.set_random_seed(7)
        model = ones(*layers, rate=0.05)
        fits = []
        for number in range(4):
            if number in (1, 2):
                model.compile(tf.keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
            model.fit(X, Y, 1, verbose=0, validation_split=validation_split)
            fits.append([np.random.get_state()[2], *model.get_weights()[0].ravel()])
        return fits

    with scope():
        np.testing.assert_allclose(outcome(Times(tf.Variable(1.0))), outcome(), rtol=1e-4)


def test_a_predict_step_of_ones_own_is_the_first_to_run(scope):
    class Scaled(tf.keras.Model):
        def predict_step(self, data):
            return self(data[0] if isinstance(data, tuple) else data) * factor

    with scope():
        factor = tf.Variable(2.0)
        inputs = tf.keras.Input((3,))
        model = Scaled(inputs, tf.keras.layers.Rescaling(1.0)(inputs))
    np.testing.assert_allclose(model.predict(X, verbose=0), 2 * X)
    factor.assign(3.0)
    np.testing.assert_allclose(model.predict(X, verbose=0), 3 * X)


def test_a_program_without_tensorflows_names_reads_and_assigns_variables():
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        seen = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
        factor = unison.Variable(1.0)

        class Counting(keras.layers.Layer):
            def call(self, x):
                seen.assign_add(1.0 * x.shape[0])
                return x * factor

        model = keras.Sequential([keras.Input((3,), batch_size=7), Counting()])
        assert seen.numpy() == 0
        model.compile(loss="mse")
    for value in (1.0, 2.0):
        factor.assign(value)
        assert model.evaluate(X, X, batch_size=14, verbose=0) == pytest.approx(
            (value - 1) ** 2 * np.mean(X**2), rel=1e-5
        )
    assert seen.numpy() == 28


class Share(tf.keras.metrics.Metric):
    """A mean of predictions whose state Keras does not know."""

    def __init__(self, factor):
        super().__init__(name="share")
        self.factor = factor
        annotations = {
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.SUM,
        }
        self.total = tf.Variable(0.0, **annotations)
        self.count = tf.Variable(0.0, **annotations)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(y_pred))
        self.count.assign_add(tf.cast(tf.size(y_pred), tf.float32))

    def result(self):
        return self.factor * self.total / self.count

    def reset_state(self):
        self.total.assign(0.0)
        self.count.assign(0.0)


@pytest.mark.parametrize("eagerly", [False, True])
def test_metrics_keep_their_state_in_variables(scope, eagerly):
    with scope():
        factor = tf.Variable(1.0)
        model = ones(metrics=[Share(factor), "mae"], run_eagerly=eagerly)
    for value in (1.0, 2.0):
        factor.assign(value)
        expected = pytest.approx(value * Y.mean(), rel=1e-4)
        history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history
        assert history["share"] == [expected, expected]
        evaluated = model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)
        assert evaluated["share"] == expected
        assert evaluated["mae"] == pytest.approx(0.0, abs=1e-5)


def test_a_counter_of_64_bits_counts_small_steps_that_run_together(scope):
    class Counting(tf.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.steps = tf.Variable(2**40, dtype=tf.int64)

        def call(self, x, training=False):
            if training:
                self.steps.assign_add(1)
            return x

    with scope():
        layer = Counting()
        model = ones(layer)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0)
    assert layer.steps.numpy() == 2**40 + 14


def test_a_layers_call_is_a_function(scope):
    class Compiled(tf.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1, kernel_initializer="ones")

        @tf.function
        def call(self, x, training=False):
            return self.dense(x) * tf.random.uniform([], 1.0, 2.0)

    with scope():
        inputs = tf.keras.Input((3,))
        model = tf.keras.Model(inputs, Compiled()(inputs))
        model.compile("sgd", "mse")
    drawn = {float(model.predict(X, verbose=0)[0, 0] / Y[0, 0]) for _ in range(3)}
    assert len(drawn) == 3
    assert min(drawn) > 1 - 1e-5
    model.fit(X, Y, verbose=0)


def test_optimizers_divide_their_state_also_if_steps_are_lifted():
    x = np.random.default_rng(0).normal(size=(8, 256)).astype("float32")

    def trained(lifts):
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            layer = Times(tf.Variable(2.0)) if lifts else tf.keras.layers.Rescaling(2.0)
            dense = tf.keras.layers.Dense(256, kernel_initializer="ones")
            model = tf.keras.Sequential([tf.keras.Input((256,)), layer, dense])
            model.compile("adam", "mse")
        fitted = model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return [*fitted.history["loss"], model.get_weights()[0]]

    for one, other in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_what_steps_use_is_backed_up_and_restored(scope, tmp_path):
    class Stopped(Exception):  # noqa: N818
        pass

    class Stopping(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise Stopped

    def count(*callbacks):
        with scope():
            number = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

            class Counting(tf.keras.layers.Layer):
                def call(self, x, training=False):
                    if training:
                        number.assign_add(1.0)
                    return x

            model = ones(Counting())
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        with contextlib.suppress(Stopped):
            model.fit(X, Y, batch_size=14, epochs=4, callbacks=[backup, *callbacks], verbose=0)
        return number.numpy()

    if scope is contextlib.nullcontext:
        pytest.skip("Keras' own backups do not know variables that are not the model's")
    assert count(Stopping()) == 2
    assert count() == 4


def test_a_flag_decides_in_python(scope):
    class Deciding(tf.keras.layers.Layer):
        def call(self, x):
            if flag:
                x = 5.0 * x
            return x

    with scope():
        flag = tf.Variable(False)
        model = ones(Deciding())
    np.testing.assert_allclose(model.predict(X, verbose=0), Y, 1e-5)
    flag.assign(True)
    np.testing.assert_allclose(model.predict(X, verbose=0), 5 * Y, 1e-4)


def test_a_loss_assigns_a_variable_of_keras(scope):
    with scope():
        last = tf.keras.Variable(0.0, aggregation="mean")

        def loss(y, z):
            last.assign(tf.reduce_mean((y - z - 1.0) ** 2))
            return tf.reduce_mean((y - z) ** 2, axis=-1)

        model = ones(loss=loss)
    model.fit(X, Y, batch_size=14, verbose=0)
    assert float(last.numpy()) == pytest.approx(1.0, rel=1e-4)


class Batches(tf.keras.callbacks.Callback):
    """Collects the logs of batches."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def counting_metric():
    annotations = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }

    class Count(tf.keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.count = tf.Variable(0, **annotations)

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.count.assign_add(tf.shape(y_pred)[0])

        def result(self):
            return self.count

        def reset_state(self):
            self.count.assign(0)

    return Count()


def test_a_metric_has_no_variables_that_keras_knows(scope):
    with scope():
        model = ones(metrics=[counting_metric()])
    batches = Batches()
    history = model.fit(X, Y, batch_size=8, callbacks=[batches], verbose=0).history
    assert [logs["count"] for logs in batches.logs] == [8, 14]
    assert history["count"] == [14]


def test_a_step_logs_a_loss_of_its_own_beside_such_a_metric(scope):
    class Own(tf.keras.Model):
        def train_step(self, data):
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(data[1], data[1])
            return {"loss": tf.constant(4.0), **{m.name: m.result() for m in self.metrics[1:]}}

    with scope():
        inputs = tf.keras.Input((3,))
        model = Own(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", metrics=[counting_metric()])
    batches = Batches()
    model.fit(X, Y, batch_size=7, callbacks=[batches], verbose=0)
    assert batches.logs == [{"loss": 4.0, "count": 7}, {"loss": 4.0, "count": 14}]


def test_only_validation_updates_such_a_metric(scope):
    class Own(tf.keras.Model):
        def train_step(self, data):
            steps.assign_add(1)
            return {"loss": tf.constant(4.0)}

    with scope():
        steps = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        inputs = tf.keras.Input((3,))
        model = Own(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", metrics=[counting_metric()])
    history = model.fit(X, Y, batch_size=7, epochs=2, validation_data=(X, Y), verbose=0).history
    assert history["loss"] == [4.0, 4.0]
    assert history["val_count"] == [14, 14]
    assert steps.numpy() == 4


def test_a_stateless_scope_of_the_programs_own_isolates():
    layer = tf.keras.layers.BatchNormalization()
    layer(X, training=True)
    before = layer.moving_mean.numpy()

    @tf.function
    def apart(x):
        with keras.StatelessScope():
            return layer(x, training=True)

    apart(tf.constant(X + 3.0))
    np.testing.assert_array_equal(layer.moving_mean.numpy(), before)


def test_a_jitted_step_outside_of_loops_captures_as_in_jax():
    model = ones(Times(tf.Variable(2.0)))
    groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
    state = tuple([variable.value for variable in group] for group in groups)
    logs, _ = jax.jit(model.test_step)(state, (X, Y))
    assert set(logs) >= {"loss"}


def test_eager_steps_of_keras_are_taken_over(scope):
    class Total(tf.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(3, kernel_initializer="ones")
            annotations = {"aggregation": tf.VariableAggregation.SUM}
            self.total = tf.Variable(0.0, **annotations)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x, training=False):
            if training:
                self.total.assign_add(tf.reduce_sum(self.dense(x)))
            return x

    with scope():
        layer = Total()
        model = ones(layer, run_eagerly=True)
    model.fit(X, Y, batch_size=7, verbose=0)
    assert layer.total.numpy() == pytest.approx(3 * Y.sum(), rel=1e-4)
