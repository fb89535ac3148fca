"""Programs that run on several workers, and on one process with as many replicas.

Each takes a strategy and returns what JSON can say, so that the two can be compared.
"""

from __future__ import annotations

import contextlib
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


def _linear_model(strategy, seed=1):
    import keras

    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", weighted_metrics=["mae"])
    return model


def _numbered(number):
    x = np.float32(number)
    return x[None] / 50, x[None] / 20


def decoded_examples(strategy):
    """Which examples this worker decodes in Keras' loops, and what the loops return."""
    from unison.data import Dataset

    decoded = []

    def decode(number):
        decoded.append(int(number))
        return _numbered(number)

    def taken():
        numbers = sorted(decoded)
        decoded.clear()
        return numbers

    model = _linear_model(strategy)
    batches = Dataset.range(47).shuffle(47, seed=5).map(decode).batch(12)
    ahead = Dataset.range(12).map(decode).batch(6).prefetch(2)
    inputs = Dataset.range(10).map(lambda number: decode(number)[0]).batch(5)
    history = model.fit(batches, epochs=2, validation_data=ahead, verbose=0).history
    of_fit = taken()
    evaluated = model.evaluate(batches, verbose=0)
    of_evaluate = taken()
    predicted = model.predict(inputs, verbose=0)
    return {
        "fit": of_fit,
        "evaluate": of_evaluate,
        "predict": taken(),
        "numbers": [*history.values(), evaluated, predicted.ravel().tolist()],
    }


def fitted_on_own_inputs(strategy):
    """What `fit` learns where workers read inputs of their own, and from all workers' batches."""
    import tempfile
    from pathlib import Path

    from unison.data import Dataset, TextLineDataset

    read = []

    def decode(line):
        read.append(int(line))
        return _numbered(int(line))

    def of_worker(context):
        return Dataset.range(9 + 4 * context.input_pipeline_id).map(_numbered).batch(3)

    def trained(data, whole):
        """The weights after `fit`, those after its steps on whole batches, and other results."""
        model, other = _linear_model(strategy), _linear_model(strategy)
        history = model.fit(data, epochs=2, verbose=0).history
        for batch in [*whole, *whole]:
            other.train_on_batch(*batch)
        evaluated = model.evaluate(data, verbose=0)
        taken = sorted(read)
        examples = [np.concatenate(part) for part in zip(*whole, strict=True)]
        predictions = model.predict(data, verbose=0)
        return {
            "weights": [each.tolist() for each in model.get_weights()],
            "of whole batches": [each.tolist() for each in other.get_weights()],
            "loss": history["loss"],
            "evaluate": evaluated,
            "of all examples": model.evaluate(*examples, batch_size=7, verbose=0),
            # Those for files are in the order of the data, and not of the workers.
            "predict": sorted(predictions.ravel().tolist()),
            "of each": sorted(model.predict(examples[0], verbose=0).ravel().tolist()),
            "read": taken,
        }

    def gathered(distributed):
        return [
            tuple(np.asarray(strategy.gather(part, 0)) for part in batch) for batch in distributed
        ]

    with tempfile.TemporaryDirectory() as folder:
        for number, count in enumerate([3, 17, 8, 1, 2]):
            lines = [f"{100 * number + line}" for line in range(count)]
            Path(folder, f"{number}.txt").write_text("\n".join(lines))
        names = sorted(map(str, Path(folder).glob("*.txt")))
        lines = TextLineDataset(names).map(decode).batch(6)
        whole = gathered(strategy.experimental_distribute_dataset(lines))
        read.clear()
        of_files = trained(lines, whole)
    function = strategy.distribute_datasets_from_function(of_worker)
    of_function = trained(function, gathered(function))
    return {"files": of_files, "function": of_function}


