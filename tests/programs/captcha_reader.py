"""Text read from images: an endpoint layer that adds the CTC loss by itself."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
WIDTH, HEIGHT, LENGTH, SYMBOLS = 16, 8, 3, 5


class CTCLayer(layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.CTC(reduction=None)

    def call(self, y_true, y_pred):
        loss = self.loss_fn(y_true, y_pred)
        self.add_loss(tf.reduce_mean(loss))
        return y_pred


def encode_single_sample(img, label):
    img = tf.image.convert_image_dtype(img, tf.float32)
    img = tf.image.resize(img, [HEIGHT, WIDTH])
    img = tf.transpose(img, perm=[1, 0, 2])
    return {"image": img, "label": label}


def train(strategy, epochs=2):
    rng = np.random.default_rng(64)
    images = rng.integers(0, 256, (16, 2 * HEIGHT, 2 * WIDTH, 1)).astype("uint8")
    labels = rng.integers(1, SYMBOLS + 1, (16, LENGTH))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.map(encode_single_sample, num_parallel_calls=tf.data.AUTOTUNE).batch(8)
    with strategy.scope():
        input_img = layers.Input(shape=(WIDTH, HEIGHT, 1), name="image", dtype="float32")
        targets = layers.Input(name="label", shape=(None,), dtype="float32")
        x = layers.Conv2D(4, (3, 3), activation="relu", padding="same")(input_img)
        x = layers.MaxPooling2D((2, 2))(x)
        x = layers.Reshape(target_shape=(WIDTH // 2, HEIGHT // 2 * 4))(x)
        x = layers.Dense(8, activation="relu")(x)
        x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
        x = layers.Dense(SYMBOLS + 1, name="dense2")(x)
        output = CTCLayer(name="ctc_loss")(targets, x)
        model = start(keras.models.Model([input_img, targets], output))
        model.compile(optimizer=keras.optimizers.Adam(0.01))
    history = model.fit(dataset, epochs=epochs, verbose=0)
    prediction_model = keras.models.Model(input_img, model.get_layer("dense2").output)
    image = encode_single_sample(images[0], labels[0])["image"]
    return {"history": history.history, "read": prediction_model(image[None])[0, :2]}
