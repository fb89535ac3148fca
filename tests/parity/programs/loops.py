"""Custom training loops: the exact weights after some steps."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact

RNG = np.random.default_rng(7)
INPUTS = RNG.normal(size=(14, 3)).astype(np.float32)
TARGETS = (INPUTS @ [[1.0], [-2.0], [0.5]] + 0.3).astype(np.float32)
LABELS = (np.arange(14) % 4).astype(np.int64)
KERNEL = np.array([[0.1], [0.2], [-0.3]], np.float32)
CLASSES = (np.arange(12, dtype=np.float32).reshape(3, 4) - 5) / 10


def regression(tf, strategy, make_optimizer, examples, batch, epochs=2, is_built=True):
    """Trains a linear model with a loop; returns its weights and the losses of the steps."""
    with strategy.scope():
        kernel, bias = tf.Variable(KERNEL), tf.Variable([0.0])
        optimizer = make_optimizer()
        if is_built:
            optimizer.build([kernel, bias])
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS[:examples], TARGETS[:examples]))
    distributed = strategy.experimental_distribute_dataset(dataset.batch(batch))

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((tf.matmul(x, kernel) + bias - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=batch)
        gradients = tape.gradient(loss, [kernel, bias])
        optimizer.apply_gradients(zip(gradients, [kernel, bias], strict=True))
        return loss

    @tf.function
    def train(inputs):
        return strategy.reduce("SUM", strategy.run(step, args=(inputs,)), axis=None)

    losses = [train(inputs) for _ in range(epochs) for inputs in distributed]
    return {"kernel": kernel.numpy(), "bias": bias.numpy(), "losses": losses}


OPTIMIZERS = {
    "sgd": lambda tf: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda tf: tf.keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda tf: tf.keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda tf: tf.keras.optimizers.Adam(0.1),
    "rmsprop": lambda tf: tf.keras.optimizers.RMSprop(0.01),
    "adagrad": lambda tf: tf.keras.optimizers.Adagrad(0.1),
}


def trained(optimizer):
    def program(tf, two):
        return regression(tf, two, lambda: OPTIMIZERS[optimizer](tf), examples=12, batch=4)

    return program


for _optimizer in OPTIMIZERS:
    fact(
        trained(_optimizer),
        name=f"weights_after_six_steps_of_{_optimizer}",
        tolerance=2e-4,
        because="round-off grows over the steps, and Adam, RMSprop and Adagrad divide by "
        "square roots of small numbers",
    )


@fact(
    alone=True,
    ours=True,
    because="variables can come with the first step of a tf.function on several replicas; "
    "TensorFlow fails there",
)
def an_optimizer_whose_variables_come_with_the_first_step(tf, two):
    def weights(is_built):
        return regression(tf, two, lambda: tf.keras.optimizers.Adam(0.1), 12, 4, is_built=is_built)[
            "kernel"
        ]

    return attempt(lambda: bool(np.allclose(weights(False), weights(True), atol=1e-5)))


@fact
def uneven_batches_on_two_replicas(tf, two):
    return regression(tf, two, lambda: tf.keras.optimizers.SGD(0.1), examples=11, batch=4)


@fact
def uneven_batches_on_four_replicas_of_which_some_are_idle(tf, four):
    return regression(tf, four, lambda: tf.keras.optimizers.SGD(0.1), examples=13, batch=6)


@fact
def a_batch_of_one_on_four_replicas(tf, four):
    return regression(tf, four, lambda: tf.keras.optimizers.SGD(0.1), examples=5, batch=4)


@fact
def one_device_and_the_default_strategy_train_alike(tf, one):
    default = tf.distribute.get_strategy()
    return [
        regression(tf, strategy, lambda: tf.keras.optimizers.SGD(0.1), examples=10, batch=4)
        for strategy in (one, default)
    ]


@fact
def plain_assignments_instead_of_an_optimizer(tf, two):
    with two.scope():
        kernel = tf.Variable(KERNEL, aggregation=tf.VariableAggregation.SUM)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS[:10], TARGETS[:10])).batch(4)

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.matmul(x, kernel) - y) ** 2) / 4.0
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))

    for inputs in two.experimental_distribute_dataset(dataset):
        two.run(step, args=(inputs,))
    return kernel.read_value()


@fact
def all_reduced_gradients_applied_by_hand(tf, two):
    with two.scope():
        kernel = tf.Variable(KERNEL)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS[:8], TARGETS[:8])).batch(4)

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.matmul(x, kernel) - y) ** 2) / 4.0
        context = tf.distribute.get_replica_context()
        gradient = context.all_reduce("SUM", tape.gradient(loss, kernel))
        kernel.assign_sub(0.1 * gradient)

    for inputs in two.experimental_distribute_dataset(dataset):
        two.run(step, args=(inputs,))
    return kernel.read_value()


def classification(tf, strategy, examples, batch):
    """Trains a classifier with metrics; returns its weights and what the metrics say."""
    with strategy.scope():
        kernel = tf.Variable(CLASSES)
        optimizer = tf.keras.optimizers.SGD(0.5)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        mean_loss = tf.keras.metrics.Mean()
    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS[:examples], LABELS[:examples]))
    distributed = strategy.experimental_distribute_dataset(dataset.batch(batch))

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            logits = tf.matmul(x, kernel)
            per_example = losses(y, logits)
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=batch)
        optimizer.apply_gradients([(tape.gradient(loss, kernel), kernel)])
        accuracy.update_state(y, logits)
        mean_loss.update_state(per_example)

    @tf.function
    def train(inputs):
        strategy.run(step, args=(inputs,))

    for inputs in distributed:
        train(inputs)
    before = [float(accuracy.result()), float(mean_loss.result())]
    accuracy.reset_state()
    return {
        "kernel": kernel.numpy(),
        "metrics": before,
        "after reset": float(accuracy.result()),
        "iterations": int(optimizer.iterations.numpy()),
    }


@fact
def metrics_count_every_example_once(tf, two):
    return classification(tf, two, examples=12, batch=4)


@fact
def metrics_of_uneven_batches(tf, two):
    return classification(tf, two, examples=11, batch=4)


@fact
def metrics_on_four_replicas(tf, four):
    return classification(tf, four, examples=14, batch=8)


@fact
def an_epoch_in_one_tf_function(tf, two):
    with two.scope():
        kernel = tf.Variable(KERNEL)
        optimizer = tf.keras.optimizers.SGD(0.1)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4)
    distributed = two.experimental_distribute_dataset(dataset)

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((tf.matmul(x, kernel) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=4)
        optimizer.apply_gradients([(tape.gradient(loss, kernel), kernel)])
        return loss

    step_once = tf.function(lambda inputs: two.run(step, args=(inputs,)))
    for inputs in distributed:  # the optimizer's variables come with the first step
        step_once(inputs)

    @tf.function
    def epoch(dataset):
        total, count = 0.0, 0
        for inputs in dataset:
            total += two.reduce("SUM", two.run(step, args=(inputs,)), axis=None)
            count += 1
        return total / tf.cast(count, tf.float32)

    return [epoch(distributed), kernel.read_value()]


@fact
def a_keras_model_in_a_loop(tf, two):
    with two.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((3,)), tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)]
        )
        model.set_weights(
            [CLASSES, np.zeros(4, np.float32), np.full((4, 1), 0.5, np.float32), np.ones(1)]
        )
        optimizer = tf.keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS[:10], TARGETS[:10])).batch(4)

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=4)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(inputs):
        return two.reduce("SUM", two.run(step, args=(inputs,)), axis=None)

    losses = [train(inputs) for inputs in two.experimental_distribute_dataset(dataset)]
    return [losses, model.get_weights()]


@fact
def regularization_losses_are_scaled(tf, two):
    with two.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((3,)),
                tf.keras.layers.Dense(1, kernel_regularizer=tf.keras.regularizers.L2(0.1)),
            ]
        )
        model.set_weights([KERNEL, np.zeros(1)])
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS[:4], TARGETS[:4])).batch(4)

    def loss_of(inputs):
        x, y = inputs
        errors = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)
        loss = tf.nn.compute_average_loss(errors)
        return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))

    (inputs,) = list(two.experimental_distribute_dataset(dataset))
    return two.reduce("SUM", two.run(loss_of, args=(inputs,)), axis=None)
