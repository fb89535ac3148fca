"""A time series cut into windows, normalized, and forecast by an LSTM."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "time series"
PAST, FUTURE, BATCH = 12, 3, 8


def normalize(data, train_split):
    mean, std = data[:train_split].mean(axis=0), data[:train_split].std(axis=0)
    return (data - mean) / std


def train(strategy, epochs=2):
    hours = np.arange(120)
    rng = np.random.default_rng(45)
    weather = np.stack([np.sin(hours / 5), np.cos(hours / 7), hours / 60], axis=-1)
    weather = normalize(weather + 0.1 * rng.normal(size=weather.shape), 80).astype("float32")
    dataset_train = keras.preprocessing.timeseries_dataset_from_array(
        weather[:60],
        weather[PAST + FUTURE : 60 + PAST + FUTURE][:, [0]],
        sequence_length=PAST // 2,
        sampling_rate=2,
        batch_size=BATCH,
    )
    dataset_val = keras.utils.timeseries_dataset_from_array(
        weather[80:100], weather[95:115][:, [0]], sequence_length=PAST // 2, sampling_rate=2
    )
    with strategy.scope():
        inputs = keras.layers.Input(shape=(PAST // 2, 3))
        lstm_out = keras.layers.LSTM(8)(inputs)
        model = start(keras.Model(inputs=inputs, outputs=keras.layers.Dense(1)(lstm_out)))
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
    early_stop = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
    history = model.fit(
        dataset_train,
        epochs=epochs,
        validation_data=dataset_val,
        callbacks=[early_stop],
        verbose=0,
    )
    for x, _ in dataset_val.take(1):
        shape, predicted = tf.shape(x), model.predict(x[:2], verbose=0)
    return {"history": history.history, "shape": shape.numpy().tolist(), "predicted": predicted}
