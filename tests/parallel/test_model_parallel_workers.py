"""`ModelParallelStrategy` on several workers: what one device gives.

A worker has a replica, or several have one together.
"""

import contextlib
import os
import random
from typing import NamedTuple

import jax
import numpy as np
import pytest

from unison.runtime import launch, process_group

SECONDS = 200
FEATURES, HIDDEN, CLASSES = 16, 64, 10
FORMATS = ("archive", "orbax", "tensorflow")

# Which the fixtures are.
pytestmark = pytest.mark.slow


def build():
    import keras

    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(HIDDEN, "relu", name="up"),
        keras.layers.Dense(FEATURES, name="down"),
        keras.layers.Dense(CLASSES),
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, 40)


def trained(strategy=None):
    """The model, its losses and predictions."""
    x, y = data()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build()
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    predictions = model.predict(x, batch_size=16, verbose=0)
    return model, {"loss": history["loss"], "predictions": predictions.tolist()}


RULES = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


class Setting(NamedTuple):
    """Workers, and how they divide a model.

    Attributes:
        workers: The number of workers.
        devices: That of the devices of each.
        mesh: The mesh.
        zero: The ZeRO stage.
        up: The shape of a device's part of the first kernel.
    """

    workers: int
    devices: int
    mesh: dict[str, int]
    zero: int
    up: list[int]


