"""Train steps of one's own: how losses are scaled, and what an optimizer does with gradients.

In a replica, TensorFlow's optimizers sum gradients. Keras' losses divide by the number of replicas
there (but for `reduction="sum"`), so that the sum is the gradient of the global mean.
"""

from __future__ import annotations

import numpy as np

from parity.answers import plain
from parity.facts import fact

X = np.sin(np.arange(16 * 3, dtype=np.float32)).reshape(16, 3)
Y = np.cos(X.sum(axis=1, keepdims=True)).astype(np.float32)
#: One that the replicas' examples do not have in common.
SAMPLE_WEIGHT = np.linspace(0.25, 2.0, 16, dtype=np.float32)
KERNEL = np.array([[0.3], [-0.2], [0.5]], np.float32)
BATCH = 8


def squares(tf, y, predictions):
    return tf.reduce_sum((predictions - y) ** 2, axis=1)


def by_one_device():
    """The weights of the linear model after two steps on the mean of the squares, by NumPy."""
    kernel, bias = KERNEL.astype(np.float64), np.zeros(1)
    for start in range(0, len(X), BATCH):
        x, y = X[start : start + BATCH], Y[start : start + BATCH]
        error = 2 * (x @ kernel + bias - y) / len(x)
        kernel, bias = kernel - 0.1 * x.T @ error, bias - 0.1 * error.sum(axis=0)
    return [kernel.astype(np.float32), bias.astype(np.float32)]


