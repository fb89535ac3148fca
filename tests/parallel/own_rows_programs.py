"""Keras' loops on several workers, each of which reads its own rows or files.

As in `programs.py`, each program takes a strategy and returns what JSON can say, so that workers
can be compared with one process. The form is how Keras comes to it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings

import numpy as np

from keras_forms import scope_with_keras
from parallel.programs import multi_worker_strategy


def on_workers(name, *args, **kwargs):
    """Runs the named program as a worker."""
    os.environ["KERAS_BACKEND"] = "jax"
    return globals()[name](multi_worker_strategy(), *args, **kwargs)


def _linear_model(strategy, form):
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", weighted_metrics=["mae"])
    return model


def _numbered(number):
    x = np.float32(number)
    return x[None] / 50, x[None] / 20


def decoded_examples(strategy, form="keras"):
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

    model = _linear_model(strategy, form)
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


def fitted_on_own_inputs(strategy, form="keras"):
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
        model, other = _linear_model(strategy, form), _linear_model(strategy, form)
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


def resumed_fit(strategy, folder, form):
    """What `fit` learns undisturbed, and resumed within an epoch; what it decodes then."""
    from pathlib import Path

    from unison.data import Dataset, TextLineDataset

    decoded = []

    def decode(line):
        decoded.append(int(line))
        return _numbered(int(line))

    def trained(data, backup=None, stops=False):
        model = _linear_model(strategy, form)
        import keras

        class Stop(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_train_batch_end(self, batch, logs=None):
                if stops and (self.epoch, batch) == (1, 1):
                    raise InterruptedError

        backups = [keras.callbacks.BackupAndRestore(backup, save_freq=1)] if backup else []
        decoded.clear()
        data, kwargs = data if isinstance(data, tuple) else (data, {})
        with contextlib.suppress(InterruptedError):
            model.fit(data, epochs=3, verbose=0, callbacks=[Stop(), *backups], **kwargs)
        return [each.tolist() for each in model.get_weights()]

    def turns(shuffle):
        import keras

        class Turns(keras.utils.PyDataset):
            def __len__(self):
                return 5

            def __getitem__(self, index):
                x, y = _numbered(np.arange(5 * index, 5 * index + 6))
                return x[0][:, None], y[0][:, None] + np.random.rand(6, 1)

        return Turns(use_multiprocessing=True), {"shuffle": shuffle}

    names = []
    for number, count in enumerate([5, 9, 8, 4]):
        lines = [f"{100 * number + line}" for line in range(count)]
        # Two workers write the same.
        Path(folder, f"{number}.txt").write_text("\n".join(lines))
        names.append(f"{folder}/{number}.txt")
    inputs = {
        "data": lambda: Dataset.range(40).shuffle(40, seed=3).map(decode).batch(8),
        "files": lambda: TextLineDataset(names).map(decode).batch(8),
        "turns": lambda: turns(True),
        "turns in order": lambda: turns(False),
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
        trained(data(), backup, stops=True)
        result[kind] = {"whole": whole, "resumed": trained(data(), backup), "read": [*decoded]}
    return result


def torch_loaders(strategy, form="keras"):
    """What `fit` learns from PyTorch's loaders, and which examples each worker loads."""
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

    class Doubled(DataLoader):
        def __iter__(self):
            for x, y in super().__iter__():
                yield 2 * x, y

    epochs, drawn = [], []

    def trained(loader, **kwargs):
        model = _linear_model(strategy, form)
        import keras

        class Epochs(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                loaded.clear()

            def on_train_batch_end(self, batch, logs=None):
                self._trained = [*loaded]  # without those of the validation

            def on_epoch_end(self, epoch, logs=None):
                epochs.append(self._trained)

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


def grain_pipelines(strategy, form="keras", in_processes=False):
    """What Keras' loops give for Grain's pipelines, and which examples this worker reads.

    Args:
        strategy: The strategy.
        form: How the program comes to Keras.
        in_processes: Whether it is a loader with processes of its own.
    """
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # which Grain's processes ask for
    model = _linear_model(strategy, form)
    workers = strategy.input_workers
    read, result = [], {}

    class Numbers:
        def __len__(self):
            return 30

        def __getitem__(self, index):
            read.append(int(index))
            return int(index)

    class Numbered(grain.transforms.Map):
        def map(self, number):
            return _numbered(number)

    class Moved(grain.transforms.RandomMap):
        def random_map(self, pair, rng):
            x, y = pair
            return x, y + rng.normal(size=y.shape).astype("float32")

    class Sampler:  # without a length
        def __getitem__(self, index):
            if index >= 20:
                raise IndexError(index)
            return grain.RecordMetadata(index=index, record_key=index)

    class Even(grain.transforms.Filter):
        def filter(self, number):
            return number % 2 == 0

    examples = grain.MapDataset.source(Numbers()).seed(4).shuffle()
    pairs = examples.map(Numbered()).random_map(Moved())

    in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

    def loader(size, *maps, shard=None, count=1, **options):
        return grain.DataLoader(
            data_source=Numbers(),
            sampler=grain.samplers.IndexSampler(30, shuffle=True, seed=2, num_epochs=count),
            operations=[*maps, grain.transforms.Batch(size)],
            shard_options=shard or grain.sharding.NoSharding(),
            read_options=in_this_thread,
            **options,
        )

    def fitted(name, data, **kwargs):
        import keras

        # Keras' adapter looks at two whole batches before that.
        begins = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: read.clear())
        losses = model.fit(data, epochs=2, verbose=0, **kwargs).history["loss"]
        weights = [each.ravel().tolist() for each in model.get_weights()]
        steps = kwargs.get("steps_per_epoch")
        evaluated = model.evaluate(data, verbose=0, steps=steps, callbacks=[begins])
        result[name] = {"numbers": [losses, evaluated, *weights], "read": sorted(read)}

    if in_processes:  # each makes batches of its own
        of_processes = loader(3, Numbered(), worker_count=2, count=2)
        return {"numbers": [model.evaluate(of_processes, verbose=0)]}
    fitted("by index", pairs.batch(8))
    inputs = grain.MapDataset.source(Numbers()).map(lambda number: _numbered(number)[0]).batch(8)
    result["predicted"] = {"numbers": [model.predict(inputs, verbose=0).ravel().tolist()]}
    fitted("iterated", pairs.to_iter_dataset(in_this_thread).batch(8))
    fitted("batches iterated", pairs.batch(8, drop_remainder=True).to_iter_dataset(in_this_thread))

    def make_batch(examples):  # not Grain's
        return tuple(2 * np.stack(parts) for parts in zip(*examples, strict=True))

    fitted("batched", pairs.batch(8, batch_fn=make_batch))
    fitted("repeated", pairs.repeat().batch(8), steps_per_epoch=5)
    fitted("loaded", loader(8, Numbered(), Moved()))
    unknown = grain.DataLoader(
        data_source=Numbers(),
        sampler=Sampler(),
        operations=[Numbered(), grain.transforms.Batch(8)],
        shard_options=grain.sharding.NoSharding(),
    )
    fitted("of unknown length", unknown)
    filtered = examples.filter(Even()).map(Numbered()).to_iter_dataset().batch(8)
    fitted("whole batches", filtered)
    fitted("idle", pairs[:6].batch(1))  # one worker has the only row
    if workers.num_workers > 1:
        shard = grain.sharding.ShardOptions(workers.index, workers.num_workers)
        sharded = loader(4, Numbered(), shard=shard)
        fitted("sharded", sharded)
        result["sharded"]["whole"] = model.evaluate(loader(8, Numbered()), verbose=0)
        result["refused"] = []
        for refused in (
            lambda: model.predict(sharded, verbose=0),
            lambda: model.evaluate(pairs[workers.index :].batch(8), verbose=0),
            lambda: model.evaluate(pairs[workers.index :: workers.num_workers].batch(4), verbose=0),
        ):
            try:
                refused()
            except Exception as error:
                result["refused"].append(f"{type(error).__name__}: {error}")
    return result


