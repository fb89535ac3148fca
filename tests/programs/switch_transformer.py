"""A mixture of experts: tokens routed to experts with a capacity, and a balancing loss."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "text"
REPLICAS = 2
BECAUSE = "experts have a capacity for the tokens of each replica"
EXPERTS, WIDTH, TOKENS = 3, 6, 8


def load_balanced_loss(router_probs, expert_mask):
    num_experts = tf.shape(expert_mask)[-1]
    density = tf.reduce_mean(expert_mask, axis=0)
    density_proxy = tf.reduce_mean(router_probs, axis=0)
    return tf.reduce_mean(density_proxy * density) * tf.cast((num_experts**2), "float32")


class Router(layers.Layer):
    def __init__(self, num_experts, expert_capacity):
        super().__init__()
        self.num_experts = num_experts
        self.route = layers.Dense(units=num_experts)
        self.expert_capacity = expert_capacity

    def call(self, inputs, training=False):
        router_probs = keras.activations.softmax(self.route(inputs), axis=-1)
        expert_gate, expert_index = tf.math.top_k(router_probs, k=1)
        expert_mask = tf.one_hot(expert_index, self.num_experts)
        aux_loss = load_balanced_loss(router_probs, tf.squeeze(expert_mask, 1))
        self.add_loss(0.1 * aux_loss)
        expert_mask = tf.squeeze(expert_mask, 1)
        position_in_expert = tf.cast(tf.math.cumsum(expert_mask, axis=0) * expert_mask, "int32")
        expert_mask *= tf.cast(
            tf.math.less(tf.cast(position_in_expert, "int32"), self.expert_capacity), "float32"
        )
        expert_mask_flat = tf.reduce_sum(expert_mask, axis=-1)
        expert_gate = tf.squeeze(expert_gate, 1) * expert_mask_flat
        position = tf.reduce_sum(position_in_expert, axis=-1)
        combined_tensor = tf.expand_dims(
            expert_gate[:, None] * tf.one_hot(tf.squeeze(expert_index, 1), self.num_experts), -1
        ) * tf.expand_dims(tf.one_hot(position, self.expert_capacity), 1)
        return tf.cast(combined_tensor, "float32"), tf.cast(combined_tensor, "bool")


class Switch(layers.Layer):
    def __init__(self, num_experts, embed_dim, num_tokens_per_batch):
        super().__init__()
        self.embed_dim = embed_dim
        self.experts = [layers.Dense(embed_dim, activation="relu") for _ in range(num_experts)]
        self.router = Router(num_experts, num_tokens_per_batch // num_experts)

    def call(self, inputs):
        batch_size = tf.shape(inputs)[0]
        num_tokens_per_example = tf.shape(inputs)[1]
        inputs = tf.reshape(inputs, [batch_size * num_tokens_per_example, self.embed_dim])
        combine_tensor, dispatch_tensor = self.router(inputs)
        expert_inputs = tf.einsum("ab,acd->cdb", inputs, tf.cast(dispatch_tensor, "float32"))
        expert_input_list = tf.unstack(expert_inputs, axis=0)
        expert_output_list = [
            self.experts[idx](expert_input) for idx, expert_input in enumerate(expert_input_list)
        ]
        expert_outputs = tf.stack(expert_output_list, axis=1)
        expert_outputs_combined = tf.einsum("abc,xba->xc", expert_outputs, combine_tensor)
        return tf.reshape(
            expert_outputs_combined, [batch_size, num_tokens_per_example, self.embed_dim]
        )


def train(strategy, epochs=2):
    rng = np.random.default_rng(34)
    tokens = rng.integers(0, 15, (16, TOKENS))
    labels = (tokens[:, 0] > 7).astype(int)
    with strategy.scope():
        inputs = layers.Input(shape=(TOKENS,))
        x = layers.Embedding(15, WIDTH)(inputs)
        x = layers.LayerNormalization()(x + Switch(EXPERTS, WIDTH, 36)(x))
        x = layers.GlobalAveragePooling1D()(x)
        model = start(keras.Model(inputs, layers.Dense(2, activation="softmax")(x)))
        model.compile(
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    history = model.fit(tokens, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return {"history": history.history, "predicted": model.predict(tokens[:2], verbose=0)}
