"""Papers classified in a citation graph: messages gathered, aggregated by segments."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "graphs"
NODES, FEATURES = 24, 6


def create_ffn(hidden_units):
    return keras.Sequential([layers.Dense(units, activation=tf.nn.gelu) for units in hidden_units])


class GraphConvLayer(layers.Layer):
    def __init__(self, hidden_units, normalize=True):
        super().__init__()
        self.normalize = normalize
        self.ffn_prepare = create_ffn(hidden_units)
        self.update_fn = create_ffn(hidden_units)

    def aggregate(self, node_indices, neighbour_messages, node_representations):
        num_nodes = node_representations.shape[0]
        return tf.math.unsorted_segment_mean(
            neighbour_messages, node_indices, num_segments=num_nodes
        )

    def call(self, inputs):
        node_representations, edges, edge_weights = inputs
        node_indices, neighbour_indices = edges[0], edges[1]
        neighbour_representations = tf.gather(node_representations, neighbour_indices)
        messages = self.ffn_prepare(neighbour_representations)
        messages = messages * tf.expand_dims(edge_weights, -1)
        aggregated = self.aggregate(node_indices, messages, node_representations)
        embeddings = self.update_fn(tf.concat([node_representations, aggregated], axis=1))
        return tf.nn.l2_normalize(embeddings, axis=-1) if self.normalize else embeddings


class GNNNodeClassifier(keras.Model):
    def __init__(self, graph_info, num_classes, hidden_units):
        super().__init__()
        node_features, edges, edge_weights = graph_info
        self.node_features = node_features
        self.edges = edges
        self.edge_weights = edge_weights / tf.math.reduce_sum(edge_weights)
        self.preprocess = create_ffn(hidden_units)
        self.conv1 = GraphConvLayer(hidden_units)
        self.conv2 = GraphConvLayer(hidden_units)
        self.compute_logits = layers.Dense(units=num_classes, name="logits")

    def call(self, input_node_indices):
        x = self.preprocess(self.node_features)
        x = self.conv1((x, self.edges, self.edge_weights)) + x
        x = self.conv2((x, self.edges, self.edge_weights)) + x
        node_embeddings = tf.gather(x, input_node_indices)
        return self.compute_logits(node_embeddings)


def train(strategy, epochs=2):
    rng = np.random.default_rng(48)
    features = tf.cast(rng.normal(size=(NODES, FEATURES)), dtype=tf.float32)
    edges = rng.integers(0, NODES, (2, 60))
    labels = rng.integers(0, 3, NODES)
    with strategy.scope():
        graph_info = (features, edges, tf.ones(shape=edges.shape[1]))
        model = GNNNodeClassifier(graph_info, num_classes=3, hidden_units=[6, 6])
        model(tf.constant([1, 10]))
        start(model)
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
        )
    indices = np.arange(NODES)
    history = model.fit(indices, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    probabilities = keras.activations.softmax(model.predict(indices[:3], verbose=0))
    return {"history": history.history, "probabilities": probabilities}
