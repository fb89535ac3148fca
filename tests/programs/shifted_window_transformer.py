"""Windows of an image shifted and attended to, with biases by relative position."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "vision"
GRID, WINDOW, WIDTH, HEADS = 4, 2, 8, 2


def window_partition(x, window_size):
    _, height, width, channels = x.shape
    patch_num_y, patch_num_x = height // window_size, width // window_size
    x = tf.reshape(x, (-1, patch_num_y, window_size, patch_num_x, window_size, channels))
    x = tf.transpose(x, (0, 1, 3, 2, 4, 5))
    return tf.reshape(x, (-1, window_size, window_size, channels))


def window_reverse(windows, window_size, height, width, channels):
    patch_num_y, patch_num_x = height // window_size, width // window_size
    x = tf.reshape(windows, (-1, patch_num_y, patch_num_x, window_size, window_size, channels))
    x = tf.transpose(x, perm=(0, 1, 3, 2, 4, 5))
    return tf.reshape(x, (-1, height, width, channels))


class WindowAttention(layers.Layer):
    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.dim = dim
        self.scale = (dim // HEADS) ** -0.5
        self.qkv = layers.Dense(dim * 3)
        self.proj = layers.Dense(dim)
        self.relative_position_bias_table = self.add_weight(
            shape=((2 * WINDOW - 1) ** 2, HEADS), initializer="zeros", trainable=True
        )
        coords = np.stack(np.meshgrid(np.arange(WINDOW), np.arange(WINDOW), indexing="ij"))
        coords = coords.reshape(2, -1)
        relative = (coords[:, :, None] - coords[:, None, :]).transpose([1, 2, 0]) + WINDOW - 1
        self.relative_position_index = relative[..., 0] * (2 * WINDOW - 1) + relative[..., 1]

    def call(self, x, mask=None):
        _, size, channels = x.shape
        x_qkv = tf.reshape(self.qkv(x), (-1, size, 3, HEADS, channels // HEADS))
        q, k, v = tf.unstack(tf.transpose(x_qkv, perm=(2, 0, 3, 1, 4)))
        attn = (q * self.scale) @ tf.transpose(k, perm=(0, 1, 3, 2))
        bias = tf.gather(
            self.relative_position_bias_table, self.relative_position_index.reshape(-1)
        )
        bias = tf.transpose(tf.reshape(bias, (size, size, -1)), perm=(2, 0, 1))
        attn = attn + tf.expand_dims(bias, axis=0)
        if mask is not None:
            windows = mask.shape[0]
            mask = tf.cast(tf.expand_dims(tf.expand_dims(mask, axis=1), axis=0), tf.float32)
            attn = tf.reshape(attn, (-1, windows, HEADS, size, size)) + mask
            attn = tf.reshape(attn, (-1, HEADS, size, size))
        x_qkv = tf.transpose(tf.nn.softmax(attn) @ v, perm=(0, 2, 1, 3))
        return self.proj(tf.reshape(x_qkv, (-1, size, channels)))


class SwinTransformer(layers.Layer):
    def __init__(self, dim, shift_size, **kwargs):
        super().__init__(**kwargs)
        self.dim, self.shift_size = dim, shift_size
        self.norm1 = layers.LayerNormalization(epsilon=1e-5)
        self.norm2 = layers.LayerNormalization(epsilon=1e-5)
        self.attn = WindowAttention(dim)
        self.mlp = keras.Sequential([layers.Dense(12, "gelu"), layers.Dense(dim)])

    def build(self, input_shape):
        self.attn_mask = None
        if self.shift_size:
            mask_array = np.zeros((1, GRID, GRID, 1), "float32")
            for index, part in enumerate(np.ndindex(2, 2)):
                where = [slice(GRID - self.shift_size, None) if p else slice(None) for p in part]
                mask_array[:, where[0], where[1], :] = index
            windows = window_partition(tf.convert_to_tensor(mask_array), WINDOW)
            windows = tf.reshape(windows, [-1, WINDOW * WINDOW])
            mask = tf.expand_dims(windows, axis=1) - tf.expand_dims(windows, axis=2)
            self.attn_mask = tf.where(mask != 0, -100.0, 0.0).numpy()

    def call(self, x):
        skip = x
        x = tf.reshape(self.norm1(x), (-1, GRID, GRID, self.dim))
        if self.shift_size > 0:
            x = tf.roll(x, shift=[-self.shift_size, -self.shift_size], axis=[1, 2])
        windows = tf.reshape(window_partition(x, WINDOW), (-1, WINDOW * WINDOW, self.dim))
        windows = tf.reshape(
            self.attn(windows, mask=self.attn_mask), (-1, WINDOW, WINDOW, self.dim)
        )
        x = window_reverse(windows, WINDOW, GRID, GRID, self.dim)
        if self.shift_size > 0:
            x = tf.roll(x, shift=[self.shift_size, self.shift_size], axis=[1, 2])
        x = skip + tf.reshape(x, (-1, GRID * GRID, self.dim))
        return x + self.mlp(self.norm2(x))


def train(strategy, epochs=2):
    rng = np.random.default_rng(70)
    labels = rng.integers(0, 3, 16)
    images = rng.normal(size=(16, 8, 8, 3)).astype("float32") + labels[:, None, None, None]
    with strategy.scope():
        inputs = keras.Input((8, 8, 3))
        x = layers.Conv2D(WIDTH, 2, strides=2)(inputs)
        x = layers.Reshape((GRID * GRID, WIDTH))(x)
        x = SwinTransformer(WIDTH, shift_size=0)(x)
        x = SwinTransformer(WIDTH, shift_size=1)(x)
        x = layers.GlobalAveragePooling1D()(x)
        model = start(keras.Model(inputs, layers.Dense(3, activation="softmax")(x)))
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(),
            metrics=["accuracy"],
        )
    history = model.fit(images, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"history": history.history, "predicted": model.predict(images[:2], verbose=0)}
