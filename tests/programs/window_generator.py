"""Forecasts of several steps: a window generator, a residual model, an autoregressive LSTM."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "time series"
OUT_STEPS = 3


class WindowGenerator:
    def __init__(self, input_width, label_width, shift, data):
        self.input_width = input_width
        self.total_window_size = input_width + shift
        self.input_slice = slice(0, input_width)
        self.labels_slice = slice(self.total_window_size - label_width, None)
        self.data = data

    def split_window(self, features):
        inputs = features[:, self.input_slice, :]
        labels = features[:, self.labels_slice, :]
        inputs.set_shape([None, self.input_width, None])
        return inputs, labels

    def make_dataset(self):
        ds = tf.keras.utils.timeseries_dataset_from_array(
            data=np.array(self.data, dtype=np.float32),
            targets=None,
            sequence_length=self.total_window_size,
            sequence_stride=1,
            shuffle=False,
            batch_size=8,
        )
        return ds.map(self.split_window)


class ResidualWrapper(tf.keras.Model):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, inputs, *args, **kwargs):
        delta = self.model(inputs, *args, **kwargs)
        return inputs[:, -OUT_STEPS:] + delta


class FeedBack(tf.keras.Model):
    def __init__(self, units, out_steps, num_features):
        super().__init__()
        self.out_steps = out_steps
        self.units = units
        self.lstm_cell = tf.keras.layers.LSTMCell(units)
        self.lstm_rnn = tf.keras.layers.RNN(self.lstm_cell, return_state=True)
        self.dense = tf.keras.layers.Dense(num_features)

    def warmup(self, inputs):
        x, *state = self.lstm_rnn(inputs)
        return self.dense(x), state

    def call(self, inputs, training=None):
        predictions = []
        prediction, state = self.warmup(inputs)
        predictions.append(prediction)
        for _ in range(1, self.out_steps):
            x, state = self.lstm_cell(prediction, states=state, training=training)
            prediction = self.dense(x)
            predictions.append(prediction)
        predictions = tf.stack(predictions)
        return tf.transpose(predictions, [1, 0, 2])


def train(strategy, epochs=2):
    hours = np.arange(40)
    data = np.stack([np.sin(hours / 4), np.cos(hours / 6)], axis=-1)
    window = WindowGenerator(input_width=5, label_width=OUT_STEPS, shift=OUT_STEPS, data=data)
    histories = {}
    with strategy.scope():
        models = {
            "feedback": FeedBack(units=5, out_steps=OUT_STEPS, num_features=2),
            "residual": ResidualWrapper(
                tf.keras.Sequential(
                    [
                        tf.keras.layers.LSTM(5, return_sequences=False),
                        tf.keras.layers.Dense(OUT_STEPS * 2),
                        tf.keras.layers.Reshape([OUT_STEPS, 2]),
                    ]
                )
            ),
        }
        for model in models.values():
            model(np.zeros((1, 5, 2), "float32"))
            start(model)
            model.compile(
                loss=tf.keras.losses.MeanSquaredError(),
                optimizer=tf.keras.optimizers.Adam(0.01),
                metrics=[tf.keras.metrics.MeanAbsoluteError()],
            )
    for name, model in models.items():
        histories[name] = model.fit(window.make_dataset(), epochs=epochs, verbose=0).history
    return histories
