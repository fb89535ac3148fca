"""Train steps of one's own under `tf.keras`: several replicas train as one device does.

What TensorFlow answers is in `tests/parity/programs/own_steps.py`. Here are the batches on which
TensorFlow's replicas would not add up to one device: uneven ones, weights, masks.
"""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison.tf as tf
from unison.keras import BatchNormalization

X = np.sin(np.arange(21 * 3, dtype=np.float32)).reshape(21, 3)
Y = np.cos(X.sum(axis=1, keepdims=True)).astype(np.float32)
WEIGHTS = np.linspace(0.2, 2.0, 21, dtype=np.float32)
# 8, 8 and 5 examples: on 2 replicas 3 and 2, on 3 2, 2 and 1, on 4 2, 2, 1 and none.
BATCH = 8


@pytest.fixture(params=[2, 3, 4], ids="{} replicas".format)
def strategy(request):
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(request.param)])


def all_reduce(op, values):
    return tf.distribute.get_replica_context().all_reduce(op, values)


def built(loss_of, loss="mse", add=None, sums_by_hand=False, **layer):
    """A model whose step differentiates `loss_of(model, x, y, weights, predictions)`."""

    class OwnStep(tf.keras.Model):
        def train_step(self, data):
            x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                value = loss_of(self, x, y, weights, predictions)
            gradients = tape.gradient(value, self.trainable_variables)
            if sums_by_hand:
                gradients = all_reduce("SUM", gradients)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True),
                skip_gradients_aggregation=sums_by_hand,
            )
            return {}

    keras.utils.set_random_seed(3)
    inputs = tf.keras.Input((3,))
    hidden = tf.keras.layers.Dense(4, activation="tanh", **layer)(inputs)
    outputs = tf.keras.layers.Dense(1)(add(hidden) if add else hidden)
    model = OwnStep(inputs, outputs)
    model.compile(tf.keras.optimizers.SGD(0.02), loss)
    return model


def trained(loss_of, sample_weight=None, **model):
    made = built(loss_of, **model)
    made.fit(X, Y, BATCH, 2, shuffle=False, verbose=0, sample_weight=sample_weight)
    return made.get_weights()


def assert_as_on_one_device(strategy, loss_of, **options):
    expected = trained(loss_of, **options)
    with strategy.scope():
        weights = trained(loss_of, **options)
    for ours, alone in zip(weights, expected, strict=True):
        # The replicas' gradients are added in another order, in each of six steps.
        np.testing.assert_allclose(ours, alone, rtol=2e-5, atol=2e-6)


def errors(y, predictions):
    return tf.reduce_sum((predictions - y) ** 2, axis=1)


def compute_loss(model, x, y, weights, predictions):
    return model.compute_loss(x, y, predictions, weights)


def average(model, x, y, weights, predictions):
    return tf.nn.compute_average_loss(errors(y, predictions))


def test_compute_loss_of_uneven_batches(strategy):
    assert_as_on_one_device(strategy, compute_loss)


def test_an_average_loss_of_uneven_batches(strategy):
    assert_as_on_one_device(strategy, average)


def test_an_average_loss_of_a_given_batch_size(strategy):
    def loss(model, x, y, weights, predictions):
        return tf.nn.compute_average_loss(errors(y, predictions), global_batch_size=BATCH)

    assert_as_on_one_device(strategy, loss)


def test_a_penalty_that_each_replica_has_a_part_of(strategy):
    def loss(model, *data):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        penalty = tf.reduce_sum(model.layers[1].kernel ** 2) / replicas
        return average(model, *data) + 0.1 * penalty

    assert_as_on_one_device(strategy, loss)


