"""A training whose workers are lost, for the tests of elastic jobs.

    python elastic_program.py fit|loop [NAME=VALUE ...]

Its state accounts for every example: `seen` counts how often each has been used. At the end it
prints what there is, as JSON.
"""

import hashlib
import json
import os
import random
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

import unison
from unison.data import Dataset

KIND = sys.argv[1]
GIVEN = dict(pair.split("=", 1) for pair in sys.argv[2:])
#: How Keras comes to the program: "keras", imported here; or "tf", as TensorFlow's guide writes it:
#: by the first `tf.keras`, inside the scope.
FORM = GIVEN.get("form", "keras")
if FORM == "tf":
    import unison.tf as tf
else:
    import keras
EXAMPLES = int(GIVEN.get("examples", 120))
BATCH = int(GIVEN.get("batch", 10))
EPOCHS = int(GIVEN.get("epochs", 3))
#: How many loops there are, one after the other; behind each `fit` there is an evaluation.
LOOPS = int(GIVEN.get("loops", 1))
#: Seconds that each step takes at least; without, and without the next, steps may be run together.
SLOW = float(GIVEN.get("slow", 0.0))
#: With fewer replicas, steps wait for more, some time.
FULL = int(GIVEN.get("full", 0))
#: Whether a loop waits so before its first step, too.
EARLY = bool(int(GIVEN.get("early", 0)))
#: Whose `fit` has an epoch less, by its place in the first group: its program is a wrong one.
SHORTER = int(GIVEN.get("shorter", -1))
#: Where checkpoints are written; none without.
FOLDER = GIVEN.get("folder")

#: Whether the batches of the replicas stay, and not the global ones.
KEEPS_PARTS = GIVEN.get("keep") == "parts"

options = unison.elastic.Options(
    keep="per_replica_batch", learning_rate=lambda replicas, at_start: replicas / at_start
)
strategy = unison.MultiWorkerMirroredStrategy(elastic=options if KEEPS_PARTS else None)
numbers = np.random.default_rng(0)
features = numbers.standard_normal((EXAMPLES, 8)).astype(np.float32)
labels = (features @ numbers.standard_normal((8, 1)) > 0).astype(np.float32)
ids = np.arange(EXAMPLES, dtype=np.int32)


def keras_of_the_form():
    """Returns Keras; in a scope."""
    found = tf.keras if FORM == "tf" else keras
    found.utils.set_random_seed(1)
    found.config.disable_traceback_filtering()
    return found


def counting_layer(keras):
    class Counting(keras.layers.Layer):
        """Passes features on, and counts in the state that is trained whose they are."""

        def build(self, shapes):
            self.seen = self.add_weight(
                shape=(EXAMPLES,),
                initializer="zeros",
                dtype="float32",
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",  # all compute the same: the sum over all
                name="seen",
            )

        def call(self, inputs, training=False):
            values, numbers = inputs
            if training:
                own = keras.ops.sum(keras.ops.one_hot(numbers, EXAMPLES), axis=0)
                self.seen.assign(self.seen + unison.get_replica_context().all_reduce("SUM", own))
            return values

    return Counting()


def report(weights, seen, history=None, rate=None):
    weights = [np.asarray(array) for array in weights]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()
    flat = np.concatenate([array.reshape(-1) for array in weights]).astype(float).tolist()
    counts = np.asarray(seen).astype(int).tolist()
    told = {
        "digest": digest,
        "weights": flat,
        "seen": counts,
        "history": history,
        "rate": rate,
        "replicas": strategy.num_replicas_in_sync,
    }
    print("REPORT", json.dumps(told), flush=True)


patience = float(GIVEN.get("patience", 40))


def pause():
    """Gives those time to come back that were lost, which ends the present view."""
    global patience
    time.sleep(SLOW)
    while strategy.num_replicas_in_sync < FULL and patience > 0 and not strategy.group.is_over:
        time.sleep(0.02)
        patience -= 0.02


