"""A training whose workers are killed and started again, for the tests of checkpoints in memory.

    python in_memory_program.py FOLDER KIND [NAME=VALUE ...]

Workers are killed once for each entry of `kills`, as `STEP:WORKER`, or `STEP:WORKER:MILLISECONDS`
after that step. The one that `broken` names, as `WORKER:WORKERS`, cannot be started again as one of
so many, once a worker has been killed. At the end, the first worker prints what there is, as JSON:
the weights, bit by bit and as norms, and the metrics of each epoch.
"""

import functools
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np

import unison
from unison.data import Dataset

FOLDER = pathlib.Path(sys.argv[1])
KIND = sys.argv[2]
GIVEN = dict(pair.split("=", 1) for pair in sys.argv[3:])
#: How Keras comes to the program: "keras", imported here; or "tf", as TensorFlow's guide writes it:
#: by the first `tf.keras`, inside the scope.
FORM = GIVEN.get("form", "keras")
if FORM == "tf":
    import unison.tf as tf
else:
    import keras
KILLS = [tuple(map(int, pair.split(":"))) for pair in GIVEN.get("kills", "").split(",") if pair]
EPOCHS = int(GIVEN.get("epochs", 3))
LOOPS = int(GIVEN.get("loops", 1))
ZERO = int(GIVEN.get("zero", 0))
#: How many devices compute a replica.
MODEL = int(GIVEN.get("model", 0))
#: Whether the number of replicas makes no difference.
PLAIN = bool(GIVEN.get("plain"))
#: Further mebibytes of state.
MEBIBYTES = int(GIVEN.get("mebibytes", 0))
#: Seconds that each step takes at least.
SLOW = float(GIVEN.get("slow", 0.01))
#: Seconds after which a worker that sends nothing is lost.
TIMEOUT = float(GIVEN.get("timeout", 300))
EXAMPLES, BATCH = 150, 8  # the last batch of an epoch is smaller

if "broken" in GIVEN and (FOLDER / "kill-0").exists():
    config = json.loads(os.environ["TF_CONFIG"])
    if GIVEN["broken"] == f"{config['task']['index']}:{len(config['cluster']['worker'])}":
        os.kill(os.getpid(), signal.SIGKILL)

if MODEL:
    rules = {"dense/kernel": (None, "model"), "dense_1/kernel": ("model", None)}
    strategy = unison.ModelParallelStrategy(mesh={"batch": 1, "model": MODEL}, rules=rules)
elif ZERO:
    devices = os.environ.get("UNISON_CPU_DEVICES")  # without it, those of all workers
    mesh = {"batch": int(devices)} if devices else {}
    strategy = unison.ModelParallelStrategy(mesh=mesh, zero=ZERO)
else:
    strategy = unison.MultiWorkerMirroredStrategy(
        communication_options=unison.CommunicationOptions(timeout_seconds=TIMEOUT),
        elastic=unison.elastic.Options(
            keep=GIVEN.get("keep", "global_batch"), learning_rate=lambda now, begun: now / begun
        )
        if "keep" in GIVEN
        else None,
    )
own = jax.process_index()
replicas = strategy.num_replicas_in_sync
numbers = np.random.default_rng(3)
features = numbers.standard_normal((EXAMPLES, 6)).astype(np.float32)
labels = (features.sum(axis=1, keepdims=True) > 0).astype(np.float32)
begun = time.time()


def keras_of_the_form():
    """Returns Keras; in a scope."""
    found = tf.keras if FORM == "tf" else keras
    found.utils.set_random_seed(7)
    return found


def stepped(step):
    """Notes a step that is done, and is killed if that is planned."""
    with (FOLDER / f"steps-{own}").open("a") as file:
        file.write(f"{step} {time.time():.4f}\n")
    time.sleep(SLOW)
    for number, (at, worker, *later) in enumerate(KILLS):
        mark = FOLDER / f"kill-{number}"
        if step >= at and not mark.exists():
            if worker == own:
                mark.write_text(f"{step} {time.time():.4f}")
                kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
                if later:
                    threading.Timer(later[0] / 1000, kill).start()
                else:
                    kill()
            return  # one after the other


