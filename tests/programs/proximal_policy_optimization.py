"""PPO: generalized advantages, a clipped ratio, several updates of a buffer, early stopping."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "reinforcement learning"
STEPS, ACTIONS, CLIP = 16, 2, 0.2


def discounted_cumulative_sums(x, discount):
    sums, total = [], 0.0
    for value in x[::-1]:
        total = value + discount * total
        sums.append(total)
    return np.array(sums[::-1], "float32")


def mlp(x, sizes, activation="tanh"):
    for size in sizes[:-1]:
        x = layers.Dense(units=size, activation=activation)(x)
    return layers.Dense(units=sizes[-1])(x)


def logprobabilities(logits, a):
    logprobabilities_all = tf.nn.log_softmax(logits)
    return tf.reduce_sum(tf.one_hot(a, ACTIONS) * logprobabilities_all, axis=1)


def train(strategy, epochs=2):
    rng = np.random.default_rng(54)
    with strategy.scope():
        observation_input = keras.Input(shape=(3,), dtype="float32")
        actor = start(keras.Model(observation_input, mlp(observation_input, [6, ACTIONS])))
        value = tf.keras.ops.squeeze(mlp(observation_input, [6, 1]), axis=1)
        critic = start(keras.Model(inputs=observation_input, outputs=value))
        policy_optimizer = keras.optimizers.Adam(learning_rate=0.01)
        value_optimizer = keras.optimizers.Adam(learning_rate=0.02)
        policy_optimizer.build(actor.trainable_variables)
        value_optimizer.build(critic.trainable_variables)

    def train_policy(observations, actions, logprobability, advantages):
        with tf.GradientTape() as tape:
            ratio = tf.exp(logprobabilities(actor(observations), actions) - logprobability)
            min_advantage = tf.where(
                advantages > 0, (1 + CLIP) * advantages, (1 - CLIP) * advantages
            )
            policy_loss = -tf.reduce_sum(tf.minimum(ratio * advantages, min_advantage)) / STEPS
        policy_grads = tape.gradient(policy_loss, actor.trainable_variables)
        policy_optimizer.apply_gradients(zip(policy_grads, actor.trainable_variables))
        kl = tf.reduce_sum(logprobability - logprobabilities(actor(observations), actions))
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", kl) / STEPS

    def train_value_function(observations, returns):
        with tf.GradientTape() as tape:
            value_loss = tf.reduce_sum((returns - critic(observations)) ** 2) / STEPS
        value_grads = tape.gradient(value_loss, critic.trainable_variables)
        value_optimizer.apply_gradients(zip(value_grads, critic.trainable_variables))

    @tf.function
    def distributed_policy(*given):
        return strategy.reduce("MEAN", strategy.run(train_policy, args=given), axis=None)

    @tf.function
    def distributed_value(*given):
        strategy.run(train_value_function, args=given)

    def of_replicas(*arrays):
        dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(STEPS)
        return next(iter(strategy.experimental_distribute_dataset(dataset)))

    divergences = []
    for _ in range(epochs):
        observations = rng.normal(size=(STEPS, 3)).astype("float32")
        logits = actor(observations)
        actions = (rng.random(STEPS) < tf.nn.softmax(logits)[:, 1].numpy()).astype("int32")
        rewards = np.where(actions == (observations[:, 0] > 0), 1.0, -1.0).astype("float32")
        values = critic(observations).numpy()
        deltas = rewards + 0.9 * np.append(values[1:], 0) - values
        advantages = discounted_cumulative_sums(deltas, 0.9 * 0.95)
        advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-10)).astype("f4")
        returns = discounted_cumulative_sums(rewards, 0.9)
        old = logprobabilities(logits, actions)
        batch = of_replicas(observations, actions, old, advantages)
        for _ in range(3):
            kl = distributed_policy(*batch)
            divergences.append(float(kl))
            if kl > 1.5 * 0.05:
                break
        for _ in range(2):
            distributed_value(*of_replicas(observations, returns))
    seen = np.eye(3, dtype="float32")
    return {"kl": divergences, "values": critic(seen), "policy": tf.nn.softmax(actor(seen))}
