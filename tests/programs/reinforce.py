"""REINFORCE: discounted returns of episodes, and one tape over an episode."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start

TASK = "reinforcement learning"


def episode(seed, length=8):
    """States, actions and rewards of a walk along a line."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, 2, length)
    positions = np.cumsum(np.where(actions == 1, 1, -1))
    states = np.stack([positions, np.arange(length) / length], -1).astype("float32")
    return states, actions.astype("int32"), (positions > 0).astype("float32")


def expected_returns(rewards, gamma=0.9, standardize=True):
    n = tf.shape(rewards)[0]
    returns = tf.TensorArray(dtype=tf.float32, size=n)
    rewards = tf.cast(rewards[::-1], dtype=tf.float32)
    discounted_sum = tf.constant(0.0)
    discounted_sum_shape = discounted_sum.shape
    for i in tf.range(n):
        reward = rewards[i]
        discounted_sum = reward + gamma * discounted_sum
        discounted_sum.set_shape(discounted_sum_shape)
        returns = returns.write(i, discounted_sum)
    returns = returns.stack()[::-1]
    if standardize:
        eps = np.finfo(np.float32).eps.item()
        returns = (returns - tf.math.reduce_mean(returns)) / (tf.math.reduce_std(returns) + eps)
    return returns


def train(strategy, epochs=4):
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        policy = tf.keras.Sequential(
            [
                tf.keras.Input((2,)),
                tf.keras.layers.Dense(8, activation="relu"),
                tf.keras.layers.Dense(2),
            ]
        )
        start(policy)
        optimizer = tf.keras.optimizers.Adam(learning_rate=0.02)
        optimizer.build(policy.trainable_variables)

    def replica_step(states, actions, rewards):
        returns = expected_returns(rewards)
        with tf.GradientTape() as tape:
            log_probs = tf.nn.log_softmax(policy(states, training=True))
            indices = tf.stack([tf.range(tf.shape(actions)[0]), actions], axis=1)
            chosen = tf.gather_nd(log_probs, indices)
            loss = -tf.math.reduce_sum(chosen * returns)
            scaled = loss / replicas
        grads = tape.gradient(scaled, policy.trainable_variables)
        optimizer.apply_gradients(zip(grads, policy.trainable_variables))
        return loss, returns[0]

    @tf.function
    def train_step(states, actions, rewards):
        loss, first = strategy.run(replica_step, args=(states, actions, rewards))
        return strategy.reduce("MEAN", loss, axis=None), strategy.reduce("MEAN", first, axis=None)

    losses = []
    for seed in range(epochs):
        given = [tf.convert_to_tensor(each) for each in episode(seed)]
        losses.append([float(value) for value in train_step(*given)])
    states = tf.constant([[1.0, 0.5], [-2.0, 0.1]])
    return {"losses": losses, "policy": tf.nn.softmax(policy(states))}
