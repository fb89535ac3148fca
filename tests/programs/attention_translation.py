"""Translation with Bahdanau's attention: an own loop over the target's words, with a mask."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "text"
WORDS, UNITS, BATCH = 10, 6, 8


class BahdanauAttention(tf.keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.W1 = tf.keras.layers.Dense(units)
        self.W2 = tf.keras.layers.Dense(units)
        self.V = tf.keras.layers.Dense(1)

    def call(self, query, values):
        query_with_time_axis = tf.expand_dims(query, 1)
        score = self.V(tf.nn.tanh(self.W1(query_with_time_axis) + self.W2(values)))
        attention_weights = tf.nn.softmax(score, axis=1)
        context_vector = tf.reduce_sum(attention_weights * values, axis=1)
        return context_vector, attention_weights


class Encoder(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(WORDS, UNITS)
        self.gru = tf.keras.layers.GRU(UNITS, return_sequences=True, return_state=True)

    def call(self, x, hidden):
        output, state = self.gru(self.embedding(x), initial_state=hidden)
        return output, state

    def initialize_hidden_state(self, batch):
        return tf.zeros((batch, UNITS))


class Decoder(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(WORDS, UNITS)
        self.gru = tf.keras.layers.GRU(UNITS, return_sequences=True, return_state=True)
        self.fc = tf.keras.layers.Dense(WORDS)
        self.attention = BahdanauAttention(UNITS)

    def call(self, x, hidden, enc_output):
        context_vector, attention_weights = self.attention(hidden, enc_output)
        x = self.embedding(x)
        x = tf.concat([tf.expand_dims(context_vector, 1), x], axis=-1)
        output, state = self.gru(x)
        output = tf.reshape(output, (-1, output.shape[2]))
        return self.fc(output), state, attention_weights


def train(strategy, epochs=2):
    rng = np.random.default_rng(28)
    source = rng.integers(2, WORDS, (16, 4))
    target = np.concatenate([np.ones((16, 1), int), source[:, ::-1], np.zeros((16, 1), int)], 1)
    dataset = tf.data.Dataset.from_tensor_slices((source, target)).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        encoder, decoder = Encoder(), Decoder()
        enc_output, enc_hidden = encoder(source[:2], encoder.initialize_hidden_state(2))
        decoder(target[:2, :1], enc_hidden, enc_output)
        start([encoder, decoder])
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(encoder.trainable_variables + decoder.trainable_variables)
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )

    def loss_function(real, pred):
        mask = tf.math.logical_not(tf.math.equal(real, 0))
        loss_ = loss_object(real, pred)
        loss_ *= tf.cast(mask, dtype=loss_.dtype)
        return tf.nn.compute_average_loss(loss_, global_batch_size=BATCH)

    def replica_step(inp, targ):
        loss = 0.0
        with tf.GradientTape() as tape:
            hidden = encoder.initialize_hidden_state(tf.shape(inp)[0])
            enc_output, dec_hidden = encoder(inp, hidden)
            dec_input = tf.expand_dims(targ[:, 0], 1)
            for t in range(1, targ.shape[1]):
                predictions, dec_hidden, _ = decoder(dec_input, dec_hidden, enc_output)
                loss += loss_function(targ[:, t], predictions)
                dec_input = tf.expand_dims(targ[:, t], 1)
        variables = encoder.trainable_variables + decoder.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return loss / int(targ.shape[1])

    @tf.function
    def train_step(inp, targ):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(inp, targ)), axis=None)

    losses = [float(train_step(inp, targ)) for _ in range(epochs) for inp, targ in dataset]
    enc_output, state = encoder(source[:1], encoder.initialize_hidden_state(1))
    _, _, attention = decoder(target[:1, :1], state, enc_output)
    return {"losses": losses, "attention": tf.reshape(attention, (-1,)).numpy()}
