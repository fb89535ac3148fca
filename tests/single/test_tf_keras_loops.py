"""Custom training loops with Keras' parts: in `strategy.run`, and in a plain `tf.function`."""

import contextlib

import keras
import numpy as np
import pytest

import unison.tf as tf
from keras_comparison import assert_close
from unison import PerReplica
from unison.keras.variables import ReplicatedVariable

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def halves(array):
    return PerReplica([array[:8], array[8:]])


# -- metrics --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [None, "two_replicas"])
def test_a_metric_may_return_its_variable(strategy, request):
    class Calls(tf.keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="calls")
            self.calls = self.add_weight(name="calls", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.calls.assign_add(1.0)

        def result(self):
            return self.calls

    scope = (
        contextlib.nullcontext() if strategy is None else request.getfixturevalue(strategy).scope()
    )
    with scope:
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Calls()])
    replicas = 1 if strategy is None else 2
    assert model.evaluate(X, Y, batch_size=8, verbose=0)[1] == 2 * replicas
    history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history
    assert history["calls"] == [4 * replicas] * 2


def test_metrics_count_what_all_replicas_see(two_replicas):
    with two_replicas.scope():
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        loss = tf.keras.metrics.Mean()

    def step(labels, predictions):
        accuracy.update_state(labels, predictions)
        loss.update_state(labels)

    labels = PerReplica([np.array([0, 1]), np.array([1, 1, 0])])
    predictions = PerReplica([np.eye(2)[[0, 1]], np.eye(2)[[0, 0, 0]]])
    two_replicas.run(step, args=(labels, predictions))
    assert f"{accuracy.result() * 100:.1f}" == "60.0"
    assert loss.result().numpy() == np.float32(0.6)
    accuracy.reset_states()
    assert float(accuracy.result()) == 0


def test_a_metric_made_outside_the_scope_is_refused_in_a_program(two_replicas):
    metric = tf.keras.metrics.Mean()
    with pytest.raises(ValueError, match="not created in the strategy's scope"):
        two_replicas.run(lambda: metric.update_state(1.0))


def test_the_result_of_a_metric_is_read_inside_a_function(two_replicas):
    with two_replicas.scope():
        metric = tf.keras.metrics.Mean()

    @tf.function
    def epoch():
        metric.reset_state()
        two_replicas.run(lambda x: metric.update_state(x), args=(PerReplica([1.0, 4.0]),))
        return metric.result()

    assert [float(epoch()), float(epoch())] == [2.5, 2.5]


# -- losses ---------------------------------------------------------------------------------


class Penalized(tf.keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x) * 0.5)
        return x


def test_losses_of_layers_and_regularizers_are_there_in_a_program(two_replicas):
    with two_replicas.scope():
        dense = tf.keras.layers.Dense(
            1, kernel_initializer="ones", kernel_regularizer="l2", activity_regularizer="l1"
        )
        model = tf.keras.Sequential([Penalized(), dense])

    def step(x):
        model(x)
        return tf.stack(model.losses), tf.nn.scale_regularization_loss(tf.add_n(model.losses))

    ones = np.ones((4, 3), "float32")
    losses, scaled = two_replicas.run(step, args=(PerReplica([ones, 2 * ones]),))
    # add_loss: 0.5 * 12; activity: 0.01 * 3 an example; weights: 0.01 * 3.
    expected = [[6, 0.03, 0.03], [12, 0.06, 0.03]]
    assert_close([np.asarray(value) for value in losses.values], expected)
    assert_close([float(value) for value in scaled.values], [3.03, 6.045])


def test_the_losses_of_a_program_are_those_of_its_latest_call(two_replicas):
    with two_replicas.scope():
        model = tf.keras.Sequential([Penalized()])

    def step(x):
        model(x)
        model(x)
        return tf.stack(model.losses)

    ones = np.ones((2, 3), "float32")
    for _ in range(2):
        losses = two_replicas.run(step, args=(ones,))
        assert np.asarray(losses.values[0]).tolist() == [3.0]


def test_losses_of_examples_are_averaged_over_the_global_batch(two_replicas):
    with two_replicas.scope():
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=tf.keras.losses.Reduction.NONE
        )

    def step(labels, logits):
        losses = loss_object(labels, logits)
        return tf.nn.compute_average_loss(losses, global_batch_size=5)

    labels = PerReplica([np.array([0, 1]), np.array([1, 0, 0])])
    logits = PerReplica([np.zeros((2, 4), "float32"), np.zeros((3, 4), "float32")])
    losses = two_replicas.run(step, args=(labels, logits))
    assert float(two_replicas.reduce("SUM", losses, axis=None)) == pytest.approx(np.log(4))


# -- built in the program -------------------------------------------------------------------


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(4, activation="tanh")
        self.normalization = tf.keras.layers.BatchNormalization()
        self.outputs_layer = tf.keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.outputs_layer(self.normalization(self.hidden(x), training=training))


def sequential():
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])


