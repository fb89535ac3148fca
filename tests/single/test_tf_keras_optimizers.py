"""Optimizers as programs of Keras 2 write them: old names, `legacy`, loops with a tape."""

import contextlib

import keras
import numpy as np
import pytest

import unison.tf as tf
from keras_comparison import assert_close
from unison import PerReplica

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def halves(array):
    return PerReplica([array[:8], array[8:]])


# -- old names ------------------------------------------------------------------------------


def test_lr_is_the_learning_rate():
    optimizer = tf.keras.optimizers.Adam(lr=0.5)
    assert optimizer.lr is optimizer.learning_rate
    optimizer.lr = 0.25
    assert optimizer.learning_rate.numpy() == np.float32(0.25)


def test_a_learning_rate_may_be_an_integer():
    assert tf.keras.optimizers.SGD(1).lr.numpy() == 1.0


def test_lr_of_a_schedule_is_its_present_value():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    optimizer = tf.keras.optimizers.SGD(schedule)
    weight = tf.keras.Variable([1.0])
    optimizer.apply_gradients([(tf.constant([0.0]), weight)])
    assert optimizer.lr.numpy() == 0.5


def test_an_optimizer_gives_its_weights():
    optimizer = tf.keras.optimizers.SGD(0.5)
    optimizer.build([tf.keras.Variable([1.0])])
    assert [value.tolist() for value in optimizer.get_weights()] == [0, 0.5]


def test_apply_gradients_returns_the_iterations():
    optimizer = tf.keras.optimizers.SGD(0.5)
    weight = tf.keras.Variable([1.0])
    iterations = optimizer.apply_gradients(zip([tf.constant([1.0])], [weight], strict=True))
    assert int(iterations) == int(optimizer.iterations.numpy()) == 1


def test_apply_gradients_is_refused_outside_the_replicas(two_replicas):
    with two_replicas.scope():
        optimizer = tf.keras.optimizers.SGD(0.5)
        weight = tf.keras.Variable([1.0])
        with pytest.raises(RuntimeError, match="cannot be called in cross-replica context"):
            optimizer.apply_gradients([(tf.constant([1.0]), weight)])


# -- minimize -------------------------------------------------------------------------------


def test_minimize_takes_a_function():
    weight = tf.keras.Variable([1.0, 2.0])
    tf.keras.optimizers.SGD(0.1).minimize(lambda: tf.reduce_sum(weight**2), [weight])
    np.testing.assert_allclose(weight.numpy(), [0.8, 1.6], rtol=1e-6)


def test_minimize_takes_a_tensor_and_its_tape():
    weight = tf.keras.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight**2)
    tf.keras.optimizers.SGD(0.1).minimize(loss, [weight], tape=tape)
    np.testing.assert_allclose(weight.numpy(), [0.8, 1.6], rtol=1e-6)


def test_minimize_of_a_tensor_needs_its_tape():
    with pytest.raises(ValueError, match="needs the tape"):
        tf.keras.optimizers.SGD(0.1).minimize(tf.constant(1.0), [tf.keras.Variable(1.0)])


def test_minimize_asks_for_variables_that_the_loss_creates():
    layer = tf.keras.layers.Dense(1)
    optimizer = tf.keras.optimizers.SGD(0.1)
    optimizer.minimize(lambda: tf.reduce_mean(layer(X) ** 2), lambda: layer.trainable_variables)
    assert int(optimizer.iterations.numpy()) == 1


# -- legacy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        # What tf_keras 2.21 returns after five steps.
        ("SGD", {"lr": 0.1, "decay": 0.5}, [1.0433515, -1.9662082, 2.9999986]),
        (
            "SGD",
            {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
            [1.2343698, -1.8339626, 3.0000019],
        ),
        ("SGD", {"learning_rate": 0.1, "clipnorm": 0.5}, [1.0319967, -1.9403269, 2.9999948]),
        ("SGD", {"learning_rate": 0.1, "clipvalue": 0.5}, [1.026937, -1.9149103, 3.0000091]),
        ("Adam", {"lr": 0.1, "decay": 0.1}, [0.7766975, -1.811524, 2.8336968]),
        ("Adam", {"amsgrad": True, "epsilon": 0.01}, [0.9991416, -1.9990275, 2.9999998]),
        ("RMSprop", {"lr": 0.1, "epsilon": 0.01}, [0.7411598, -1.5046998, 3.0009005]),
        (
            "RMSprop",
            {"lr": 0.1, "momentum": 0.5, "epsilon": 0.01, "centered": True},
            [0.6175487, -1.403193, 3.0000496],
        ),
        (
            "RMSprop",
            {"lr": 0.1, "centered": True, "epsilon": 0.01},
            [0.7010604, -1.4723747, 3.0009003],
        ),
        ("Adagrad", {"lr": 0.1, "epsilon": 0.01}, [0.9856327, -1.8978614, 3.0000279]),
        ("Adadelta", {"lr": 1.0, "epsilon": 0.01}, [1.3887979, -1.5006729, 3.0000906]),
        ("Adamax", {"lr": 0.1, "epsilon": 0.01}, [0.8022413, -1.8360256, 2.9990375]),
        ("Nadam", {"lr": 0.1}, [0.8945724, -1.800404, 3.0064452]),
        ("Ftrl", {"learning_rate": 0.1}, [0.0544486, -0.0502529, 2.89e-05]),
        (
            "Ftrl",
            {
                "learning_rate": 0.1,
                "l1_regularization_strength": 0.01,
                "l2_regularization_strength": 0.1,
                "l2_shrinkage_regularization_strength": 0.1,
                "beta": 0.1,
            },
            [0.0146668, 0.0524596, -0.1120779],
        ),
    ],
)
def test_a_legacy_optimizer_computes_what_keras_2s_does(name, arguments, expected):
    optimizer = getattr(tf.keras.optimizers.legacy, name)(**arguments)
    weight = tf.keras.Variable([1.0, -2.0, 3.0])
    gradients = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    gradients[:, 2] *= 1e-4
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_legacy_optimizers_take_positional_arguments_in_their_old_order():
    legacy = tf.keras.optimizers.legacy
    assert legacy.SGD(0.1, 0.9, True, "mine").name == "mine"
    assert legacy.Adam(0.1, 0.8, 0.9, 1e-3).epsilon == 1e-3
    assert legacy.Ftrl(0.1, -0.4, 0.2, 0.3, 0.4, "ftrl", 0.5).beta == 0.0


