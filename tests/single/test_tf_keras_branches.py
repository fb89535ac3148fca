"""Branches and loops in layers and metrics, in every form of a step: weights are trained as on
TensorFlow, and what a body assigns is kept.
"""

import numpy as np
import pytest

import unison.tf as tf
from keras_comparison import assert_close

X = np.ones((8, 2), np.float32)
Y = np.arange(8, dtype=np.float32)[:, None]


class Branching(tf.keras.layers.Layer):
    """Counts its calls, and assigns `kept` in the bodies of what `control` is."""

    def __init__(self, control):
        super().__init__()
        self.control = control

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 1), initializer="ones", name="kernel")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.other = self.add_weight(shape=(shape[-1], 1), initializer="ones", name="other")
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

    def call(self, x, training=False):
        self.calls.assign_add(1.0)
        return self.control(self, x)


def cond(layer, x):
    def later():
        layer.kept.assign_add(10.0)
        return x @ layer.kernel * layer.calls

    def first():
        layer.kept.assign_add(1.0)
        return x @ (2 * layer.kernel)

    return tf.cond(layer.calls > 1.0, later, first)


def nested(layer, x):
    def inner():
        layer.kept.assign(layer.kept + layer.calls)
        return tf.cond(layer.calls > 2.0, lambda: x @ layer.kernel, lambda: cond(layer, x))

    return tf.cond(layer.calls > 1.0, inner, lambda: 3 * (x @ layer.kernel))


def loop(layer, x):
    def body(number, total):
        layer.kept.assign_add(number)
        return number + 1.0, total + x @ layer.kernel * layer.kept

    start = (tf.constant(0.0), tf.zeros((tf.shape(x)[0], 1)))
    return tf.while_loop(lambda n, _: n < 3.0, body, start, maximum_iterations=4)[1]


def either(layer, x):
    return x @ tf.cond(layer.calls > 1.0, lambda: layer.kernel, lambda: layer.other)


class Ratio(tf.keras.metrics.Metric):
    """Its result reads its states in a branch."""

    def __init__(self):
        super().__init__(name="ratio")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(y_true))
        self.count.assign_add(tf.cast(tf.size(y_true), tf.float32))

    def result(self):
        return tf.cond(self.count > 0.0, lambda: self.total / self.count, lambda: 0.0)


class Plain(tf.keras.Model):
    """Keras' own step."""

    def __init__(self, control):
        super().__init__()
        self.branching = Branching(control)

    def call(self, x, training=False):
        return self.branching(x, training=training)


class Extending(Plain):
    def train_step(self, data):
        logs = super().train_step(data)
        self.additional.assign_add(1.0)
        return logs


class Taped(Plain):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predictions)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, predictions)


def losing(layer, x):
    def body():
        layer.add_loss(tf.reduce_sum(x))
        return x @ layer.kernel

    return tf.cond(layer.calls > 1.0, body, lambda: x @ layer.kernel)


def test_a_loss_that_is_added_in_a_branch_is_refused():
    model = Plain(losing)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Return the loss from the branch"):
        model.fit(X, Y, verbose=0)


#: The weights on TensorFlow 2.21: of the kernel (both are equal), `calls` and `kept`.
EXPECTED = {
    "cond": (0.9512631297111511, 4.0, 31.0),
    "nested": (0.9856001734733582, 4.0, 19.0),
    "loop": (1.3515933752059937, 4.0, 12.0),
    "either": (1.0129481554031372, 4.0, 0.0),
}


@pytest.mark.parametrize("control", [cond, nested, loop, either], ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", [Plain, Extending, Taped])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_layer_with_branches_trains_as_on_tensorflow(replicas, kind, control):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    with strategy.scope():
        model = kind(control)
        model.additional = tf.Variable(0.0)
        model.compile(tf.keras.optimizers.SGD(0.001), "mse", metrics=[Ratio()])
    history = model.fit(X, Y, 4, 2, shuffle=False, verbose=0).history
    assert history["ratio"] == [3.5, 3.5]
    kernel, calls, kept = EXPECTED[control.__name__]
    assert_close(model.branching.kernel.numpy().ravel(), np.float32([kernel, kernel]))
    assert (float(model.branching.calls), float(model.branching.kept)) == (calls, kept)
    before = float(model.branching.kept)
    model.predict(X, verbose=0)
    assert float(model.branching.kept) >= before


@pytest.mark.parametrize("kind", [Plain, Extending, Taped])
def test_a_branch_is_called_a_few_times_however_deep_it_lies(kind):
    calls = []

    def deep(layer, x):
        def default():
            calls.append(1)
            return x @ layer.kernel

        pairs = [
            (layer.calls > 10.0 + number, lambda: 2 * (x @ layer.kernel)) for number in range(9)
        ]
        return tf.case(pairs, default)

    model = kind(deep)
    model.additional = tf.Variable(0.0)
    model.compile("sgd", "mse")
    model.fit(X, Y, 8, 1, verbose=0)
    assert len(calls) < 12


def test_a_regularizer_of_activities_in_a_branch_predicts():
    def regularized(layer, x):
        return tf.cond(layer.calls > 0.0, lambda: dense(x), lambda: x @ layer.kernel)

    dense = tf.keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l2")
    dense.build((None, 2))
    assert Plain(regularized).predict(X, verbose=0).ravel().tolist() == [2.0] * 8


def test_branches_of_a_datasets_function_draw_from_seeds_and_read_variables():
    seed = tf.keras.random.SeedGenerator(5)
    variable = tf.keras.Variable(1.0)

    def function(x):
        return tf.cond(
            x > 0.5, lambda: tf.keras.random.uniform((), seed=seed), lambda: -variable.value
        )

    dataset = tf.data.Dataset.from_tensor_slices(np.float32([1, 0, 1, 1])).map(function)
    one = [float(number) for number in dataset]
    variable.assign(3.0)
    two = [float(number) for number in dataset]
    assert (one[1], two[1]) == (-1.0, -3.0)
    draws = [*one[:1], *one[2:], *two[:1], *two[2:]]
    assert len(set(draws)) == 6


@pytest.mark.parametrize("kind", [Plain, Extending, Taped])
def test_a_gradient_of_its_own_reads_weights(kind):
    def control(layer, x):
        @tf.custom_gradient
        def product(x):
            def gradient(upstream, variables=None):
                of_kernel = tf.transpose(x) @ upstream
                return upstream @ tf.transpose(layer.kernel), [of_kernel for _ in variables]

            return x @ layer.kernel, gradient

        return product(x)

    model = kind(control)
    model.additional = tf.Variable(0.0)
    model.compile(tf.keras.optimizers.SGD(0.001), "mse")
    model.fit(X, Y, 4, 2, shuffle=False, verbose=0)
    # TensorFlow 2.21.
    assert_close(model.branching.kernel.numpy().ravel(), np.float32([1.0119600296020508] * 2))


@pytest.mark.parametrize("kind", [Plain, Extending, Taped])
def test_a_layer_that_is_never_called_needs_no_variables(kind):
    model = kind(cond)
    model.additional = tf.Variable(0.0)
    model.unused = tf.keras.layers.BatchNormalization()
    model.compile(tf.keras.optimizers.SGD(0.001), "mse")
    model.fit(X, Y, 4, 2, shuffle=False, verbose=0)
    assert_close(model.branching.kernel.numpy().ravel(), np.float32([EXPECTED["cond"][0]] * 2))
