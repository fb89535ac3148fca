"""A deep Q network: replayed transitions, a target network, a Huber loss, masked actions."""

import collections

import numpy as np

import unison.tf as tf
from parity.starting_weights import start
from unison.tf import keras
from unison.tf.keras import layers

TASK = "reinforcement learning"
ACTIONS, BATCH, GAMMA = 3, 8, 0.9


class Corridor:
    """The agent is to come to the right end."""

    def reset(self):
        self.position = 2
        return self.state()

    def state(self):
        return np.eye(6, dtype="float32")[self.position]

    def step(self, action):
        self.position = int(np.clip(self.position + action - 1, 0, 5))
        return self.state(), float(self.position == 5), self.position == 5


def create_q_model():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(ACTIONS)]
    )


def train(strategy, epochs=30):
    rng = np.random.default_rng(52)
    with strategy.scope():
        model, model_target = start(create_q_model()), start(create_q_model())
        optimizer = keras.optimizers.Adam(learning_rate=0.01, clipnorm=1.0)
        optimizer.build(model.trainable_variables)
        loss_function = keras.losses.Huber(reduction="none")

    def replica_step(states, actions, updated_q_values):
        masks = tf.one_hot(actions, ACTIONS)
        with tf.GradientTape() as tape:
            q_values = model(states)
            q_action = tf.reduce_sum(tf.multiply(q_values, masks), axis=1)
            per_example = loss_function(updated_q_values[:, None], q_action[:, None])
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss

    @tf.function
    def update(states, actions, updated_q_values):
        losses = strategy.run(replica_step, args=(states, actions, updated_q_values))
        return strategy.reduce("SUM", losses, axis=None)

    environment, losses, chosen = Corridor(), [], []
    replay = collections.deque(maxlen=50)
    state = environment.reset()
    for frame in range(epochs):
        if frame < 10 or rng.random() < 0.3:
            action = int(rng.integers(ACTIONS))
        else:
            state_tensor = tf.expand_dims(tf.convert_to_tensor(state), 0)
            action_probs = model(state_tensor, training=False)
            action = tf.argmax(action_probs[0]).numpy()
        chosen.append(int(action))
        state_next, reward, done = environment.step(action)
        replay.append((state, action, state_next, reward, float(done)))
        state = environment.reset() if done else state_next
        if frame >= 10 and frame % 2 == 0:
            indices = rng.choice(len(replay), size=BATCH)
            sample = [np.array([replay[i][part] for i in indices], "float32") for part in range(5)]
            future_rewards = model_target.predict(sample[2], verbose=0)
            updated = sample[3] + GAMMA * tf.reduce_max(future_rewards, axis=1)
            updated = updated * (1 - sample[4]) - sample[4]
            given = strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices(
                    (sample[0], sample[1].astype("int32"), updated)
                ).batch(BATCH)
            )
            losses.append(float(update(*next(iter(given)))))
        if frame % 10 == 9:
            model_target.set_weights(model.get_weights())
    return {"losses": losses, "actions": chosen, "values": model(np.eye(6, dtype="float32"))}
