"""Characters translated by LSTMs: states handed over, then a sampling loop with two models."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras

TASK = "text"
TOKENS, LATENT, LENGTH = 8, 6, 5


def train(strategy, epochs=2):
    rng = np.random.default_rng(27)
    source = rng.integers(2, TOKENS, (16, LENGTH))
    target = np.concatenate([np.zeros((16, 1), int), source[:, ::-1]], axis=1)
    encoder_input_data = tf.one_hot(source, TOKENS).numpy()
    decoder_input_data = tf.one_hot(target[:, :-1], TOKENS).numpy()
    decoder_target_data = tf.one_hot(target[:, 1:], TOKENS).numpy()
    with strategy.scope():
        encoder_inputs = keras.Input(shape=(None, TOKENS))
        encoder = keras.layers.LSTM(LATENT, return_state=True)
        _, state_h, state_c = encoder(encoder_inputs)
        encoder_states = [state_h, state_c]
        decoder_inputs = keras.Input(shape=(None, TOKENS))
        decoder_lstm = keras.layers.LSTM(LATENT, return_sequences=True, return_state=True)
        decoder_outputs, _, _ = decoder_lstm(decoder_inputs, initial_state=encoder_states)
        decoder_dense = keras.layers.Dense(TOKENS, activation="softmax")
        decoder_outputs = decoder_dense(decoder_outputs)
        model = start(keras.Model([encoder_inputs, decoder_inputs], decoder_outputs))
        model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        [encoder_input_data, decoder_input_data],
        decoder_target_data,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        validation_split=0.5,
        verbose=0,
    )
    encoder_model = keras.Model(encoder_inputs, encoder_states)
    state_inputs = [keras.Input(shape=(LATENT,)), keras.Input(shape=(LATENT,))]
    outputs, *states = decoder_lstm(decoder_inputs, initial_state=state_inputs)
    decoder_model = keras.Model([decoder_inputs, *state_inputs], [decoder_dense(outputs), *states])
    states_value = encoder_model.predict(encoder_input_data[:1], verbose=0)
    target_seq = np.zeros((1, 1, TOKENS))
    target_seq[0, 0, 0] = 1.0
    decoded = []
    for _ in range(3):
        output_tokens, *states_value = decoder_model.predict([target_seq, *states_value], verbose=0)
        decoded.append(int(np.argmax(output_tokens[0, -1, :])))
        target_seq = np.zeros((1, 1, TOKENS))
        target_seq[0, 0, decoded[-1]] = 1.0
    return {"history": history.history, "decoded": decoded, "last": output_tokens}