SETTINGS = {
    "a replica each": Setting(2, 2, {"batch": 2, "model": 2}, 3, [FEATURES // 2, HIDDEN // 2]),
    "a replica together": Setting(2, 1, {"batch": 1, "model": 2}, 0, [FEATURES, HIDDEN // 2]),
    "two replicas of two": Setting(4, 1, {"batch": 2, "model": 2}, 3, [FEATURES // 2, HIDDEN // 2]),
}


def on_a_worker(setting, folder):
    os.environ["KERAS_BACKEND"] = "jax"
    import keras  # noqa: F401  before a scope

    import unison

    strategy = unison.ModelParallelStrategy(mesh=setting.mesh, rules=RULES, zero=setting.zero)
    model, result = trained(strategy)
    weights = [weight.numpy().tolist() for weight in model.trainable_variables]
    up, down = model.get_layer("up"), model.get_layer("down")
    parts = {
        "up": up.kernel.cell.array.addressable_data(0).shape,
        "up/bias": up.bias.cell.array.addressable_data(0).shape,
        "down": down.kernel.cell.array.addressable_data(0).shape,
        "slot": model.optimizer.variables[2].cell.array.addressable_data(0).shape,
    }
    return result | {
        "parts": {name: list(shape) for name, shape in parts.items()},
        "weights": weights,
        "restored": {name: restored(model, f"{folder}/{name}", name) for name in FORMATS},
        "compressed": compressed(strategy),
        "shuffled": shuffled(strategy),
        "pipelined": pipelined(),
        "unseeded": unseeded(strategy, folder),
        "index": process_group.index(),
        "inputs": [strategy.input_workers.index, strategy.input_workers.num_workers],
    }


def restored(model, path, name):
    """The weights after they were saved in a format, lost, and restored."""
    import unison

    unison.train.Checkpoint(model=model, format=name).write(path)
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape, weight.dtype))
    unison.train.Checkpoint(model=model).read(path).assert_existing_objects_matched()
    return [weight.numpy().tolist() for weight in model.trainable_variables]


def compressed(strategy):
    """The losses and weights of training whose gradients are compressed, by compression."""
    import keras

    import unison
    from unison import compression

    found = {}
    for compressing in (
        compression.int8(rule=compression.everything),
        compression.powersgd(rank=2),
        compression.topk(0.25),
    ):
        with strategy.scope():
            model = build()
            adam = unison.train.with_compression(keras.optimizers.Adam(0.01), compressing)
            model.compile(adam, model.loss)
        losses = model.fit(*data(), batch_size=16, epochs=2, shuffle=False, verbose=0).history
        weights = [weight.numpy().tolist() for weight in model.trainable_variables]
        found[type(compressing).__name__] = {"loss": losses["loss"], "weights": weights}
    return found


def shuffled(strategy):
    """The examples of each step of a loop, by an order that the workers have not been given."""
    import unison

    random.seed(process_group.index())
    np.random.seed(process_group.index())
    numbers = unison.data.Dataset.range(40).shuffle(40).batch(12)

    def step(batch):
        return unison.get_replica_context().all_reduce("SUM", (batch.sum(), (batch**2).sum()))

    sums = []
    for batch in strategy.experimental_distribute_dataset(numbers):
        results = strategy.run(step, args=(batch,))
        sums.append([int(strategy.experimental_local_results(each)[0]) for each in results])
    return sums


def unseeded(strategy, folder):
    """What workers have and read of which each would have drawn its own."""
    import keras

    import unison

    own = process_group.index()
    random.seed(own)
    np.random.seed(own)
    keras.utils.set_random_seed(own)
    with strategy.scope():
        layers = [
            keras.layers.Dense(HIDDEN, "relu", name="up"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(FEATURES, name="down"),
            keras.layers.Dense(1, name="last"),
        ]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile("sgd", "mse")
    last = model.get_layer("last").kernel.cell
    begun = np.asarray(last.array.addressable_data(0)).tolist()
    x = np.random.default_rng(2).normal(size=(41, FEATURES)).astype("float32")
    keep = keras.callbacks.ModelCheckpoint(f"{folder}/kept.weights.h5", save_weights_only=True)
    history = model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0, callbacks=[keep])
    model.save(f"{folder}/unseeded.keras")

    def dataset(context):
        ids = unison.data.Dataset.range(100).shuffle(100)
        return ids.batch(4)

    batch = next(iter(strategy.distribute_datasets_from_function(dataset)))
    sizes = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(1 + context.replica_id_in_sync_group)
    )
    return {
        "begun": begun,
        "history": history.history["loss"],
        "ended": np.asarray(last.array.addressable_data(0)).tolist(),
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "batch": np.asarray(strategy.experimental_local_results(batch)[0]).tolist(),
        "gathered": len(strategy.gather(sizes, 0)),
        "alone": written_alone(model, folder),
    }


def written_alone(model, folder):
    """What becomes of a write of the first worker alone."""
    import unison

    checkpoint, said = unison.train.Checkpoint(model=model, format="archive"), ""
    if process_group.is_first():
        try:
            checkpoint.write(f"{folder}/alone")
        except unison.errors.FailedPreconditionError as error:
            said = str(error)
    process_group.all_gather_json(said, "Where the others have gone on to")
    return said


def pipelined(mesh=None):
    """The losses of a pipeline, over as many workers as there are in `mesh`; None: all."""
    import keras

    import unison

    count = process_group.count() * len(jax.local_devices())
    strategy = unison.ModelParallelStrategy(mesh=mesh or {"batch": 1, "stage": count})
    keras.utils.set_random_seed(4)
    with strategy.scope():
        stages = [[keras.layers.Dense(FEATURES, "tanh")] for _ in range(4)]
        pipeline = unison.keras.Pipeline(stages, microbatches=4)
        model = keras.Sequential([keras.Input((FEATURES,)), pipeline, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(1).normal(size=(32, FEATURES)).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=16, epochs=3, shuffle=False, verbose=0).history
    return history["loss"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(setting, id=name, marks=[pytest.mark.soak] * (name == "a replica each"))
        for name, setting in SETTINGS.items()
    ],
)
def setting(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def results(setting, folder):
    return launch(
        on_a_worker,
        workers=setting.workers,
        args=(setting, str(folder)),
        devices_per_worker=setting.devices,
        timeout=SECONDS,
        on_line=lambda worker, line: None,
    )


@pytest.fixture(scope="module")
def alone():
    model, result = trained()
    return result | {"weights": [weight.numpy().tolist() for weight in model.trainable_variables]}


@pytest.mark.parametrize("part", ["loss", "predictions", "weights"])
def test_workers_train_as_one_device(part, results, alone):
    for result in results:
        for own, expected in zip(result[part], alone[part], strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_the_devices_of_a_replica_divide_the_model_and_replicas_their_state(results, setting):
    rows, columns = setting.up
    of_down = [HIDDEN // 2, FEATURES // 2 if setting.zero else FEATURES]
    expected = {
        "up": [rows, columns],
        "up/bias": [HIDDEN // 2],
        "down": of_down,
        "slot": [rows, columns],
    }
    assert [result["parts"] for result in results] == [expected] * setting.workers


@pytest.mark.parametrize("format", FORMATS)
def test_what_workers_save_together_they_restore_and_so_does_one_device(results, folder, format):
    import unison

    for result in results:
        assert result["restored"][format] == result["weights"]
    model = build()
    unison.train.Checkpoint(model=model).read(folder / format)
    for restored, saved in zip(model.trainable_variables, results[0]["weights"], strict=True):
        np.testing.assert_array_equal(restored.numpy(), np.array(saved, "float32"))


def test_compressed_gradients_are_those_of_the_same_mesh_in_one_process(results, setting):
    import unison

    devices = [f"CPU:{index}" for index in range(setting.workers * setting.devices)]
    mesh = unison.ModelParallelStrategy(devices, mesh=setting.mesh, rules=RULES, zero=setting.zero)
    expected = compressed(mesh)
    for result in results:
        for name, own in result["compressed"].items():
            np.testing.assert_allclose(own["loss"], expected[name]["loss"], rtol=1e-4, err_msg=name)
            for each, other in zip(own["weights"], expected[name]["weights"], strict=True):
                np.testing.assert_allclose(each, other, rtol=1e-3, atol=1e-4, err_msg=name)


def test_workers_of_a_replica_read_the_same_examples(results, setting):
    teams = setting.mesh["batch"]
    for result in results:
        assert result["inputs"] == [result["index"] * teams // setting.workers, teams]
        assert result["shuffled"] == results[0]["shuffled"]
        of_numbers, of_squares = zip(*result["shuffled"], strict=True)
        assert (sum(of_numbers), sum(of_squares)) == (780, 20540)  # each once


def test_what_each_worker_would_draw_is_that_of_the_first(results, setting):
    first = results[0]["unseeded"]
    per_replica = setting.workers // setting.mesh["batch"]
    for result in results:
        found = result["unseeded"]
        for name in ("begun", "history", "ended", "weights"):
            assert found[name] == first[name], name
        team = result["index"] // max(per_replica, 1)
        assert found["batch"] == results[team * max(per_replica, 1)]["unseeded"]["batch"]
        assert found["gathered"] == sum(range(1, setting.mesh["batch"] + 1))


def test_workers_save_a_keras_model_whose_parts_they_have(results, setting, folder):
    import keras

    model = keras.models.load_model(folder / "unseeded.keras")
    for loaded, saved in zip(model.weights, results[0]["unseeded"]["weights"], strict=True):
        np.testing.assert_array_equal(loaded, np.array(saved, loaded.dtype))
    model.load_weights(folder / "kept.weights.h5")
    assert "All workers must save" in results[0]["unseeded"]["alone"]


def test_stages_of_a_pipeline_lie_on_several_workers(results):
    expected = pipelined({"batch": 1, "stage": 1})
    for result in results:
        np.testing.assert_allclose(result["pipelined"], expected, rtol=1e-5)
