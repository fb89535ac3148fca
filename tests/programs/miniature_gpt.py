"""A small GPT: causal masks, a callback that generates text, and top-k sampling."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"
WORDS, LENGTH, WIDTH = 14, 8, 8


def causal_attention_mask(batch_size, n_dest, n_src, dtype):
    i = tf.range(n_dest)[:, None]
    j = tf.range(n_src)
    m = i >= j - n_src + n_dest
    mask = tf.cast(m, dtype)
    mask = tf.reshape(mask, [1, n_dest, n_src])
    mult = tf.concat([tf.expand_dims(batch_size, -1), tf.constant([1, 1], dtype=tf.int32)], 0)
    return tf.tile(mask, mult)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads, embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        input_shape = tf.shape(inputs)
        batch_size, seq_len = input_shape[0], input_shape[1]
        causal_mask = causal_attention_mask(batch_size, seq_len, seq_len, tf.bool)
        attention_output = self.att(inputs, inputs, attention_mask=causal_mask)
        out1 = self.layernorm1(inputs + attention_output)
        return self.layernorm2(out1 + self.ffn(out1))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = tf.shape(x)[-1]
        positions = self.pos_emb(tf.range(0, maxlen, 1))
        return self.token_emb(x) + positions


class TextGenerator(keras.callbacks.Callback):
    def __init__(self, start_tokens, max_tokens=3, top_k=1):
        self.start_tokens = start_tokens
        self.max_tokens = max_tokens
        self.k = top_k
        self.generated = []

    def sample_from(self, logits):
        logits, indices = tf.math.top_k(logits, k=self.k, sorted=True)
        indices = np.asarray(indices).astype("int32")
        preds = tf.keras.activations.softmax(tf.expand_dims(logits, 0))[0]
        preds = np.asarray(preds).astype("float32")
        return np.random.choice(indices, p=preds)

    def on_epoch_end(self, epoch, logs=None):
        tokens = list(self.start_tokens)
        for _ in range(self.max_tokens):
            sample_index = len(tokens) - 1
            x = np.array([tokens + [0] * (LENGTH - len(tokens))])
            y, _ = self.model.predict(x, verbose=0)
            tokens.append(int(self.sample_from(y[0][sample_index])))
        self.generated.append(tokens)


def prepare_lm_inputs_labels(tokens):
    return tokens[:, :-1], tokens[:, 1:]


def train(strategy, epochs=2):
    texts = np.random.default_rng(31).integers(1, WORDS, (16, LENGTH + 1)).cumsum(1) % WORDS
    dataset = tf.data.Dataset.from_tensor_slices(texts).batch(8).map(prepare_lm_inputs_labels)
    generator = TextGenerator([1, 2, 3])
    with strategy.scope():
        inputs = layers.Input(shape=(LENGTH,), dtype="int32")
        x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH)(inputs)
        x = TransformerBlock(WIDTH, 2, 12)(x)
        model = start(keras.Model(inputs, [layers.Dense(WORDS)(x), x]))
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss=[loss_fn, None])
    history = model.fit(dataset, epochs=epochs, callbacks=[generator], verbose=0)
    return {"loss": history.history["loss"], "generated": generator.generated}