def report(weights, **told):
    digest = hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in weights))
    norms = [float(np.linalg.norm(np.asarray(array, np.float64))) for array in weights]
    if own == 0:
        told = {"digest": digest.hexdigest(), "norms": norms, **told}
        print("REPORT", json.dumps(told), flush=True)


def fit():
    with strategy.scope():
        keras = keras_of_the_form()
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(64, activation="tanh")(inputs)
        hidden = keras.layers.Dense(64, activation="tanh")(hidden)
        if not PLAIN:
            hidden = keras.layers.BatchNormalization()(hidden)
            hidden = keras.layers.Dropout(0.2, seed=11)(hidden)
        if MEBIBYTES:
            large = keras.layers.Embedding(MEBIBYTES * 256, 1024 // 4 * 4, name="large")
            hidden = keras.layers.Concatenate()(
                [hidden, large(keras.ops.cast(inputs[:, 0] > 0, "int32"))]
            )
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(
            keras.optimizers.Adam(0.01) if not MEBIBYTES else keras.optimizers.SGD(0.01),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.AUC(from_logits=True, name="auc")],
        )

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])
            stepped(int(model.optimizer.iterations))

    data = Dataset.from_tensor_slices((features, labels)).shuffle(60, seed=5).batch(BATCH)
    histories = []
    for _ in range(LOOPS):
        history = model.fit(
            data,
            epochs=EPOCHS,
            verbose=0,
            callbacks=[Noting(), keras.callbacks.EarlyStopping("loss", patience=50)],
        )
        histories.append({name: [*map(float, of)] for name, of in history.history.items()})
    weights = [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]
    report(
        weights,
        history=histories[-1],
        steps=int(model.optimizer.iterations),
        rate=float(model.optimizer.learning_rate),
        replicas=[replicas, strategy.num_replicas_in_sync],
    )


def loop():
    on_read = unison.VariableSynchronization.ON_READ
    with strategy.scope():
        keras_of_the_form()
        weights = unison.Variable(np.full((6, 1), 0.1, np.float32))
        seen = unison.Variable(
            np.zeros(EXAMPLES, np.float32),
            synchronization=on_read,
            aggregation=unison.VariableAggregation.SUM,
        )

    def loss(weights, values, labels):
        logits = values @ weights
        return jnp.sum(jax.nn.softplus(logits) - labels * logits)

    def step(batch, rate):
        values, labels, ids = batch
        gradient = jax.grad(loss)(jnp.asarray(weights), values, labels)
        total = unison.get_replica_context().all_reduce("SUM", gradient)
        weights.assign_sub(rate / BATCH * total)
        seen.assign_add(jnp.sum(jax.nn.one_hot(ids, EXAMPLES), axis=0))

    ids = np.arange(EXAMPLES, dtype=np.int32)

    @unison.elastic.run
    def train(state):
        data = Dataset.from_tensor_slices((features, labels, ids)).shuffle(60, seed=5).batch(BATCH)
        batches = strategy.experimental_distribute_dataset(data)
        while state.epoch < EPOCHS:
            for batch in state.iterate(batches):
                strategy.run(step, (batch, np.float32(0.3 + 0.1 * np.random.rand())))
                state.step += 1
                state.commit()
                stepped(state.step)
            state.epoch += 1
            state.commit()

    state = unison.elastic.State(epoch=0, step=0, weights=weights, seen=seen)
    train(state)
    report(
        [weights, seen],
        seen=np.asarray(seen).tolist(),
        steps=state.step,
        replicas=[replicas, strategy.num_replicas_in_sync],
    )


{"fit": fit, "loop": loop}[KIND]()
