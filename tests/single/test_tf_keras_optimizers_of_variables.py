"""Keras' optimizers scale losses and accumulate gradients of `tf.Variable`s, as on TensorFlow."""

import numpy as np
import pytest

import unison.tf as tf


def called_as(function, form):
    """`function` as it is called: by Python, compiled, or on two replicas."""
    if form == "python":
        return function
    if form == "compiled":
        return tf.function(function)
    strategy = tf.distribute.get_strategy()
    return lambda *args: strategy.run(function, args)


@pytest.fixture(params=["python", "compiled", "replicas"])
def form(request):
    if request.param != "replicas":
        yield request.param
        return
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        yield request.param


def replicas(form):
    return 2 if form == "replicas" else 1


def test_loss_scaling_skips_steps_and_grows(form):
    variable = tf.Variable([1.0, 2.0])
    inner = tf.keras.optimizers.SGD(0.1 / replicas(form))
    optimizer = tf.keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=8.0, dynamic_growth_steps=2
    )
    optimizer.build([variable])

    def step(x):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(variable * x))
        optimizer.apply_gradients([(tape.gradient(scaled, variable), variable)])

    step = called_as(step, form)
    seen = []
    for x in (1.0, float("inf"), 1.0, 1.0, 1.0):
        step(tf.constant(x))
        seen.append((variable.numpy()[0].item(), float(optimizer.dynamic_scale.numpy())))
    values, scales = zip(*seen, strict=True)
    assert values == pytest.approx([0.9, 0.9, 0.8, 0.7, 0.6])
    assert scales == (8.0, 4.0, 4.0, 8.0, 8.0)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_gradients_are_accumulated_over_steps(form, name):
    """As an optimizer that gets the mean of each two gradients."""
    make = getattr(tf.keras.optimizers, name)
    variable, expected = tf.Variable([1.0, -2.0]), tf.Variable([1.0, -2.0])
    optimizer = make(0.1, gradient_accumulation_steps=2, clipnorm=3.0, weight_decay=0.01)
    of_means = make(0.1, clipnorm=3.0, weight_decay=0.01)
    for each in (optimizer, of_means):
        each.build([variable] if each is optimizer else [expected])

    step = called_as(lambda g: optimizer.apply_gradients([(g, variable)]), form)
    step_of_means = called_as(lambda g: of_means.apply_gradients([(g, expected)]), form)
    gradients = np.random.default_rng(0).normal(size=(6, 2)).astype("float32")
    for first, second in gradients.reshape(3, 2, 2):
        step(tf.constant(first) / replicas(form))
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), 1e-6)
        step(tf.constant(second) / replicas(form))
        step_of_means(tf.constant(first + second) / 2 / replicas(form))
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), 1e-5)