def test_a_penalty_divided_by_the_number_of_a_replicas_examples_does_not_count_without():
    """It is infinite there."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(4)])

    def loss(model, x, *data):
        penalty = tf.reduce_sum(model.layers[1].kernel ** 2)
        count = tf.cast(tf.shape(x)[0], tf.float32)
        return average(model, x, *data) + 0.1 * penalty / count

    with strategy.scope():
        assert all(np.isfinite(weights).all() for weights in trained(loss))


def test_a_sum_divided_by_the_global_batch(strategy):
    assert_as_on_one_device(
        strategy,
        lambda model, x, y, weights, predictions: tf.reduce_sum(errors(y, predictions)) / BATCH,
    )


def test_gradients_that_the_step_sums(strategy):
    assert_as_on_one_device(strategy, average, sums_by_hand=True)


def test_gradients_of_an_embedding_that_the_step_sums(strategy):
    def add(hidden):
        tokens = tf.keras.layers.Lambda(lambda values: tf.cast(values > 0, "int32"))(hidden)
        embedded = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(2, 2)(tokens))
        return tf.keras.layers.Concatenate()([hidden, embedded])

    assert_as_on_one_device(strategy, average, add=add, sums_by_hand=True)


def test_examples_that_the_step_counts(strategy):
    def loss(model, x, y, weights, predictions):
        count = all_reduce("SUM", tf.cast(tf.shape(x)[0], tf.float32))
        return tf.reduce_sum(errors(y, predictions)) / count

    assert_as_on_one_device(strategy, loss)


def test_a_variable_that_counts_examples(strategy):
    with strategy.scope():
        seen = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)

        def loss(model, x, y, weights, predictions):
            seen.assign_add(tf.shape(x)[0])
            return average(model, x, y, weights, predictions)

        model = built(loss)
    model.fit(X, Y, BATCH, shuffle=False, verbose=0)
    assert seen.numpy() == len(X)


def test_synchronized_normalization_behind_an_embedding(strategy):
    def add(hidden):
        tokens = tf.keras.layers.Lambda(lambda values: tf.cast(values > 0, "int32"))(hidden)
        embedded = tf.keras.layers.Embedding(2, 2)(tokens)
        normalized = BatchNormalization(synchronized=True)(embedded)
        return tf.keras.layers.Concatenate()([hidden, tf.keras.layers.Flatten()(normalized)])

    assert_as_on_one_device(strategy, average, add=add)


@pytest.mark.parametrize("lookup", [tf.gather, tf.nn.embedding_lookup])
def test_a_sum_by_hand_of_rows_of_a_table(strategy, lookup):
    table = tf.constant(np.random.default_rng(3).normal(size=(4, 1)).astype(np.float32))

    def loss(model, x, y, weights, predictions):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        rows = lookup(tf.concat([model.layers[-1].kernel, table], 0), tf.cast(tf.abs(x), tf.int32))
        mean = all_reduce("SUM", tf.reduce_sum(rows * x[..., None])) / BATCH
        return average(model, x, y, weights, predictions) + mean**2 / replicas

    assert_as_on_one_device(strategy, loss)


# Of no examples, each of these is a constant on JAX.
LOSSES_WITHOUT_GRADIENT = {
    "cross entropy": lambda z: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.zeros(tf.shape(z)[0], tf.int32), tf.concat([z, z * z], 1)
    ),
    "columns": lambda z: tf.concat([z, z * z], 1)[:, [0, 1]],
    "gather": lambda z: tf.gather(tf.concat([z, z * z], 1), [1, 0, 1], axis=1),
    "mask": lambda z: tf.boolean_mask(tf.concat([z, z * z], 1), np.array([False, True]), axis=1),
    "quotient": lambda z: tf.math.divide_no_nan(z, 1.0 + z * z),
}


@pytest.mark.parametrize("name", LOSSES_WITHOUT_GRADIENT)
@pytest.mark.parametrize("penalty", [0.0, 0.1, "beside"])
def test_sums_by_hand_behind_which_no_examples_have_no_gradient(strategy, name, penalty):
    def loss(model, x, y, weights, predictions):
        count = all_reduce("SUM", tf.cast(tf.shape(x)[0], tf.float32))
        centered = predictions - all_reduce("SUM", tf.reduce_sum(predictions)) / count
        values = tf.reduce_sum(LOSSES_WITHOUT_GRADIENT[name](centered)) / BATCH
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if penalty == "beside":  # a sum that is not in the loss, with an infinite derivative
            all_reduce("SUM", tf.pow(tf.reduce_sum(0 * model.layers[1].kernel), 0.5))
            return values
        return values + penalty * tf.reduce_sum(model.layers[1].kernel ** 2) / replicas

    assert_as_on_one_device(strategy, loss)


def needing_examples(model, x, y, weights, predictions):
    """Centers the predictions by the smallest, which no examples have."""
    return average(model, x, y, weights, predictions - tf.stop_gradient(jnp.min(predictions)))


def test_a_step_that_cannot_compute_without_examples():
    # On four replicas, the last one has no examples of the last batch.
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(4)])
    with strategy.scope():
        trained(needing_examples)
        with pytest.raises(RuntimeError, match=r"no examples.*zero-size array.*drop_remainder"):
            trained(needing_examples, sums_by_hand=True)


def test_a_loss_object_that_the_step_calls(strategy):
    loss_object = tf.keras.losses.Huber()
    assert_as_on_one_device(
        strategy, lambda model, x, y, weights, predictions: loss_object(y, predictions)
    )


@pytest.mark.parametrize("reduction", ["sum", "mean", "sum_over_batch_size"])
def test_compute_loss_of_every_reduction(strategy, reduction):
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    assert_as_on_one_device(strategy, compute_loss, loss=loss)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_compute_loss_with_sample_weights(strategy, reduction):
    loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
    assert_as_on_one_device(strategy, compute_loss, loss=loss, sample_weight=WEIGHTS)


def test_compute_loss_of_masked_values(strategy):
    def add(hidden):
        # Masks some rows of each batch, another number of them on each replica.
        return tf.keras.layers.Masking()(
            tf.keras.layers.Reshape((1, 4))(tf.keras.layers.ReLU()(hidden))
        )

    assert_as_on_one_device(strategy, compute_loss, add=add)


def test_regularization_in_compute_loss(strategy):
    assert_as_on_one_device(strategy, compute_loss, kernel_regularizer="l2")


def test_regularization_that_the_step_scales(strategy):
    def loss(model, *data):
        regularization = tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        return average(model, *data) + regularization

    assert_as_on_one_device(strategy, loss, kernel_regularizer="l2")


def test_regularization_of_activities(strategy):
    assert_as_on_one_device(strategy, compute_loss, activity_regularizer="l2")


def test_a_mean_that_is_added_by_a_layer(strategy):
    class AddsLoss(tf.keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_mean(tf.abs(x)))
            return x

    assert_as_on_one_device(strategy, compute_loss, add=AddsLoss())


def test_the_losses_of_several_outputs(strategy):
    class TwoOutputs(tf.keras.Model):
        train_step = built(compute_loss).__class__.train_step

    def outcome():
        keras.utils.set_random_seed(3)
        inputs = tf.keras.Input((3,))
        outputs = {"a": tf.keras.layers.Dense(1)(inputs), "b": tf.keras.layers.Dense(1)(inputs)}
        model = TwoOutputs(inputs, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 1.0, "b": 0.3})
        history = model.fit(X, {"a": Y, "b": -Y}, BATCH, 2, shuffle=False, verbose=0).history
        return model.get_weights(), history

    expected, _ = outcome()
    with strategy.scope():
        weights, _ = outcome()
    for ours, alone in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=2e-5, atol=2e-6)


def test_a_scaled_loss_in_low_precision(strategy):
    class Scaling(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {}

    def weights():
        keras.utils.set_random_seed(3)
        inputs = tf.keras.Input((3,))
        model = Scaling(inputs, tf.keras.layers.Dense(1)(inputs))
        optimizer = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD(0.02), 64.0)
        model.compile(optimizer, "mse")
        model.fit(X, Y, BATCH, 2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = weights()
    with strategy.scope():
        together = weights()
    for ours, alone in zip(together, expected, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=2e-5, atol=2e-6)


def test_a_step_that_adds_to_keras_own(strategy):
    class Counting(tf.keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "twice": 2 * logs["loss"]}

    def outcome():
        keras.utils.set_random_seed(3)
        inputs = tf.keras.Input((3,))
        model = Counting(inputs, tf.keras.layers.Dense(1, kernel_regularizer="l2")(inputs))
        model.compile("sgd", "mse")
        history = model.fit(X, Y, BATCH, 1, shuffle=False, verbose=0).history
        return [*model.get_weights(), history["loss"]]

    expected = outcome()
    with strategy.scope():
        together = outcome()
    for ours, alone in zip(together, expected, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=2e-5, atol=2e-6)


def test_a_step_may_read_a_variable_in_a_branch_only(strategy):
    with strategy.scope():
        gain = tf.Variable(3.0)

    class Scaled(tf.keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {"gain": tf.cond(logs["loss"] > 0.0, lambda: gain * 2.0, lambda: 1.0)}

    with strategy.scope():
        inputs = tf.keras.Input((3,))
        model = Scaled(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    assert model.fit(X, Y, BATCH, 1, verbose=0).history["gain"] == [6.0]


def test_a_step_may_leave_compiled_metrics_alone(strategy):
    class Silent(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"part": loss}

    with strategy.scope():
        inputs = tf.keras.Input((3,))
        model = Silent(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", metrics=["mae"])
    assert list(model.fit(X, Y, verbose=0).history) == ["part"]


def test_logs_may_be_integers_and_variables(strategy):
    """Also where a replica has no examples, of the last of three steps."""

    class Logging(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = average(self, x, y, None, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            iterations = self.optimizer.iterations
            return {"steps": iterations, "any": tf.reduce_any(iterations > 1), "three": 3}

        def test_step(self, data):
            return {"rate": self.optimizer.learning_rate, "steps": self.optimizer.iterations}

    with strategy.scope():
        inputs = tf.keras.Input((3,))
        model = Logging(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile(tf.keras.optimizers.SGD(0.02))
    read = {"batch_size": BATCH, "verbose": 0, "return_dict": True}
    assert model.evaluate(X, Y, **read) == pytest.approx({"rate": 0.02, "steps": 0})
    history = model.fit(X, Y, BATCH, shuffle=False, verbose=0).history
    assert history == {"steps": [3.0], "any": [1.0], "three": [3.0]}
    assert model.evaluate(X, Y, **read) == pytest.approx({"rate": 0.02, "steps": 3})


def test_evaluation_between_epochs_may_use_a_loss_that_the_step_does_not(strategy):
    """It adds the metrics of a loss of several outputs to those of the model."""

    class OwnStep(tf.keras.Model):
        def train_step(self, data):
            x, targets = data
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                values = [tf.square(p - t) for p, t in zip(predictions, targets, strict=True)]
                loss = sum(tf.nn.compute_average_loss(value[:, 0]) for value in values)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return self.compute_metrics(x, targets, predictions)

    def history(**options):
        keras.utils.set_random_seed(3)
        inputs = tf.keras.Input((3,))
        outputs = [tf.keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
        model = OwnStep(inputs, outputs)
        model.compile(tf.keras.optimizers.SGD(0.02), ["mae", "mse"], metrics=[["mae"], ["mse"]])
        return model.fit(*data, BATCH, 2, shuffle=False, verbose=0, **options).history

    data = X, [Y, 1 - Y]
    expected = history()
    with strategy.scope():
        found = history(validation_data=data)
    for name in ("a_mae", "b_mse"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


def test_weights_changed_without_an_optimizer_ask_for_a_sum(caplog):
    class ByHand(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for variable, gradient in zip(
                self.trainable_variables,
                tape.gradient(loss, self.trainable_variables),
                strict=True,
            ):
                variable.assign_sub(0.1 * gradient)
            return {}

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inputs = tf.keras.Input((3,))
        model = ByHand(inputs, tf.keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert 'all_reduce("SUM", gradients)' in caplog.text
