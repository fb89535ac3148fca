"""Actor-critic: episodes collected in a compiled loop with TensorArrays, then one update."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf.keras import layers

TASK = "reinforcement learning"
STEPS = 6
huber_loss = tf.keras.losses.Huber(reduction=tf.keras.losses.Reduction.SUM)


class ActorCritic(tf.keras.Model):
    def __init__(self, num_actions, num_hidden_units):
        super().__init__()
        self.dense_1 = layers.Dense(num_hidden_units, activation="relu")
        self.actor = layers.Dense(num_actions)
        self.critic = layers.Dense(1)

    def call(self, inputs):
        x = self.dense_1(inputs)
        return self.actor(x), self.critic(x)


def env_step(state, action):
    push = tf.where(tf.equal(action, 1), 0.1, -0.1)
    velocity = 0.9 * state[1] + push
    position = state[0] + velocity
    return tf.stack([position, velocity]), 1.0 - tf.abs(position)


def run_episode(initial_state, model, max_steps):
    action_probs = tf.TensorArray(dtype=tf.float32, size=0, dynamic_size=True)
    values = tf.TensorArray(dtype=tf.float32, size=0, dynamic_size=True)
    rewards = tf.TensorArray(dtype=tf.float32, size=0, dynamic_size=True)
    initial_state_shape = initial_state.shape
    state = initial_state
    for t in range(max_steps):
        action_logits_t, value = model(tf.expand_dims(state, 0))
        action = tf.argmax(action_logits_t, axis=1)[0]
        action_probs_t = tf.nn.softmax(action_logits_t)
        values = values.write(t, tf.squeeze(value))
        action_probs = action_probs.write(t, tf.gather(action_probs_t[0], action))
        state, reward = env_step(state, action)
        state.set_shape(initial_state_shape)
        rewards = rewards.write(t, reward)
    return action_probs.stack(), values.stack(), rewards.stack()


def compute_loss(action_probs, values, returns):
    advantage = returns - values
    action_log_probs = tf.math.log(action_probs)
    actor_loss = -tf.math.reduce_sum(action_log_probs * advantage)
    critic_loss = huber_loss(values, returns)
    return actor_loss + critic_loss


def train(strategy, epochs=4):
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = ActorCritic(2, 8)
        model(tf.zeros((1, 2)))
        start(model)
        optimizer = tf.keras.optimizers.SGD(learning_rate=0.01)
        optimizer.build(model.trainable_variables)

    def replica_step(initial_state):
        with tf.GradientTape() as tape:
            action_probs, values, rewards = run_episode(initial_state, model, STEPS)
            returns = tf.math.cumsum(rewards, reverse=True)
            action_probs, values, returns = (
                tf.expand_dims(x, 1) for x in [action_probs, values, returns]
            )
            loss = compute_loss(action_probs, values, returns)
            scaled = loss / replicas
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return tf.math.reduce_sum(rewards)

    @tf.function
    def train_step(initial_state):
        return strategy.reduce("MEAN", strategy.run(replica_step, (initial_state,)), axis=None)

    rng = np.random.default_rng(53)
    rewards = []
    for _ in range(epochs):
        initial_state = tf.constant(rng.uniform(-0.1, 0.1, 2), dtype=tf.float32)
        rewards.append(float(train_step(initial_state)))
    logits, value = model(tf.constant([[0.1, -0.1], [0.3, 0.2]]))
    return {"rewards": rewards, "logits": logits, "value": value}
