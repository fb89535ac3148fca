"""A graph attention network: scores normalized per node by segment sums, in a custom step."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "graphs"
NODES, FEATURES, CLASSES = 16, 5, 3


class GraphAttention(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[0][-1], self.units), trainable=True, name="kernel"
        )
        self.kernel_attention = self.add_weight(
            shape=(self.units * 2, 1), trainable=True, name="kernel_attention"
        )
        self.built = True

    def call(self, inputs):
        node_states, edges = inputs
        node_states_transformed = tf.matmul(node_states, self.kernel)
        node_states_expanded = tf.gather(node_states_transformed, edges)
        node_states_expanded = tf.reshape(node_states_expanded, (tf.shape(edges)[0], -1))
        attention_scores = tf.nn.leaky_relu(tf.matmul(node_states_expanded, self.kernel_attention))
        attention_scores = tf.squeeze(attention_scores, -1)
        attention_scores = tf.math.exp(tf.clip_by_value(attention_scores, -2, 2))
        attention_scores_sum = tf.math.unsorted_segment_sum(
            data=attention_scores, segment_ids=edges[:, 0], num_segments=NODES
        )
        attention_scores_sum = tf.repeat(
            attention_scores_sum, tf.math.bincount(tf.cast(edges[:, 0], "int32"))
        )
        attention_scores_norm = attention_scores / attention_scores_sum
        node_states_neighbors = tf.gather(node_states_transformed, edges[:, 1])
        return tf.math.unsorted_segment_sum(
            data=node_states_neighbors * attention_scores_norm[:, tf.newaxis],
            segment_ids=edges[:, 0],
            num_segments=NODES,
        )


class GraphAttentionNetwork(keras.Model):
    def __init__(self, node_states, edges, hidden_units, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.node_states = node_states
        self.edges = edges
        self.preprocess = layers.Dense(hidden_units, activation="relu")
        self.heads = [GraphAttention(hidden_units) for _ in range(num_heads)]
        self.output_layer = layers.Dense(CLASSES)

    def call(self, inputs):
        node_states, edges = inputs
        x = self.preprocess(node_states)
        x = tf.concat([head([x, edges]) for head in self.heads], axis=-1)
        return self.output_layer(tf.nn.relu(x))

    def train_step(self, data):
        indices, labels = data
        with tf.GradientTape() as tape:
            outputs = self([self.node_states, self.edges])
            loss = self.compute_loss(y=labels, y_pred=tf.gather(outputs, indices))
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        return {"loss": loss}

    def predict_step(self, data):
        outputs = self([self.node_states, self.edges])
        return tf.nn.softmax(tf.gather(outputs, data))


def train(strategy, epochs=2):
    rng = np.random.default_rng(49)
    node_states = tf.convert_to_tensor(rng.normal(size=(NODES, FEATURES)).astype("float32"))
    sources = np.sort(np.concatenate([np.arange(NODES), rng.integers(0, NODES, 24)]))
    edges = tf.convert_to_tensor(np.stack([sources, rng.integers(0, NODES, len(sources))], -1))
    labels = rng.integers(0, CLASSES, NODES)
    with strategy.scope():
        model = GraphAttentionNetwork(node_states, edges, 4, 2)
        model([node_states, edges])
        start(model)
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        )
    model.fit(np.arange(NODES), labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"probabilities": model.predict(np.arange(4), verbose=0)}
