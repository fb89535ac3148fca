"""`ModelParallelStrategy` on several workers: what one device gives.

Each of two workers has a replica of two devices.
"""

import contextlib
import os

import numpy as np
import pytest

from unison.runtime import launch

SECONDS = 200
FEATURES, HIDDEN, CLASSES = 16, 64, 10

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


def trained(strategy=None):
    """The model, its losses and predictions."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, FEATURES)).astype("float32")
    y = rng.integers(0, CLASSES, 40)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build()
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    predictions = model.predict(x, batch_size=16, verbose=0)
    return model, {"loss": history["loss"], "predictions": predictions.tolist()}


def on_a_worker(checkpoint):
    os.environ["KERAS_BACKEND"] = "jax"
    import keras  # noqa: F401  before a scope

    import unison

    try:
        unison.ModelParallelStrategy(mesh={"batch": 1, "model": 4})
    except ValueError as error:
        refused = str(error)
    strategy = unison.ModelParallelStrategy(
        mesh={"batch": 2, "model": 2},
        rules={"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)},
        zero=3,
    )
    model, result = trained(strategy)
    unison.train.Checkpoint(model=model).write(checkpoint)
    up, down = model.get_layer("up"), model.get_layer("down")
    parts = {
        "up": up.kernel.cell.array.addressable_data(0).shape,
        "up/bias": up.bias.cell.array.addressable_data(0).shape,
        "down": down.kernel.cell.array.addressable_data(0).shape,
        "slot": model.optimizer.variables[2].cell.array.addressable_data(0).shape,
    }
    weights = [weight.numpy().tolist() for weight in model.trainable_variables]
    return result | {"parts": parts, "weights": weights, "refused": refused}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tmp_path_factory.mktemp("workers") / "point"


@pytest.fixture(scope="module")
def results(checkpoint):
    return launch(
        on_a_worker,
        workers=2,
        args=(str(checkpoint),),
        devices_per_worker=2,
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


def test_a_workers_devices_divide_the_model_and_workers_their_state(results):
    of_up, of_down = [FEATURES // 2, HIDDEN // 2], [HIDDEN // 2, FEATURES // 2]
    for result in results:
        parts = {name: list(shape) for name, shape in result["parts"].items()}
        assert parts == {"up": of_up, "up/bias": [HIDDEN // 2], "down": of_down, "slot": of_up}


def test_what_workers_have_saved_together_is_restored_on_one_device(results, checkpoint):
    import unison

    model = build()
    unison.train.Checkpoint(model=model).read(checkpoint)
    for restored, saved in zip(model.trainable_variables, results[0]["weights"], strict=True):
        np.testing.assert_array_equal(restored.numpy(), np.array(saved, "float32"))


def test_a_replica_of_several_workers_is_refused(results):
    for result in results:
        assert "workers with 2, 2 devices. Make these axes smaller" in result["refused"]