def resumed_fit(strategy, folder):
    """What `fit` learns undisturbed, and resumed within an epoch; what it decodes then."""
    from pathlib import Path

    import keras

    from unison.data import Dataset, TextLineDataset

    decoded = []

    def decode(line):
        decoded.append(int(line))
        return _numbered(int(line))

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (1, 1):
                raise InterruptedError

    def trained(data, backup=None, stop=()):
        model = _linear_model(strategy)
        backups = [keras.callbacks.BackupAndRestore(backup, save_freq=1)] if backup else []
        decoded.clear()
        with contextlib.suppress(InterruptedError):
            model.fit(data, epochs=3, verbose=0, callbacks=[*stop, *backups])
        return [each.tolist() for each in model.get_weights()]

    names = []
    for number, count in enumerate([5, 9, 8, 4]):
        lines = [f"{100 * number + line}" for line in range(count)]
        # Two workers write the same.
        Path(folder, f"{number}.txt").write_text("\n".join(lines))
        names.append(f"{folder}/{number}.txt")
    inputs = {
        "data": lambda: Dataset.range(40).shuffle(40, seed=3).map(decode).batch(8),
        "files": lambda: TextLineDataset(names).map(decode).batch(8),
        "function": lambda: strategy.distribute_datasets_from_function(
            lambda context: (
                Dataset.range(40)
                .shard(2, context.input_pipeline_id)
                .shuffle(12, seed=context.input_pipeline_id)
                .map(decode)
                .batch(4)
            )
        ),
    }
    result = {}
    for kind, data in inputs.items():
        backup = f"{folder}/{kind}"
        whole = trained(data())
        trained(data(), backup, [Stop()])
        result[kind] = {"whole": whole, "resumed": trained(data(), backup), "read": [*decoded]}
    return result


def torch_loaders(strategy):
    """What `fit` learns from PyTorch's loaders, and which examples each worker loads."""
    import keras
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

    import unison

    workers = strategy.input_workers
    loaded = []

    class Numbers(Dataset):
        def __init__(self, draws=False):
            self._draws = draws

        def __len__(self):
            return 30

        def __getitem__(self, index):
            loaded.append(int(index))
            if self._draws:  # as an augmentation does
                drawn.append(torch.rand(int(index) % 3 + 1).tolist()[0])
            return _numbered(index)

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            loaded.clear()

        def on_train_batch_end(self, batch, logs=None):
            self._trained = [*loaded]  # without those of the validation

        def on_epoch_end(self, epoch, logs=None):
            epochs.append(self._trained)

    class Doubled(DataLoader):
        def __iter__(self):
            for x, y in super().__iter__():
                yield 2 * x, y

    epochs, drawn = [], []

    def trained(loader, **kwargs):
        model = _linear_model(strategy)
        epochs.clear()
        losses = model.fit(loader, epochs=3, verbose=0, callbacks=[Epochs()], **kwargs).history[
            "loss"
        ]
        return {
            "loss": losses,
            "weights": [each.tolist() for each in model.get_weights()],
            "loaded": [*epochs],
            "evaluate": model.evaluate(loader, verbose=0),
        }

    # A seed for each worker: they take the first one's.
    torch.manual_seed(workers.index)
    shuffled = trained(DataLoader(Numbers(), batch_size=8, shuffle=True))
    own = torch.Generator().manual_seed(7 + workers.index)
    with_processes = trained(
        DataLoader(
            Numbers(),
            batch_size=8,
            shuffle=True,
            generator=own,
            num_workers=1,
            persistent_workers=True,
        )
    )

    def as_it_is(examples):
        return torch.utils.data.default_collate(examples)

    whole = trained(DataLoader(Numbers(), batch_size=8, collate_fn=as_it_is))
    doubled = trained(Doubled(Numbers(), batch_size=8))
    augmented = DataLoader(Numbers(draws=True), batch_size=8, shuffle=True)
    drawing = trained(augmented, validation_data=augmented)
    result = {"shuffled": shuffled, "with processes": with_processes, "whole": whole}
    result |= {"drawing": drawing, "drawn": drawn, "doubled": doubled}
    if workers.num_workers > 1:
        sampler = DistributedSampler(
            Numbers(), num_replicas=workers.num_workers, rank=workers.index, shuffle=False
        )
        result["sampled"] = trained(DataLoader(Numbers(), batch_size=3, sampler=sampler))
        in_batches = BatchSampler(sampler, 3, drop_last=False)
        result["in batches"] = trained(DataLoader(Numbers(), batch_sampler=in_batches))
        other = BatchSampler(range(workers.index, 30), 8, drop_last=True)
        try:
            trained(DataLoader(Numbers(), batch_sampler=other))
        except unison.errors.InvalidArgumentError as error:
            result["refused"] = str(error)
    return result