def py_datasets(strategy, folder, form="keras"):
    """What Keras' loops give for `PyDataset`s, and which batches this worker computes."""
    model = _linear_model(strategy, form)
    import keras

    worker, num_workers = strategy.input_workers.index, strategy.input_workers.num_workers
    calls = os.path.join(folder, f"{num_workers} {worker}")

    class Numbers(keras.utils.PyDataset):
        def __init__(self, sizes, fails_at=None, shuffles=False, endless=False, **kwargs):
            super().__init__(use_multiprocessing=num_workers > 1, **kwargs)
            self._begins = np.cumsum([0, *sizes])
            self._fails_at, self._shuffles, self._endless = fails_at, shuffles, endless
            self._numbers = np.arange(self._begins[-1], dtype=np.float32)
            self._calls = 0

        @property
        def num_batches(self):
            return None if self._endless else len(self._begins) - 1

        def __getitem__(self, index):
            drawn = np.random.rand() if num_workers > 1 else 0  # in a process of its own
            with open(calls, "a") as file:
                file.write(f"{index} {drawn} {os.getpid()} {self._calls}\n")
            self._calls += 1
            if index == self._fails_at:
                raise OSError("no such file")
            index %= len(self._begins) - 1
            numbers = self._numbers[self._begins[index] : self._begins[index + 1]]
            return [numbers[:, None] / 50, numbers[:, None] / 20, 1 + numbers % 3]

        def on_epoch_end(self):
            if self._shuffles:
                np.random.shuffle(self._numbers)

    def computed():
        if not os.path.exists(calls):
            return []
        with open(calls) as file:
            lines = [line.split() for line in file]
        os.remove(calls)
        return [
            [int(index), float(drawn), int(pid), int(calls)] for index, drawn, pid, calls in lines
        ]

    def failure_of(dataset):
        try:
            model.evaluate(dataset, verbose=0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    sizes, result = [12, 12, 12, 7, 1], {}
    keras.utils.set_random_seed(3)  # also of workers with different states
    np.random.rand(worker)
    for kind, shuffle, options in (
        ("in order", False, {}),
        ("shuffled", True, {"workers": 2}),
        ("shuffled by itself", False, {"shuffles": True}),
    ):
        data, validation = Numbers(sizes, **options), Numbers([5, 3], **options)
        kwargs = {"epochs": 2, "shuffle": shuffle, "verbose": 0}
        history = model.fit(data, validation_data=validation, **kwargs).history
        calls_before = [each[-1] for each in computed()]
        evaluated = model.evaluate(data, verbose=0)
        result[kind] = {
            "numbers": [*history.values(), evaluated],
            "computed": computed(),
            "calls": max(calls_before),
            "pid": os.getpid(),
        }
    endless = model.fit(Numbers(sizes, endless=True), steps_per_epoch=4, epochs=2, verbose=0)
    predicted = model.predict(Numbers(sizes), verbose=0)
    few = model.evaluate(Numbers([4]), verbose=0)
    result["others"] = {"numbers": [endless.history["loss"], predicted.ravel().tolist(), few]}
    if num_workers > 1:
        result["failed"] = failure_of(Numbers(sizes, fails_at=2))
        result["longer"] = failure_of(Numbers(sizes[worker:]))
        for kind, options in (("unpicklable", {}), ("without processes", {"workers": 0})):
            data = Numbers(sizes, **options)
            data.lock = threading.Lock()
            computed()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.evaluate(data, verbose=0)
            warned = [str(each.message) for each in caught]
            warned = [each for each in warned if "computes all batches" in each]
            result[kind] = {"warned": warned, "computed": len({each[0] for each in computed()})}

    class Level(keras.utils.PyDataset):
        level = 0

        @property
        def num_batches(self):
            return 12

        def __getitem__(self, index):
            x = np.ones((4, 1), "float32")
            return x, x * self.level

        def on_epoch_end(self):
            self.level += 1

    losses = model.fit(
        Level(use_multiprocessing=num_workers > 1), steps_per_epoch=4, epochs=3, verbose=0
    ).history["loss"]
    result["level"] = losses
    return result


def loops_of_every_kind(strategy, form="keras"):
    """What Keras' loops give with weights, repeats, several steps a call and steps that assign."""
    from unison.data import Dataset

    def assigning_model(keras):
        class Assigning(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x):
                return self.dense(x)

            def test_step(self, data):
                x, y = data
                return self.compute_metrics(x, y, self(x, training=False))

        return Assigning()

    numbers = np.arange(23, dtype=np.float32)
    x, y, classes = numbers[:, None] / 23, numbers[:, None] / 7, (numbers % 3).astype("int32")
    result = {}

    def classifier(**options):
        with scope_with_keras(strategy, form) as keras:
            keras.utils.set_random_seed(2)
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
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(3)
        unbuilt = keras.Sequential([keras.layers.Dense(2)])
        assigning = assigning_model(keras)
        assigning.compile("sgd", "mse", metrics=["mae"])
    predicted = unbuilt.predict(Dataset.from_tensor_slices(x).batch(9), verbose=0)
    result["predict"] = [predicted.ravel().tolist()]
    pairs = Dataset.from_tensor_slices((x, y)).batch(5)
    result["assigning"] = [assigning.evaluate(pairs, verbose=0)]
    return result


def predicted_from_files(strategy, folder, form):
    """Predictions for the lines of files, in the order of the lines."""
    from pathlib import Path

    from unison.data import TextLineDataset

    names = [str(Path(folder, f"{number}.txt")) for number in range(3)]
    lines = TextLineDataset(names).map(lambda line: np.float32([int(line)])).batch(4)
    model = _linear_model(strategy, form)
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


def differing_data(strategy, form="keras"):
    """The warnings of Keras' loops where each worker has data of its own, or the same."""
    model = _linear_model(strategy, form)
    worker = strategy.input_workers.index
    x = np.arange(8, dtype=np.float32)[:, None] / 8

    def batches(first):
        yield x[:4] + first, x[:4]
        yield x[4:], x[4:]

    def warned(*args, **kwargs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model.fit(*args, verbose=0, epochs=2, **kwargs)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return [str(each.message) for each in caught if "different data" in str(each.message)]

    return {
        "same arrays": warned(x, x),
        "other arrays": warned(x, x + worker),
        "validation": warned(x, x, validation_data=(x + worker, x)),
        "other lengths": warned(x[worker:], x[worker:]),
        "same batches": warned(batches(0), steps_per_epoch=1),
        "other batches": warned(batches(worker), steps_per_epoch=1),
    }
