"""Pretraining by masked words, then a classifier on the pretrained encoder."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"
WORDS, LENGTH, WIDTH = 16, 8, 8
MASK = WORDS - 1


def get_masked_input_and_labels(encoded_texts):
    rng = np.random.default_rng(29)
    inp_mask = rng.uniform(size=encoded_texts.shape) < 0.3
    inp_mask[encoded_texts <= 2] = False
    labels = -1 * np.ones(encoded_texts.shape, dtype=int)
    labels[inp_mask] = encoded_texts[inp_mask]
    masked = np.copy(encoded_texts)
    masked[inp_mask & (rng.uniform(size=encoded_texts.shape) < 0.9)] = MASK
    sample_weights = np.ones(labels.shape)
    sample_weights[labels == -1] = 0
    return masked, np.copy(encoded_texts), sample_weights


class MaskedLanguageModel(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        per_word = keras.losses.sparse_categorical_crossentropy(y, y_pred)
        weighted = tf.reduce_sum(per_word * tf.cast(sample_weight, per_word.dtype), axis=-1)
        loss = tf.reduce_mean(weighted) / LENGTH
        self.loss_tracker.update_state(loss)
        return loss

    def compute_metrics(self, x, y, predictions, sample_weight=None):
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def create_masked_language_bert_model():
    inputs = layers.Input((LENGTH,), dtype="int64")
    word_embeddings = layers.Embedding(WORDS, WIDTH, name="word_embedding")(inputs)
    # Called on an array, not on an input: what it returns is a constant of the model.
    position_embeddings = layers.Embedding(LENGTH, WIDTH, embeddings_initializer="identity")(
        tf.range(start=0, limit=LENGTH, delta=1)
    )
    embeddings = word_embeddings + position_embeddings
    attention = layers.MultiHeadAttention(2, WIDTH // 2)(embeddings, embeddings, embeddings)
    attention = layers.LayerNormalization(epsilon=1e-6)(embeddings + attention)
    ffn = layers.Dense(WIDTH, activation="relu")(attention)
    encoded = layers.LayerNormalization(epsilon=1e-6, name="encoded")(attention + ffn)
    mlm_output = layers.Dense(WORDS, name="mlm_cls", activation="softmax")(encoded)
    model = MaskedLanguageModel(inputs, mlm_output, name="masked_bert_model")
    model.loss_tracker = keras.metrics.Mean(name="loss")
    return model


def train(strategy, epochs=2):
    texts = np.random.default_rng(30).integers(1, MASK, (16, LENGTH))
    mlm_ds = tf.data.Dataset.from_tensor_slices(get_masked_input_and_labels(texts)).batch(8)
    with strategy.scope():
        model = start(create_masked_language_bert_model())
        model.compile(optimizer=keras.optimizers.SGD(learning_rate=0.1))
    history = model.fit(mlm_ds, epochs=epochs, verbose=0)
    with strategy.scope():
        pretrained = keras.Model(model.input, model.get_layer("encoded").output)
        pretrained.trainable = False
        inputs = layers.Input((LENGTH,), dtype="int64")
        pooled = layers.GlobalMaxPooling1D()(pretrained(inputs))
        classifier = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(pooled))
        start(classifier.layers[-1])
        classifier.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    labels = (texts[:, :1] > 7).astype("float32")
    second = classifier.fit(texts, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"pretraining": history.history["loss"], "classifier": second.history}
