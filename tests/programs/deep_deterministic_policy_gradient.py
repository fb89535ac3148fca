"""DDPG: an actor through a critic, and targets that follow slowly, in compiled updates."""

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "reinforcement learning"
BATCH, GAMMA, TAU = 8, 0.9, 0.1


def get_actor():
    inputs = layers.Input(shape=(3,))
    out = layers.Dense(8, activation="relu")(inputs)
    outputs = layers.Dense(1, activation="tanh")(out)
    return keras.Model(inputs, outputs * 2.0)


def get_critic():
    state_input, action_input = layers.Input(shape=(3,)), layers.Input(shape=(1,))
    state_out = layers.Dense(8, activation="relu")(state_input)
    action_out = layers.Dense(4, activation="relu")(action_input)
    out = layers.Dense(8, activation="relu")(layers.Concatenate()([state_out, action_out]))
    return keras.Model([state_input, action_input], layers.Dense(1)(out))


class OUActionNoise:
    def __init__(self, std_deviation, rng, theta=0.15, dt=1e-2):
        self.std_dev, self.rng, self.theta, self.dt, self.x = std_deviation, rng, theta, dt, 0.0

    def __call__(self):
        noise = self.std_dev * np.sqrt(self.dt) * self.rng.normal()
        self.x = self.x - self.theta * self.x * self.dt + noise
        return self.x


def train(strategy, epochs=4):
    rng = np.random.default_rng(55)
    noise = OUActionNoise(0.2, rng)
    with strategy.scope():
        actor_model, critic_model = start(get_actor(), 1), start(get_critic(), 2)
        target_actor, target_critic = get_actor(), get_critic()
        target_actor.set_weights(actor_model.get_weights())
        target_critic.set_weights(critic_model.get_weights())
        critic_optimizer = keras.optimizers.Adam(0.02)
        actor_optimizer = keras.optimizers.Adam(0.01)
        critic_optimizer.build(critic_model.trainable_variables)
        actor_optimizer.build(actor_model.trainable_variables)

    def update(state_batch, action_batch, reward_batch, next_state_batch):
        with tf.GradientTape() as tape:
            target_actions = target_actor(next_state_batch, training=True)
            y = reward_batch + GAMMA * target_critic(
                [next_state_batch, target_actions], training=True
            )
            critic_value = critic_model([state_batch, action_batch], training=True)
            critic_loss = tf.reduce_sum(tf.math.square(y - critic_value)) / BATCH
        critic_grad = tape.gradient(critic_loss, critic_model.trainable_variables)
        critic_optimizer.apply_gradients(zip(critic_grad, critic_model.trainable_variables))
        with tf.GradientTape() as tape:
            actions = actor_model(state_batch, training=True)
            critic_value = critic_model([state_batch, actions], training=True)
            actor_loss = -tf.math.reduce_sum(critic_value) / BATCH
        actor_grad = tape.gradient(actor_loss, actor_model.trainable_variables)
        actor_optimizer.apply_gradients(zip(actor_grad, actor_model.trainable_variables))
        return critic_loss

    @tf.function
    def distributed_update(batch):
        return strategy.reduce("SUM", strategy.run(update, args=batch), axis=None)

    def update_target(target, original):
        target_weights, original_weights = target.get_weights(), original.get_weights()
        for i in range(len(target_weights)):
            target_weights[i] = original_weights[i] * TAU + target_weights[i] * (1 - TAU)
        target.set_weights(target_weights)

    losses = []
    for _ in range(epochs):
        states = rng.normal(size=(BATCH, 3)).astype("float32")
        sampled = tf.squeeze(actor_model(states), axis=-1).numpy() + noise()
        actions = np.clip(sampled, -2, 2)[:, None].astype("float32")
        rewards = -np.abs(states[:, :1] - actions)
        dataset = tf.data.Dataset.from_tensor_slices((states, actions, rewards, -states))
        distributed = strategy.experimental_distribute_dataset(dataset.batch(BATCH))
        for batch in distributed:
            losses.append(float(distributed_update(batch)))
        update_target(target_actor, actor_model)
        update_target(target_critic, critic_model)
    return {"losses": losses, "actions": target_actor(np.eye(3, dtype="float32"))}
