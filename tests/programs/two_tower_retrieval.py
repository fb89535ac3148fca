"""Two towers: users and items embedded from words, a retrieval loss, the best items by score."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "recommenders"
REPLICAS = 2
BECAUSE = "each replica takes the other items of its own examples as negatives"
USERS = [f"user {number}" for number in range(6)]
MOVIES = [f"movie {number}" for number in range(8)]


def tower(vocabulary):
    return tf.keras.Sequential(
        [
            tf.keras.Input((), dtype="int64"),
            tf.keras.layers.Embedding(len(vocabulary) + 1, 4),
            tf.keras.layers.Dense(4),
        ]
    )


class RetrievalModel(tf.keras.Model):
    def __init__(self, user_model, movie_model):
        super().__init__()
        self.user_model = user_model
        self.movie_model = movie_model

    def call(self, features):
        return self.user_model(features["user"]), self.movie_model(features["movie"])

    def train_step(self, features):
        with tf.GradientTape() as tape:
            user_embeddings, movie_embeddings = self(features, training=True)
            scores = tf.linalg.matmul(user_embeddings, movie_embeddings, transpose_b=True)
            labels = tf.eye(tf.shape(scores)[0])
            loss = tf.reduce_sum(
                tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=scores)
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def train(strategy, epochs=3):
    rng = np.random.default_rng(56)
    pairs = [(rng.choice(USERS), rng.choice(MOVIES)) for _ in range(32)]
    user_lookup = tf.keras.layers.StringLookup(vocabulary=USERS, mask_token=None)
    movie_lookup = tf.keras.layers.StringLookup(vocabulary=MOVIES, mask_token=None)
    dataset = tf.data.Dataset.from_tensor_slices(
        {"user": [user for user, _ in pairs], "movie": [movie for _, movie in pairs]}
    )
    dataset = dataset.batch(8).map(
        lambda x: {"user": user_lookup(x["user"]), "movie": movie_lookup(x["movie"])}
    )
    with strategy.scope():
        model = RetrievalModel(start(tower(USERS), 1), start(tower(MOVIES), 2))
        model.compile(optimizer=tf.keras.optimizers.SGD(learning_rate=0.1))
    model.fit(dataset, epochs=epochs, verbose=0)
    candidates = model.movie_model(movie_lookup(tf.constant(MOVIES)))
    query = model.user_model(user_lookup(tf.constant(["user 3"])))
    values, indices = tf.math.top_k(tf.matmul(query, candidates, transpose_b=True), k=3)
    titles = tf.gather(tf.constant(MOVIES), indices[0])
    return {"scores": values, "titles": [title.decode() for title in titles.numpy()]}
