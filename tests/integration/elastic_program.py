"""A training whose workers are lost, for the tests of elastic jobs.

    python elastic_program.py fit|loop [NAME=VALUE ...]

Its state accounts for every example: `seen` counts how often each has been used. At the end it
prints what there is, as JSON.
"""

import functools
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback

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

#: How often an alarm, at random moments, interrupts the loops of all workers but the first one.
ALARMS = int(GIVEN.get("alarms", 0))
SEED = int(GIVEN.get("seed", 0))

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
#: The examples that this worker has decoded.
decoded = []


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
        "decoded": len(decoded),
    }
    print("REPORT", json.dumps(told), flush=True)


def decode(example, label):
    decoded.append(int(example[1]))
    return example, label


class AlarmError(Exception):
    """Raised by a signal handler."""


def interrupted(train, check):
    """Calls `train`, again after each alarm, when `check` has looked at the state.

    Args:
        train: A loop, which goes on where it was interrupted.
        check: Returns how many steps the variables have taken part in, and raises if that is not a
            whole number.
    """
    own = 0 if strategy.group is None else strategy.group.index
    moments = random.Random(f"{SEED} {own}")
    is_armed = False

    def raise_once(number, frame):
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise AlarmError

    def raise_again(unraisable):
        """Notes that Python has ignored the exception: it came into a weak reference's callback."""
        nonlocal is_armed
        is_armed = unraisable.exc_type is AlarmError

    for number in range(ALARMS if own else 0):
        signal.signal(signal.SIGALRM, raise_once)
        sys.unraisablehook = raise_again
        is_armed = True
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.001, 0.5 if number else 2.0), 0.5)
        try:
            result = train()
            assert is_armed, "what the handler has raised did not come out of the loop"
            is_armed = False
            return result
        except AlarmError as error:
            place = traceback.extract_tb(error.__traceback__)[-2]
            at = f"{os.path.basename(place.filename)}:{place.name}"
            print("INTERRUPTED", json.dumps({"steps": check(), "at": at}), flush=True)
        finally:
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    return train()


def whole_steps(counts):
    """Returns how many batches have been counted, by the times that each example was used."""
    total = int(np.sum(counts))
    assert total % BATCH == 0, f"{total} examples were used, which are no whole batches of {BATCH}"
    return total // BATCH


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
    if GIVEN.get("data") in ("dataset", "decoded"):
        examples = Dataset.from_tensor_slices(((features, ids), labels))
        if GIVEN["data"] == "decoded":
            examples = examples.map(decode)
        data = {"x": examples.shuffle(50, seed=3).batch(BATCH)}
    else:
        data = {"x": (features, ids), "y": labels, "batch_size": BATCH}
    for _ in range(LOOPS):
        fit_once = functools.partial(
            model.fit,
            **data,
            epochs=EPOCHS - (SHORTER >= 0 and strategy.group.index == SHORTER),
            validation_data=held_out,
            verbose=0,
            callbacks=callbacks,
        )

        def check():
            steps = whole_steps(counting.seen)
            assert steps == int(np.asarray(model.optimizer.iterations))
            with tempfile.TemporaryDirectory() as folder:
                model.save_weights(os.path.join(folder, "model.weights.h5"))
            return steps

        history = interrupted(fit_once, check)
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
        state = unison.elastic.State(epoch=0, step=0, weights=weights, seen=seen)

        def check(state=state):
            steps = whole_steps(seen)
            assert steps == state.step
            with tempfile.TemporaryDirectory() as folder:
                unison.train.Checkpoint(weights=weights, seen=seen).write(f"{folder}/checkpoint")
            return steps

        interrupted(functools.partial(train, state, number), check)
    report([weights], seen)


{"fit": fit, "loop": loop}[KIND]()
