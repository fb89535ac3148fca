"""DCGAN as the tutorial writes it: two networks, two tapes, two optimizers, own loop."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "generative"
BATCH, NOISE = 8, 6


def make_generator_model():
    model = tf.keras.Sequential([tf.keras.Input((NOISE,))])
    model.add(layers.Dense(3 * 3 * 8, use_bias=False))
    model.add(layers.LeakyReLU())
    model.add(layers.Reshape((3, 3, 8)))
    assert model.output_shape == (None, 3, 3, 8)
    model.add(layers.Conv2DTranspose(4, (5, 5), strides=(1, 1), padding="same", use_bias=False))
    model.add(layers.LeakyReLU())
    model.add(
        layers.Conv2DTranspose(
            1, (5, 5), strides=(2, 2), padding="same", use_bias=False, activation="tanh"
        )
    )
    return model


def make_discriminator_model():
    model = tf.keras.Sequential([tf.keras.Input((6, 6, 1))])
    model.add(layers.Conv2D(6, (5, 5), strides=(2, 2), padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model


def train(strategy, epochs=2):
    rng = np.random.default_rng(14)
    images = rng.normal(0.5, 0.1, (16, 6, 6, 1)).astype("float32")
    noises = rng.normal(size=(16, NOISE)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((images, noises)).batch(BATCH, drop_remainder=True)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        generator = start(make_generator_model(), 1)
        discriminator = start(make_discriminator_model(), 2)
        generator_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5)
        discriminator_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5)
        cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def discriminator_loss(real_output, fake_output):
        real_loss = cross_entropy(tf.ones_like(real_output), real_output)
        fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
        return tf.nn.compute_average_loss(real_loss + fake_loss, global_batch_size=BATCH)

    def generator_loss(fake_output):
        return tf.nn.compute_average_loss(
            cross_entropy(tf.ones_like(fake_output), fake_output), global_batch_size=BATCH
        )

    def train_step(images, noise):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated_images = generator(noise, training=True)
            real_output = discriminator(images, training=True)
            fake_output = discriminator(generated_images, training=True)
            gen_loss = generator_loss(fake_output)
            disc_loss = discriminator_loss(real_output, fake_output)
        gradients_of_generator = gen_tape.gradient(gen_loss, generator.trainable_variables)
        gradients_of_discriminator = disc_tape.gradient(
            disc_loss, discriminator.trainable_variables
        )
        generator_optimizer.apply_gradients(
            zip(gradients_of_generator, generator.trainable_variables)
        )
        discriminator_optimizer.apply_gradients(
            zip(gradients_of_discriminator, discriminator.trainable_variables)
        )
        return gen_loss, disc_loss

    @tf.function
    def distributed_step(images, noise):
        gen_losses, disc_losses = strategy.run(train_step, args=(images, noise))
        return [
            strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
            for losses in (gen_losses, disc_losses)
        ]

    losses = []
    with strategy.scope():
        for optimizer, model in (
            (generator_optimizer, generator),
            (discriminator_optimizer, discriminator),
        ):
            optimizer.build(model.trainable_variables)
    for _ in range(epochs):
        for images, noise in dataset:
            losses.append([float(loss) for loss in distributed_step(images, noise)])
    return {"losses": losses, "image": generator(noises[:1], training=False)[0, :, :, 0]}
