"""Translation by an encoder and a decoder with a causal mask, then greedy decoding."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"
WIDTH, LENGTH, WORDS = 8, 6, 12


class PositionalEmbedding(layers.Layer):
    def __init__(self, sequence_length, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.token_embeddings = layers.Embedding(vocab_size, embed_dim)
        self.position_embeddings = layers.Embedding(sequence_length, embed_dim)

    def call(self, inputs):
        length = tf.shape(inputs)[-1]
        positions = tf.range(0, length, 1)
        return self.token_embeddings(inputs) + self.position_embeddings(positions)

    def compute_mask(self, inputs, mask=None):
        return keras.ops.not_equal(inputs, 0)


class TransformerEncoder(layers.Layer):
    def __init__(self, embed_dim, dense_dim, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = keras.Sequential(
            [layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        padding_mask = None
        if mask is not None:
            padding_mask = tf.cast(mask[:, None, :], dtype="int32")
        attention_output = self.attention(
            query=inputs, value=inputs, key=inputs, attention_mask=padding_mask
        )
        proj_input = self.layernorm_1(inputs + attention_output)
        return self.layernorm_2(proj_input + self.dense_proj(proj_input))


class TransformerDecoder(layers.Layer):
    def __init__(self, embed_dim, latent_dim, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.attention_1 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.attention_2 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = keras.Sequential(
            [layers.Dense(latent_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorms = [layers.LayerNormalization() for _ in range(3)]
        self.supports_masking = True

    def call(self, inputs, mask=None):
        inputs, encoder_outputs = inputs
        causal_mask = self.get_causal_attention_mask(inputs)
        if mask is None:
            inputs_padding_mask, encoder_outputs_padding_mask = None, None
        else:
            inputs_padding_mask, encoder_outputs_padding_mask = mask
        attention_output_1 = self.attention_1(
            query=inputs,
            value=inputs,
            key=inputs,
            attention_mask=causal_mask,
            query_mask=inputs_padding_mask,
        )
        out_1 = self.layernorms[0](inputs + attention_output_1)
        attention_output_2 = self.attention_2(
            query=out_1,
            value=encoder_outputs,
            key=encoder_outputs,
            query_mask=inputs_padding_mask,
            key_mask=encoder_outputs_padding_mask,
        )
        out_2 = self.layernorms[1](out_1 + attention_output_2)
        return self.layernorms[2](out_2 + self.dense_proj(out_2))

    def get_causal_attention_mask(self, inputs):
        input_shape = tf.shape(inputs)
        batch_size, sequence_length = input_shape[0], input_shape[1]
        i = tf.range(sequence_length)[:, None]
        j = tf.range(sequence_length)
        mask = tf.cast(i >= j, dtype="int32")
        mask = tf.reshape(mask, (1, input_shape[1], input_shape[1]))
        mult = tf.concat(
            [tf.expand_dims(batch_size, -1), tf.constant([1, 1], dtype=tf.int32)], axis=0
        )
        return tf.tile(mask, mult)


def transformer():
    encoder_inputs = keras.Input(shape=(None,), dtype="int64", name="encoder_inputs")
    x = PositionalEmbedding(LENGTH, WORDS, WIDTH)(encoder_inputs)
    encoder_outputs = TransformerEncoder(WIDTH, 12, 2)(x)
    decoder_inputs = keras.Input(shape=(None,), dtype="int64", name="decoder_inputs")
    x = PositionalEmbedding(LENGTH, WORDS, WIDTH)(decoder_inputs)
    x = TransformerDecoder(WIDTH, 12, 2)([x, encoder_outputs])
    decoder_outputs = layers.Dense(WORDS, activation="softmax")(x)
    return keras.Model(
        {"encoder_inputs": encoder_inputs, "decoder_inputs": decoder_inputs}, decoder_outputs
    )


def format_dataset(source, target):
    return {"encoder_inputs": source, "decoder_inputs": target[:, :-1]}, target[:, 1:]


def train(strategy, epochs=2):
    rng = np.random.default_rng(26)
    source = rng.integers(3, WORDS, (16, LENGTH)) * (np.arange(LENGTH) < 5)
    target = np.concatenate([np.ones((16, 1), int), source[:, ::-1][:, :LENGTH]], axis=1)
    dataset = tf.data.Dataset.from_tensor_slices((source, target)).batch(8)
    dataset = dataset.map(format_dataset).prefetch(16).cache()
    with strategy.scope():
        model = start(transformer())
        model.compile(
            keras.optimizers.SGD(0.2, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
            metrics=["accuracy"],
        )
    history = model.fit(dataset, epochs=epochs, verbose=0)
    decoded = np.ones((1, 1), int)
    for _ in range(3):
        predictions = model(
            {"encoder_inputs": source[:1], "decoder_inputs": decoded}, training=False
        )
        sampled = tf.argmax(predictions[:, -1], axis=-1).numpy()
        decoded = np.concatenate([decoded, sampled[:, None]], axis=1)
    return {"history": history.history, "decoded": decoded.tolist()}