def watching_callback(keras, counting):
    class Watching(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.before = 0  # epochs of earlier loops
            if SLOW or FULL:
                self.on_train_batch_end = lambda batch, logs=None: pause()

        def on_epoch_end(self, epoch, logs=None):
            unison.testing.record_examples(self.before + epoch, np.asarray(counting.seen))

    return Watching()


def fit():
    with strategy.scope():
        keras = keras_of_the_form()
        counting = counting_layer(keras)
        inputs = keras.Input((8,), name="features"), keras.Input((), dtype="int32", name="ids")
        hidden = keras.layers.Dense(4, activation="tanh")(counting(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    watching = watching_callback(keras, counting)
    callbacks = [watching]
    if FOLDER is not None:
        callbacks.append(keras.callbacks.BackupAndRestore(os.path.join(FOLDER, "backup")))
        callbacks.append(keras.callbacks.ModelCheckpoint(os.path.join(FOLDER, "last.keras")))
    held_out = (features[:30], ids[:30]), labels[:30]
    if GIVEN.get("data") == "dataset":
        examples = Dataset.from_tensor_slices(((features, ids), labels))
        data = {"x": examples.shuffle(50, seed=3).batch(BATCH)}
    else:
        data = {"x": (features, ids), "y": labels, "batch_size": BATCH}
    for _ in range(LOOPS):
        history = model.fit(
            **data,
            epochs=EPOCHS - (SHORTER >= 0 and strategy.group.index == SHORTER),
            validation_data=held_out,
            verbose=0,
            callbacks=callbacks,
        )
        watching.before += EPOCHS
        if LOOPS > 1:
            model.evaluate(*held_out, batch_size=BATCH, verbose=0)
    weights = [weight for weight in model.get_weights() if weight.shape != (EXAMPLES,)]
    told = {name: [*map(float, values)] for name, values in history.history.items()}
    report(weights, counting.seen, told, float(model.optimizer.learning_rate))


def loop():
    with strategy.scope():
        keras_of_the_form()
        equal = unison.VariableAggregation.ONLY_FIRST_REPLICA
        weights = unison.Variable(np.full((8, 1), 0.1, np.float32), aggregation=equal)
        seen = unison.Variable(
            np.zeros(EXAMPLES, np.float32), aggregation=unison.VariableAggregation.SUM
        )

    def loss(weights, values, labels):
        logits = values @ weights
        return jnp.sum(jax.nn.softplus(logits) - labels * logits)

    def step(batch, rate):
        values, labels, numbers = batch
        own = jax.grad(loss)(jnp.asarray(weights), values, labels)
        total = unison.get_replica_context().all_reduce("SUM", own)
        weights.assign_sub(rate / BATCH * total)
        seen.assign_add(jnp.sum(jax.nn.one_hot(numbers, EXAMPLES), axis=0))

    def batched():
        examples = Dataset.from_tensor_slices((features, labels, ids))
        return examples.shuffle(50, seed=3).batch(BATCH)

    # With one loop, it may be made before: passes of earlier calls have begun then.
    made_before = batched() if EARLY else None

    @unison.elastic.run
    def train(state, number):
        batches = strategy.experimental_distribute_dataset(made_before or batched())
        while state.epoch < EPOCHS:
            for batch in state.iterate(batches):
                if EARLY and state.step == 0:
                    pause()
                # The generators are as in an undisturbed training, on all workers.
                rate = 0.4 + 0.1 * np.random.rand() + 0.1 * random.random()
                if FORM == "tf":
                    rate += 0.1 * float(tf.random.uniform(()))
                strategy.run(step, (batch, np.float32(rate)))
                state.step += 1
                state.commit()
                pause()
            unison.testing.record_examples(number * EPOCHS + state.epoch, np.asarray(seen))
            state.epoch += 1
            state.commit()

    for number in range(LOOPS):
        train(unison.elastic.State(epoch=0, step=0, weights=weights, seen=seen), number)
    report([weights], seen)


{"fit": fit, "loop": loop}[KIND]()