def regression(tf, loss_of, regularizer=None, around=lambda tf, gradients: gradients):
    """A model of one layer whose step differentiates `loss_of(tf, model, x, y, predictions)`."""

    class Regression(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.head = tf.keras.layers.Dense(1, kernel_regularizer=regularizer)
            self.tracked = tf.keras.metrics.Mean(name="tracked")

        def call(self, x):
            return self.head(x)

        @property
        def metrics(self):
            return [self.tracked]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(tf, self, x, y, self(x, training=True))
            gradients = around(tf, tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.tracked.update_state(loss)
            return {"tracked": self.tracked.result()}

        def test_step(self, data):
            x, y = data
            self.tracked.update_state(self.compute_loss(x, y, self(x)))
            return {"tracked": self.tracked.result()}

    return Regression()


def prepared(tf, model, loss="mse"):
    model(tf.zeros([2, 3]))
    model.set_weights([KERNEL, np.zeros(1, np.float32)])
    model.compile(tf.keras.optimizers.SGD(0.1), loss)
    return model


def fitted(tf, strategy, loss_of, examples=16, loss="mse", **model):
    """The weights and the tracked loss after an epoch of `fit`."""
    with strategy.scope():
        made = prepared(tf, regression(tf, loss_of, **model), loss)
    made.fit(X[:examples], Y[:examples], batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return made.get_weights(), float(made.tracked.result())


def mean_of_the_replica(tf, model, x, y, predictions):
    return tf.reduce_mean(squares(tf, y, predictions))


def sum_over_the_global_batch(tf, model, x, y, predictions):
    return tf.reduce_sum(squares(tf, y, predictions)) / BATCH


def average(tf, model, x, y, predictions):
    return tf.nn.compute_average_loss(squares(tf, y, predictions), global_batch_size=BATCH)


def average_of_a_batch_that_is_not_given(tf, model, x, y, predictions):
    return tf.nn.compute_average_loss(squares(tf, y, predictions))


def compiled(tf, model, x, y, predictions):
    return model.compute_loss(x, y, predictions)


@fact
def gradients_of_a_mean_of_the_replicas_examples_are_summed(tf, two):
    return fitted(tf, two, mean_of_the_replica)


@fact
def a_sum_divided_by_the_global_batch(tf, two):
    return fitted(tf, two, sum_over_the_global_batch)


@fact
def a_sum_divided_by_the_global_batch_of_uneven_batches(tf, two):
    return fitted(tf, two, sum_over_the_global_batch, examples=13)[0]


@fact
def an_average_loss(tf, two):
    return fitted(tf, two, average)


@fact
def an_average_loss_of_uneven_batches(tf, two):
    return fitted(tf, two, average, examples=13)[0]


@fact
def an_average_loss_by_the_replicas_batch(tf, two):
    return fitted(tf, two, average_of_a_batch_that_is_not_given)


@fact
def the_compiled_loss(tf, two):
    return fitted(tf, two, compiled)


@fact
def the_compiled_loss_on_four_replicas(tf, four):
    return fitted(tf, four, compiled)


@fact
def the_compiled_loss_that_sums(tf, two):
    return fitted(tf, two, compiled, loss=tf.keras.losses.MeanSquaredError(reduction="sum"))


@fact
def the_compiled_loss_in_a_test_step(tf, two):
    with two.scope():
        model = prepared(tf, regression(tf, compiled))
    return model.evaluate(X, Y, batch_size=BATCH, verbose=0)


@fact
def regularization_that_is_scaled(tf, two):
    def loss(tf, model, x, y, predictions):
        regularization = tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        return average(tf, model, x, y, predictions) + regularization

    return fitted(tf, two, loss, regularizer="l2")


@fact
def regularization_in_the_compiled_loss(tf, two):
    return fitted(tf, two, compiled, regularizer="l2")


@fact
def regularization_that_nobody_scales_is_summed(tf, two):
    def loss(tf, model, x, y, predictions):
        return average(tf, model, x, y, predictions) + tf.add_n(model.losses)

    return fitted(tf, two, loss, regularizer="l2")


def with_loss_object(reduction, **call):
    def loss(tf, model, x, y, predictions):
        return tf.keras.losses.MeanSquaredError(reduction=reduction)(y, predictions, **call)

    return loss


@fact
def a_loss_object_that_the_step_calls(tf, two):
    return fitted(tf, two, with_loss_object("sum_over_batch_size"))


@fact
def a_loss_object_that_sums(tf, two):
    return fitted(tf, two, with_loss_object("sum"))


@fact
def a_loss_object_that_does_not_reduce(tf, two):
    def loss(tf, model, x, y, predictions):
        losses = tf.keras.losses.MeanSquaredError(reduction="none")(y, predictions)
        return tf.nn.compute_average_loss(losses, global_batch_size=BATCH)

    return fitted(tf, two, loss)


@fact
def a_loss_object_with_one_weight_for_all(tf, two):
    return fitted(tf, two, with_loss_object("sum_over_batch_size", sample_weight=3.0))


@fact
def a_loss_function_is_not_scaled(tf, two):
    def loss(tf, model, x, y, predictions):
        return tf.reduce_mean(tf.keras.losses.MSE(y, predictions))

    return fitted(tf, two, loss)


@fact
def gradients_clipped_by_hand_are_the_replicas(tf, two):
    def clipped(tf, gradients):
        return [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]

    return fitted(tf, two, average, around=clipped)


@fact
def gradients_clipped_by_hand_by_their_global_norm(tf, two):
    def clipped(tf, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]

    return fitted(tf, two, compiled, around=clipped)


@fact
def gradients_that_are_summed_and_then_clipped_by_hand(tf, two):
    def clipped(tf, gradients):
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        # The optimizer sums once more.
        return [tf.clip_by_norm(g, 0.1) / context.num_replicas_in_sync for g in summed]

    return fitted(tf, two, average, around=clipped)


@fact
def a_step_that_calls_keras_own(tf, two):
    class Delegating(tf.keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    with two.scope():
        model = prepared(tf, Delegating([tf.keras.layers.Dense(1)]))
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history


@fact
def sample_weights_in_a_step(tf, two):
    class Weighted(tf.keras.Sequential):
        def train_step(self, data):
            x, y, weights = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), weights)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"examples": tf.shape(x)[0]}

    with two.scope():
        model = prepared(tf, Weighted([tf.keras.layers.Dense(1)]))
    model.fit(X, Y, BATCH, 2, shuffle=False, verbose=0, sample_weight=SAMPLE_WEIGHT)
    return model.get_weights()


def two_outputs(tf, scope):
    class Taped(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = self.compute_loss(x, y, predictions)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return self.compute_metrics(x, y, predictions)

    with scope:
        inputs = tf.keras.Input((3,))
        first = tf.keras.layers.Dense(1, kernel_initializer="ones", name="first")
        second = tf.keras.layers.Dense(1, kernel_initializer="ones", name="second")
        model = Taped(inputs, {"a": first(inputs), "b": second(inputs)})
        model.compile(
            tf.keras.optimizers.SGD(0.1),
            {"a": "mse", "b": "mae"},
            loss_weights={"a": 1.0, "b": 0.5},
            metrics={"a": "mae"},
        )
    return model


@fact
def the_losses_of_several_outputs(tf, two):
    model = two_outputs(tf, two.scope())
    labels = {"a": Y, "b": 2 * Y}
    history = model.fit(X, labels, BATCH, 2, shuffle=False, verbose=0).history
    return model.get_weights(), {name: history[name] for name in ("a_loss", "a_mae", "b_loss")}


@fact(
    ours=plain(by_one_device()),
    because="a step of Keras' own weights what an overridden compute_loss returns by the replica's "
    "examples, as on one device; TensorFlow sums its gradients as they are",
)
def a_compute_loss_of_ones_own(tf, two):
    class OwnLoss(tf.keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean((y_pred - y) ** 2)

    with two.scope():
        model = prepared(tf, OwnLoss([tf.keras.layers.Dense(1)]))
    model.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


# -- several optimizers --------------------------------------------------------------------


def gan(tf):
    class GAN(tf.keras.Model):
        """As TensorFlow's guide "Customizing what happens in fit()" has it."""

        def __init__(self):
            super().__init__()
            self.discriminator = tf.keras.Sequential(
                [tf.keras.Input((3,)), tf.keras.layers.Dense(1, kernel_initializer="ones")]
            )
            self.generator = tf.keras.Sequential(
                [tf.keras.Input((2,)), tf.keras.layers.Dense(3, kernel_initializer="ones")]
            )
            self.d_loss_tracker = tf.keras.metrics.Mean(name="d_loss")
            self.g_loss_tracker = tf.keras.metrics.Mean(name="g_loss")
            self.built = True

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.d_optimizer.build(self.discriminator.trainable_weights)
            self.g_optimizer = g_optimizer
            self.g_optimizer.build(self.generator.trainable_weights)
            self.loss_fn = loss_fn

        @property
        def metrics(self):
            return [self.d_loss_tracker, self.g_loss_tracker]

        def train_step(self, real):
            if isinstance(real, tuple):
                real = real[0]
            batch = tf.shape(real)[0]
            noise = real[:, :2]
            images = tf.concat([self.generator(noise), real], axis=0)
            labels = tf.concat([tf.ones((batch, 1)), tf.zeros((batch, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(images))
            weights = self.discriminator.trainable_weights
            gradients = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            misleading = tf.zeros((batch, 1))
            with tf.GradientTape() as tape:
                predictions = self.discriminator(self.generator(noise))
                g_loss = self.loss_fn(misleading, predictions)
            weights = self.generator.trainable_weights
            gradients = tape.gradient(g_loss, weights)
            self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            self.d_loss_tracker.update_state(d_loss)
            self.g_loss_tracker.update_state(g_loss)
            return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}

    return GAN()


@fact(tolerance=2e-4, because="the adversaries amplify the round-off of their steps")
def adversaries_with_an_optimizer_each(tf, two):
    with two.scope():
        model = gan(tf)
        model.compile(
            tf.keras.optimizers.SGD(0.1),
            tf.keras.optimizers.Adam(0.01),
            tf.keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = model.fit(X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history


# -- loops of one's own --------------------------------------------------------------------


def looped(tf, strategy, loss_of, regularizer=None):
    """The weights after a pass of `strategy.run`."""
    with strategy.scope():
        model = prepared(tf, regression(tf, loss_of, regularizer))
        optimizer = model.optimizer
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)

    @tf.function
    def train(x, y):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(tf, model, x, y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(step, args=(x, y))

    losses = []
    for x, y in strategy.experimental_distribute_dataset(dataset):
        loss = train(x, y)
        losses.append(strategy.reduce("SUM", loss, axis=None))
    return model.get_weights(), [float(loss) for loss in losses]


@fact
def a_loop_with_an_average_loss(tf, two):
    return looped(tf, two, average)


@fact
def a_loop_with_a_mean_of_the_replicas_examples(tf, two):
    return looped(tf, two, mean_of_the_replica)


@fact
def a_loop_with_a_loss_object(tf, two):
    return looped(tf, two, with_loss_object("sum_over_batch_size"))


@fact
def a_loop_with_a_loss_object_that_sums(tf, two):
    return looped(tf, two, with_loss_object("sum"))


@fact
def a_loop_with_the_compiled_loss(tf, two):
    return looped(tf, two, compiled, regularizer="l2")


@fact
def a_loop_on_one_replica(tf, one):
    return looped(tf, one, compiled, regularizer="l2")


@fact
def a_loop_that_calls_the_models_step(tf, two):
    with two.scope():
        model = prepared(tf, regression(tf, compiled, "l2"))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    train = tf.function(lambda batch: two.run(model.train_step, args=(batch,)))
    for batch in two.experimental_distribute_dataset(dataset):
        train(batch)
    return model.get_weights()


@fact
def a_loop_that_calls_the_step_of_keras(tf, two):
    with two.scope():
        model = prepared(tf, tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    train = tf.function(lambda batch: two.run(model.train_step, args=(batch,)))
    for batch in two.experimental_distribute_dataset(dataset):
        train(batch)
    return model.get_weights()


@fact(
    ours={"dtype": "float32", "shape": [], "values": 4.0},
    because="a loss that is called outside the replicas is the loss; TensorFlow divides it by the "
    "number of replicas wherever a strategy's scope is open",
)
def a_loss_object_outside_the_replicas(tf, two):
    with two.scope():
        return tf.keras.losses.MeanSquaredError()(tf.zeros([3, 1]), 2 * tf.ones([3, 1]))


def minimizing(tf, strategy):
    """The weights after `minimize` of an optimizer of TensorFlow 1."""
    with strategy.scope():
        weight = tf.Variable([0.3, -0.2], aggregation=tf.VariableAggregation.MEAN)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        factor = tf.cast(replica, tf.float32) + 1.0

        def loss():
            return factor * tf.reduce_sum(weight**2)

        optimizer.minimize(loss, var_list=[weight])

    tf.function(lambda: strategy.run(step))()
    return weight.numpy()


@fact
def minimize_sums(tf, two):
    return minimizing(tf, two)


@fact
def gradients_are_summed_whichever_method_applies_them(tf, two):
    with two.scope():
        weight = tf.keras.Variable([1.0, 2.0])
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.ones([2]) * (tf.cast(replica, tf.float32) + 1.0)
        optimizer.apply_gradients([(gradient, weight)])
        optimizer.apply([gradient], [weight])

    tf.function(lambda: two.run(step))()
    return weight.numpy()
