"""word2vec: skip-grams with negative sampling, and a model of two embeddings."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "text"
SENTENCE = "The wide road shimmered in the hot sun the sun on the road".split()


def skip_grams(sequence, window):
    return [
        (target, sequence[other])
        for position, target in enumerate(sequence)
        for other in range(max(0, position - window), min(len(sequence), position + window + 1))
        if other != position
    ]


class Word2Vec(tf.keras.Model):
    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.target_embedding = tf.keras.layers.Embedding(
            vocab_size, embedding_dim, name="w2v_embedding"
        )
        self.context_embedding = tf.keras.layers.Embedding(vocab_size, embedding_dim)

    def call(self, pair):
        target, context = pair
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        word_emb = self.target_embedding(target)
        context_emb = self.context_embedding(context)
        return tf.einsum("be,bce->bc", word_emb, context_emb)


def custom_loss(y_true, x_logit):
    labels = tf.cast(y_true, x_logit.dtype)
    return tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=labels)


def train(strategy, epochs=2):
    vectorize = tf.keras.layers.TextVectorization(max_tokens=10, output_mode="int")
    vectorize.adapt(SENTENCE)
    sequence = [int(token) for token in vectorize(" ".join(SENTENCE))]
    pairs = skip_grams(sequence, 2)
    rng = np.random.default_rng(51)
    targets = np.array([target for target, _ in pairs])
    contexts = np.array([[context, *rng.integers(1, 10, 3)] for _, context in pairs])
    labels = np.tile([1, 0, 0, 0], (len(pairs), 1))
    dataset = tf.data.Dataset.from_tensor_slices(((targets, contexts), labels))
    dataset = dataset.batch(8, drop_remainder=True).cache().prefetch(tf.data.AUTOTUNE)
    with strategy.scope():
        word2vec = Word2Vec(10, 5)
        word2vec((targets[:2], contexts[:2]))
        start(word2vec)
        word2vec.compile(
            optimizer=tf.keras.optimizers.SGD(0.5), loss=custom_loss, metrics=["accuracy"]
        )
    history = word2vec.fit(dataset, epochs=epochs, verbose=0)
    weights = word2vec.get_layer("w2v_embedding").get_weights()[0]
    return {"tokens": sequence, "history": history.history, "embedding": weights[:3]}