def step_of(model, optimizer, metric):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.mse(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(loss)
        return loss

    return step


@pytest.mark.parametrize(
    ("make", "decorate"),
    [(sequential, lambda step: step), (Subclassed, tf.function)],
    ids=["Sequential", "subclass, in a function"],
)
def test_models_metrics_and_slots_are_built_in_the_program_that_first_needs_them(
    two_replicas, make, decorate
):
    keras.utils.set_random_seed(0)
    with two_replicas.scope():
        model, optimizer = make(), tf.keras.optimizers.Adam(0.1)
        metric = tf.keras.metrics.Mean()
        step = decorate(step_of(model, optimizer, metric))
    losses = [
        two_replicas.reduce("SUM", two_replicas.run(step, args=(halves(X), halves(Y))), axis=None)
        for _ in range(4)
    ]
    assert float(losses[-1]) < float(losses[0])
    assert int(optimizer.iterations.numpy()) == 4
    assert len(optimizer.variables) == 2 + 2 * len(model.trainable_variables)
    for variable in (*model.variables, *optimizer.variables):
        assert isinstance(variable, ReplicatedVariable)
        assert variable.cell.placement == two_replicas.placement


# -- a model of no strategy, in a plain tf.function -----------------------------------------


def network():
    keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )


def trained_by(decorate, build_first):
    model, optimizer = network(), tf.keras.optimizers.Adam(0.1)
    metric = tf.keras.metrics.Mean()
    if build_first:
        model(X)
    step = decorate(step_of(model, optimizer, metric))
    losses = [float(step(X, Y)) for _ in range(3)]
    return losses, model, optimizer, metric


@pytest.fixture(scope="module")
def eagerly():
    """What the loop computes step by step, with Keras' variables as they are."""
    losses, model, optimizer, metric = trained_by(lambda step: step, True)
    slots = [variable.numpy() for variable in optimizer.variables]
    return losses, model.get_weights(), slots, float(metric.result())


@pytest.mark.parametrize("build_first", [True, False], ids=["built", "unbuilt"])
def test_a_function_trains_a_model_of_no_strategy_as_python_does(eagerly, build_first):
    losses, model, optimizer, metric = trained_by(tf.function, build_first)
    slots = [variable.numpy() for variable in optimizer.variables]
    assert_close((losses, model.get_weights(), slots, float(metric.result())), eagerly)


def test_a_function_draws_new_dropout_masks_in_every_call():
    layer = tf.keras.layers.Dropout(0.5)
    drop = tf.function(lambda x: layer(x, training=True))
    ones = np.ones((200,), "float32")
    first, second = np.asarray(drop(ones)), np.asarray(drop(ones))
    assert not np.array_equal(first, second)


def test_a_function_sees_what_fit_changed_and_fit_what_the_function_changed(tmp_path):
    _, model, _, _ = trained_by(tf.function, True)
    predict = tf.function(lambda x: model(x, training=False))
    before = np.asarray(predict(X))
    np.testing.assert_allclose(model.predict(X, verbose=0), before, rtol=1e-5)
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    after = np.asarray(predict(X))
    assert not np.allclose(after, before)
    np.testing.assert_allclose(model.predict(X, verbose=0), after, rtol=1e-5)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(np.mean((after - Y) ** 2), rel=1e-4)
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(X, verbose=0), after, rtol=1e-5)


def test_a_variable_that_only_a_later_signature_touches_is_a_variable_there_too():
    base, bonus = tf.keras.Variable(1.0), tf.keras.Variable(10.0)

    @tf.function
    def value(x, with_bonus):
        return x + base.value + (bonus.value if with_bonus else 0.0)

    assert float(value(tf.constant(1.0), False)) == 2.0
    assert float(value(tf.constant(1.0), True)) == 12.0
    bonus.assign(20.0)
    assert float(value(tf.constant(1.0), True)) == 22.0


def test_a_variable_that_a_program_of_several_replicas_only_reads_stays_plain(two_replicas):
    variable = tf.keras.Variable(3.0)
    assert [float(x) for x in two_replicas.run(lambda: variable * 2).values] == [6.0, 6.0]
    assert not isinstance(variable, ReplicatedVariable)


def test_one_replica_trains_a_model_made_outside_its_scope(eagerly):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    model, optimizer = network(), tf.keras.optimizers.Adam(0.1)
    model(X)
    step = step_of(model, optimizer, tf.keras.metrics.Mean())
    losses = [float(strategy.run(step, args=(X, Y))) for _ in range(3)]
    assert_close((losses, model.get_weights()), eagerly[:2])


# -- models that are built by their first step ----------------------------------------------


@pytest.mark.parametrize(
    "names",
    [["LSTM"], ["SimpleRNN"], ["GRU"], ["Dense"], ["LSTM", "Dense"]],
    ids="-".join,
)
def test_a_layer_that_the_first_step_builds_is_trained_by_it(names, two_replicas, caplog):
    """A recurrent layer reads its weights in the body of a loop only."""
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(4, 6, 2)

    def trained(strategy, is_built):
        with strategy.scope():
            keras.utils.set_random_seed(2)
            layers = [getattr(tf.keras.layers, name)(3) for name in names]
            model = tf.keras.Sequential([*layers, tf.keras.layers.Flatten()])
            if is_built:
                model.build((None, 6, 2))
            optimizer = tf.keras.optimizers.SGD(0.1)

        def step(x):
            with tf.GradientTape() as tape:
                losses = tf.reduce_sum(model(x) ** 2, axis=1)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=4)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for batch in strategy.experimental_distribute_dataset([x, x]):
            strategy.run(step, args=(batch,))
        return model.get_weights()

    assert_close(
        trained(two_replicas, is_built=False), trained(tf.distribute.get_strategy(), is_built=True)
    )
    assert "radients" not in caplog.text