def test_a_legacy_optimizer_can_be_saved():
    optimizer = tf.keras.optimizers.legacy.SGD(0.1, decay=0.5)
    again = tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert again.decay == 0.5


def test_a_legacy_optimizer_trains_in_fit_as_on_one_device(two_replicas):
    def train():
        keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.legacy.RMSprop(lr=0.1, decay=0.1), loss="mse")
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = train()
    with two_replicas.scope():
        together = train()
    assert_close(together, alone)


# -- in a custom loop -----------------------------------------------------------------------


def model_and_step(strategy, step_of):
    """Makes a model and an optimizer, and the step that `step_of` makes of them."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)])
        return model, step_of(model, tf.keras.optimizers.Adam(0.1))


def trained(strategy, step_of):
    model, step = model_and_step(strategy, step_of)
    for _ in range(3):
        strategy.run(step, args=(halves(X), halves(Y)))
    return model.get_weights()


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        losses = tf.keras.losses.mse(y, model(x, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
    return tape.gradient(loss, model.trainable_variables)


def applying(model, optimizer):
    def step(x, y):
        gradients = gradients_of(model, x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def applying_own_sums(**arguments):
    def step_of(model, optimizer):
        def step(x, y):
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("sum", gradients_of(model, x, y))
            pairs = zip(gradients, model.trainable_variables, strict=True)
            optimizer.apply_gradients(pairs, **arguments)

        return step

    return step_of


@pytest.fixture(scope="module")
def alone():
    """The weights after three steps on all examples, on one device."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    model, step = model_and_step(strategy, applying)
    for _ in range(3):
        strategy.run(step, args=(X, Y))
    return model.get_weights()


@pytest.mark.parametrize(
    "step_of",
    [
        applying,
        applying_own_sums(skip_gradients_aggregation=True),
        applying_own_sums(experimental_aggregate_gradients=False),
    ],
    ids=["summed", "skip_gradients_aggregation", "experimental_aggregate_gradients"],
)
def test_gradients_are_summed_once(two_replicas, alone, step_of):
    assert_close(trained(two_replicas, step_of), alone)


def test_after_own_sums_the_optimizer_sums_again(two_replicas, alone):
    def step_of(model, optimizer):
        own_sums = applying_own_sums(skip_gradients_aggregation=True)(model, optimizer)
        return own_sums, applying(model, optimizer)

    model, (own_sums, summed) = model_and_step(two_replicas, step_of)
    for step in (own_sums, summed, summed):
        two_replicas.run(step, args=(halves(X), halves(Y)))
    assert_close(model.get_weights(), alone)


def test_minimize_sums_the_gradients_of_the_replicas(two_replicas, alone):
    def step_of(model, optimizer):
        def step(x, y):
            def loss():
                losses = tf.keras.losses.mse(y, model(x))
                return tf.nn.compute_average_loss(losses, global_batch_size=16)

            optimizer.minimize(loss, lambda: model.trainable_variables)

        return step

    assert_close(trained(two_replicas, step_of), alone)


def test_aggregate_gradients_returns_sums(two_replicas):
    with two_replicas.scope():
        weight = tf.keras.Variable([0.0])
        optimizer = tf.keras.optimizers.SGD(1.0)

    def step(gradient):
        ((total, _),) = optimizer.aggregate_gradients([(gradient, weight)])
        return total

    gradients = PerReplica([np.array([1.0], "float32"), np.array([2.0], "float32")])
    totals = two_replicas.run(step, args=(gradients,)).values
    assert [float(total[0]) for total in totals] == [3, 3]