def loops_of_every_kind(strategy):
    """What Keras' loops give with weights, repeats, several steps a call and steps that assign."""
    import keras

    from unison.data import Dataset

    class Assigning(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def test_step(self, data):
            x, y = data
            return self.compute_metrics(x, y, self(x, training=False))

    numbers = np.arange(23, dtype=np.float32)
    x, y, classes = numbers[:, None] / 23, numbers[:, None] / 7, (numbers % 3).astype("int32")
    result = {}

    def classifier(**options):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"], **options)
        return model

    def fitted(name, model, *args, **kwargs):
        history = model.fit(*args, epochs=2, verbose=0, shuffle=False, **kwargs).history
        weights = [each.ravel().tolist() for each in model.get_weights()]
        result[name] = [*history.values(), *weights]

    weights = {0: 1.0, 1: 3.0, 2: 0.5}
    examples = Dataset.from_tensor_slices((x, classes))
    fitted("class weights", classifier(), examples.batch(8), class_weight=weights)
    fitted("of arrays", classifier(), x, classes, batch_size=8, class_weight=weights)
    weighted = Dataset.from_tensor_slices((x, classes, numbers / 9)).batch(6)
    fitted("sample weights", classifier(), weighted, validation_data=weighted)
    fitted("in a group", classifier(steps_per_execution=3), examples.batch(4))
    repeated = examples.shuffle(23, seed=1).batch(8).repeat()
    fitted("repeated", classifier(), repeated, steps_per_epoch=4)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(2)])
        assigning = Assigning()
        assigning.compile("sgd", "mse", metrics=["mae"])
    predicted = unbuilt.predict(Dataset.from_tensor_slices(x).batch(9), verbose=0)
    result["predict"] = [predicted.ravel().tolist()]
    pairs = Dataset.from_tensor_slices((x, y)).batch(5)
    result["assigning"] = [assigning.evaluate(pairs, verbose=0)]
    return result


def predicted_from_files(strategy, folder):
    """Predictions for the lines of files, in the order of the lines."""
    from pathlib import Path

    from unison.data import TextLineDataset

    names = [str(Path(folder, f"{number}.txt")) for number in range(3)]
    lines = TextLineDataset(names).map(lambda line: np.float32([int(line)])).batch(4)
    model = _linear_model(strategy)
    model.set_weights([np.ones((1, 1)), np.zeros(1)])
    return model.predict(lines, verbose=0).ravel().tolist()


def dataset_creator(strategy, form="tf"):
    """What `fit` learns from the datasets that a `DatasetCreator` makes, and from their batches."""
    import unison.tf as tf

    made = []

    def dataset_fn(context):
        made.append([context.num_input_pipelines, context.input_pipeline_id])
        numbers = tf.data.Dataset.range(48).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        size = context.get_per_replica_batch_size(8)
        return numbers.map(lambda n: (tf.cast(n, "float32")[None] / 50, n % 3)).repeat().batch(size)

    with scope_with_keras(strategy, form) as keras:
        model, other = (
            keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]) for _ in range(2)
        )
        other.set_weights(model.get_weights())
        for each in (model, other):
            each.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    creator = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
    model.fit(creator, epochs=2, steps_per_epoch=5, verbose=0)
    numbers = np.arange(10 * 8).reshape(10, -1, strategy.num_replicas_in_sync) % 48
    for batch in numbers:
        of_replicas = batch.T.ravel()
        other.train_on_batch(np.float32(of_replicas)[:, None] / 50, of_replicas % 3)
    weights = [[each.tolist() for each in one.get_weights()] for one in (model, other)]
    return {"made": made, "weights": weights}
