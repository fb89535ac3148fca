"""Traffic of a network of roads forecast by a graph convolution and an LSTM."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "time series"
NODES, STEPS, HORIZON = 5, 6, 2
EDGES = (np.array([0, 1, 2, 3, 4, 0]), np.array([1, 2, 3, 4, 0, 2]))


class GraphConv(layers.Layer):
    def __init__(self, in_feat, out_feat, **kwargs):
        super().__init__(**kwargs)
        self.out_feat = out_feat
        self.weight = self.add_weight(
            initializer="glorot_uniform", shape=(in_feat, out_feat), name="weight"
        )

    def aggregate(self, neighbour_representations):
        return tf.math.unsorted_segment_mean(
            neighbour_representations, EDGES[0], num_segments=NODES
        )

    def call(self, features):
        nodes_representation = tf.matmul(features, self.weight)
        neighbour_representations = tf.gather(features, EDGES[1])
        aggregated = tf.matmul(self.aggregate(neighbour_representations), self.weight)
        return tf.nn.relu(tf.concat([nodes_representation, aggregated], axis=-1))


class LSTMGC(layers.Layer):
    def __init__(self, in_feat, out_feat, lstm_units, **kwargs):
        super().__init__(**kwargs)
        self.graph_conv = GraphConv(in_feat, out_feat)
        self.lstm = layers.LSTM(lstm_units, activation="relu")
        self.dense = layers.Dense(HORIZON)

    def call(self, inputs):
        inputs = tf.transpose(inputs, [2, 0, 1, 3])
        gcn_out = self.graph_conv(inputs)
        shape = tf.shape(gcn_out)
        num_nodes, batch_size, input_seq_len = shape[0], shape[1], shape[2]
        gcn_out = tf.reshape(gcn_out, (batch_size * num_nodes, input_seq_len, gcn_out.shape[3]))
        dense_output = self.dense(self.lstm(gcn_out))
        output = tf.reshape(dense_output, (num_nodes, batch_size, HORIZON))
        return tf.transpose(output, [1, 2, 0])


def create_tf_dataset(data):
    inputs = keras.utils.timeseries_dataset_from_array(
        np.expand_dims(data[:-HORIZON], axis=-1), None, sequence_length=STEPS, batch_size=8
    )
    targets = keras.utils.timeseries_dataset_from_array(
        data[STEPS:], None, sequence_length=HORIZON, batch_size=8
    )
    return tf.data.Dataset.zip((inputs, targets)).prefetch(2).cache()


def train(strategy, epochs=2):
    speeds = np.sin(np.arange(23)[:, None] / 3 + np.arange(NODES)).astype("float32")
    dataset = create_tf_dataset(speeds)
    with strategy.scope():
        inputs = layers.Input((STEPS, NODES, 1))
        model = start(keras.models.Model(inputs, LSTMGC(1, 4, 6)(inputs)))
        model.compile(
            optimizer=keras.optimizers.RMSprop(learning_rate=0.002),
            loss=keras.losses.MeanSquaredError(),
        )
    history = model.fit(dataset, epochs=epochs, verbose=0)
    x_test, y = next(iter(dataset))
    error = tf.reduce_mean(tf.square(model.predict(x_test, verbose=0) - y))
    return {"history": history.history, "error": error}
