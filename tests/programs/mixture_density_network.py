"""A mixture density network: the negative log-likelihood of normals, in an own loop."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "structured data"
COMPONENTS, BATCH = 3, 16


def gaussian_log_likelihood(y, mean, scale):
    return -0.5 * tf.square((y - mean) / scale) - tf.math.log(scale) - 0.5 * np.log(2 * np.pi)


def train(strategy, epochs=3):
    rng = np.random.default_rng(42)
    y = rng.uniform(-1, 1, (32, 1)).astype("float32")
    x = (y + 0.3 * np.sin(6 * y) + rng.normal(size=y.shape) * 0.05).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    with strategy.scope():
        inputs = tf.keras.Input((1,))
        hidden = tf.keras.layers.Dense(10, activation="tanh")(inputs)
        model = start(tf.keras.Model(inputs, tf.keras.layers.Dense(3 * COMPONENTS)(hidden)))
        optimizer = tf.keras.optimizers.Adamax(0.02)
        optimizer.build(model.trainable_variables)
        mean_loss = tf.keras.metrics.Mean()

    def step(x, y):
        with tf.GradientTape() as tape:
            logits, mean, raw_scale = tf.split(model(x, training=True), COMPONENTS, axis=-1)
            scale = tf.nn.softplus(raw_scale) + 1e-3
            log_mixture = tf.nn.log_softmax(logits, axis=-1)
            log_likelihood = tf.reduce_logsumexp(
                log_mixture + gaussian_log_likelihood(y, mean, scale), axis=-1
            )
            loss = tf.nn.compute_average_loss(-log_likelihood, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 50.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean_loss.update_state(-log_likelihood)
        return loss

    @tf.function
    def train_epoch(iterator):
        total = 0.0
        for _ in tf.range(2):
            total += strategy.reduce("SUM", strategy.run(step, args=next(iterator)), axis=None)
        return total / 2

    distributed = strategy.experimental_distribute_dataset(dataset)
    losses, means = [], []
    for _ in range(epochs):
        losses.append(train_epoch(iter(distributed)))
        means.append(mean_loss.result().numpy())
        mean_loss.reset_state()
    return {"losses": [float(loss) for loss in losses], "means": [float(mean) for mean in means]}
