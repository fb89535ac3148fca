"""Programs that run on several workers, and on one process with as many replicas.

Each takes a strategy and returns what JSON can say, so that the two can be compared.
"""

from __future__ import annotations

import os

import numpy as np

from keras_forms import scope_with_keras


def multi_worker_strategy():
    """The strategy of a worker that `launch` has started."""
    import unison

    return unison.MultiWorkerMirroredStrategy()


def on_workers(name, *args):
    """Runs the named program as a worker."""
    os.environ["KERAS_BACKEND"] = "jax"
    return globals()[name](multi_worker_strategy(), *args)


def replica_programs(strategy):
    """Variables of every kind, collectives, reductions and gathers."""
    import jax.numpy as jnp

    import unison
    from unison import VariableAggregation as Aggregation
    from unison import VariableSynchronization as Synchronization

    values = strategy.experimental_distribute_values_from_function
    with strategy.scope():
        mirrored = unison.Variable(np.float32(1.0), aggregation=Aggregation.MEAN)
        total = unison.Variable(
            np.zeros(2, np.float32),
            synchronization=Synchronization.ON_READ,
            aggregation=Aggregation.SUM,
        )
        mean = unison.Variable(
            np.float32(0.0), synchronization=Synchronization.ON_READ, aggregation=Aggregation.MEAN
        )

    def step(x):
        context = unison.get_replica_context()
        index = context.replica_id_in_sync_group
        mirrored.assign_add(x)
        total.assign_add(jnp.full(2, index + 1.0))
        mean.assign(x * 2)
        return {
            "all_reduce": context.all_reduce("SUM", x),
            "all_gather": context.all_gather(x[None], 0),
            "index": index,
        }

    out = strategy.run(
        step, (values(lambda context: np.float32(context.replica_id_in_sync_group)),)
    )
    ragged = values(lambda c: np.ones((c.replica_id_in_sync_group, 2), np.float32))
    sums = strategy.run(lambda x: jnp.sum(x), (ragged,))
    before = mean.numpy()
    mean.assign(7.0)
    total.assign([6.0, 7.0])
    return {
        "replicas": strategy.num_replicas_in_sync,
        "mirrored": float(mirrored.numpy()),
        "total": total.numpy().tolist(),
        "mean before": float(before),
        "mean": float(mean.numpy()),
        "all_reduce": float(strategy.experimental_local_results(out["all_reduce"])[0]),
        "all_gather": _first(strategy, out["all_gather"]),
        "sum of indices": int(strategy.reduce("SUM", out["index"], axis=None)),
        "indices": np.asarray(strategy.gather(_row(strategy, out["index"]), 0)).tolist(),
        "sums of uneven values": float(strategy.reduce("SUM", sums, axis=None)),
        "mean of uneven values": np.asarray(strategy.reduce("MEAN", ragged, axis=0)).tolist(),
        "gathered uneven values": np.asarray(strategy.gather(ragged, 0)).shape,
    }


def _first(strategy, value):
    return np.asarray(strategy.experimental_local_results(value)[0]).tolist()


def _row(strategy, value):
    return strategy.run(lambda x: x[None], (value,))


def custom_loop(strategy):
    """A loop with a tape, in whose first step slots and variables are made."""
    import keras

    import unison.tf as tf

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
    made = []

    def step(x):
        if not made:
            made.append(tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM))
        made[0].assign_add(1.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    examples = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None))
        for batch in strategy.experimental_distribute_dataset([examples] * 3)
    ]
    return {"losses": losses, "late": float(made[0].numpy())}


def predict_shuffled(strategy):
    """Predictions of a shuffled dataset: each example once."""
    import keras

    from unison.data import Dataset

    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
    examples = np.arange(20, dtype=np.float32)[:, None]
    shuffled = Dataset.from_tensor_slices(examples).shuffle(20).batch(8)
    return sorted(model.predict(shuffled, verbose=0).ravel().tolist())


def keras_fit(strategy, form="keras"):
    """Training, evaluation and prediction with uneven ends."""
    examples = np.random.default_rng(0).normal(size=(103, 8)).astype("float32")
    labels = (examples.sum(1) > 0).astype("int32")
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        examples, labels, batch_size=32, epochs=2, verbose=0, validation_split=0.2
    ).history
    return {
        **{name: [float(value) for value in values] for name, values in history.items()},
        "evaluate": [float(x) for x in model.evaluate(examples, labels, batch_size=50, verbose=0)],
        "predict": model.predict(examples, batch_size=30, verbose=0).tolist(),
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


def datasets(strategy):
    """Custom loops over divided datasets with uneven ends, and Keras over a dataset."""
    import jax.numpy as jnp
    import keras

    from unison.data import Dataset

    def seen(distributed):
        """The number and the sum of the examples of every step, over all replicas."""
        steps = []
        for batch in distributed:
            count = strategy.run(lambda x: jnp.float32(x.shape[0]), (batch,))
            total = strategy.run(lambda x: jnp.sum(x.astype(jnp.float32)), (batch,))
            pair = (count, total)
            steps.append([float(strategy.reduce("SUM", each, axis=None)) for each in pair])
        return steps

    numbers = Dataset.range(22).shuffle(22, seed=4).map(lambda x: x * 2).batch(8)
    divided = strategy.experimental_distribute_dataset(numbers)
    iterator = iter(divided)
    next(iterator)
    state = iterator.get_state()
    rest = iter(divided)
    rest.set_state(state)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    examples = Dataset.range(22).map(lambda x: (np.float32([x / 22]), np.float32([x])))
    history = model.fit(examples.shuffle(22, seed=2).batch(8), epochs=2, verbose=0).history
    return {
        "steps": seen(divided),
        "rest": seen(rest),
        "loss": history["loss"],
        "weights": [float(weight) for weight in map(np.squeeze, model.get_weights())],
    }


def files(strategy):
    """What workers read of files of different lengths, with a dataset of each worker's own too."""
    import tempfile
    from pathlib import Path

    import jax.numpy as jnp

    from unison.data import AutoShardPolicy, Dataset, Options, TextLineDataset

    with tempfile.TemporaryDirectory() as folder:
        for number, count in enumerate([3, 7, 1]):
            lines = [f"{100 * number + line}" for line in range(count)]
            Path(folder, f"{number}.txt").write_text("\n".join(lines))
        names = sorted(map(str, Path(folder).glob("*.txt")))
        lines = TextLineDataset(names).map(lambda line: np.float32(int(line)))
        options = Options(auto_shard_policy=AutoShardPolicy.FILE)
        divided = strategy.experimental_distribute_dataset(lines.batch(4).with_options(options))
        own = strategy.distribute_datasets_from_function(
            lambda context: Dataset.range(5 + 3 * context.input_pipeline_id).batch(2)
        )
        result = []
        for distributed in (divided, own):
            numbers = []
            for batch in distributed:
                sent = strategy.run(lambda x: x.astype(jnp.float32), (batch,))
                numbers.append(np.asarray(strategy.gather(sent, 0)).tolist())
            result.append(numbers)
    return result


def initial_values(strategy):
    """Variables whose first values differ from worker to worker, also where they are made late."""
    import jax
    import keras

    import unison

    keras.utils.set_random_seed(jax.process_index())
    with strategy.scope():
        variable = unison.Variable(np.full(3, jax.process_index() + 5.0, np.float32))
        layer = keras.layers.Dense(3)
        layer.build((None, 2))
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
    weights = [*layer.weights, *model.weights]
    return variable.numpy().tolist(), [np.asarray(weight).tolist() for weight in weights]
