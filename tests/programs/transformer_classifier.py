"""Text classified by a transformer block, with embeddings of tokens and positions."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"
TOLERANCE = 5e-3
BECAUSE = (
    "Keras' Adam under TensorFlow squares the gradients of a word's occurrences one by one, and "
    "moves what has no gradient but round-off: the biases of attention's keys"
)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.0):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        attn_output = self.att(inputs, inputs)
        attn_output = self.dropout1(attn_output)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.dropout2(self.ffn(out1))
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = tf.shape(x)[-1]
        positions = tf.range(start=0, limit=maxlen, delta=1)
        positions = self.pos_emb(positions)
        x = self.token_emb(x)
        return x + positions


def train(strategy, epochs=2):
    rng = np.random.default_rng(24)
    lists = [rng.integers(1, 20, rng.integers(3, 12)).tolist() for _ in range(16)]
    labels = np.array([int(7 in tokens or 8 in tokens) for tokens in lists])
    x_train = keras.utils.pad_sequences(lists, maxlen=10)
    with strategy.scope():
        inputs = layers.Input(shape=(10,))
        x = TokenAndPositionEmbedding(10, 20, 8)(inputs)
        x = TransformerBlock(8, 2, 12)(x)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.Dense(6, activation="relu")(x)
        model = start(keras.Model(inputs, layers.Dense(2, activation="softmax")(x)))
        model.compile(
            optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    history = model.fit(x_train, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"history": history.history, "predicted": model.predict(x_train[:2], verbose=0)}