def test_the_learning_rate_can_be_assigned_between_steps(two_replicas):
    with two_replicas.scope():
        weight = tf.keras.Variable([0.0])
        optimizer = tf.keras.optimizers.SGD(1.0)

    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), weight)])

    two_replicas.run(step)
    with two_replicas.scope():
        optimizer.lr.assign(0.25)
    two_replicas.run(step)
    assert weight.numpy().tolist() == [-2.5]  # 2 replicas: 2 * 1.0 + 2 * 0.25


# -- mixed precision ------------------------------------------------------------------------


def trained_in_half_precision(run, wrap, unscales, scale=2.0**8):
    """Trains a step with loss scaling, three times, by `run(step)` of a scope `wrap`."""
    keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with wrap():
            model = tf.keras.Sequential(
                [tf.keras.layers.Dense(4), tf.keras.layers.Dense(1, dtype="float32")]
            )
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
                tf.keras.optimizers.SGD(0.1), initial_scale=scale
            )

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 16
                scaled = (optimizer.get_scaled_loss if unscales else optimizer.scale_loss)(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            if unscales:
                gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for _ in range(3):
            run(step)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    return model.get_weights(), float(optimizer.loss_scale)


def eagerly(step):
    step(X, Y)


@pytest.mark.parametrize("unscales", [True, False], ids=["Keras 2", "Keras 3"])
def test_loss_scaling_changes_no_update(two_replicas, unscales):
    plain, _ = trained_in_half_precision(eagerly, contextlib.nullcontext, False, scale=1.0)
    alone, _ = trained_in_half_precision(eagerly, contextlib.nullcontext, unscales)
    together, scale = trained_in_half_precision(
        lambda step: two_replicas.run(step, args=(halves(X), halves(Y))),
        two_replicas.scope,
        unscales,
    )
    assert scale == 2.0**8
    for expected, one, other in zip(plain, alone, together, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(other, one, rtol=1e-2, atol=1e-3)


def test_nadam_under_loss_scaling_updates_as_in_tensorflow(two_replicas):
    """Its product of decays is a variable that it does not list; infinite gradients leave it."""
    x = np.sin(np.arange(64, dtype="float32")).reshape(16, 4)
    y = x.sum(axis=1, keepdims=True)
    y[8:12] = np.inf
    with two_replicas.scope():
        kernel = tf.keras.initializers.Constant(0.2)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer=kernel)])
        inner = tf.keras.optimizers.Nadam(0.1)
        model.compile(tf.keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2), "mse")
    model.fit(x, y, 4, 3, verbose=0, shuffle=False)
    # TensorFlow 2.21, one device.
    assert float(inner._u_product) == pytest.approx(0.003277799114584923, rel=1e-6)
    assert float(model.optimizer.dynamic_scale) == 32768.0
    expected = [0.6789830327033997, 0.7875153422355652, 0.7811574935913086, 0.6592820882797241]
    assert_close(model.get_weights()[0].ravel(), np.float32(expected))


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "loss scaling"])
def test_nadam_in_a_step_of_ones_own_updates_as_in_tensorflow(two_replicas, scales):
    with two_replicas.scope():
        weight = tf.Variable([0.2, 0.4])
        inner = tf.keras.optimizers.Nadam(0.1)
        optimizer = tf.keras.optimizers.LossScaleOptimizer(inner) if scales else inner

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weight - [1.0, 3.0]) ** 2) / 2
            scaled = optimizer.scale_loss(loss)
        optimizer.apply_gradients([(tape.gradient(scaled, weight), weight)])

    for _ in range(5):
        two_replicas.run(step)
    # TensorFlow 2.21, one device, without loss scaling.
    assert float(inner._u_product) == pytest.approx(0.031461525708436966, rel=1e-6)
    assert_close(weight.numpy(), np.float32([0.5627308487892151, 0.7868694067001343]))


def test_a_loss_scale_of_ones_own_class_applies_as_it_says(two_replicas):
    calls = []

    class Counting(tf.keras.optimizers.LossScaleOptimizer):
        def stateless_apply(self, *args):
            calls.append(1)
            return super().stateless_apply(*args)

    with two_replicas.scope():
        weight = tf.keras.Variable([1.0])
        optimizer = Counting(tf.keras.optimizers.SGD(0.5), initial_scale=2.0)
    two_replicas.run(lambda: optimizer.apply_gradients([(tf.constant([1.0]), weight)]))
    assert calls
    assert weight.numpy().tolist() == [0.5]


def test_a_scale_that_overflows_is_halved_and_nothing_is_updated(two_replicas):
    weights, scale = trained_in_half_precision(
        lambda step: two_replicas.run(step, args=(halves(X), halves(Y))),
        two_replicas.scope,
        True,
        scale=2.0**40,
    )
    keras.utils.set_random_seed(0)
    untrained = tf.keras.Sequential([tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)])
    untrained(X)
    assert scale == 2.0**37
    np.testing.assert_array_equal(weights[0], untrained.get_weights()[0])
