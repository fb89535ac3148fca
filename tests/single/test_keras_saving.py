"""Models are saved without a trace of the strategy, and load with or without one."""

import keras
import numpy as np
import pytest

from keras_comparison import assert_close, mirrored, regression_data
from unison import train

X, Y = regression_data(35)
FIT = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def trained():
    """A model that was trained on 4 replicas, whose moving statistics differ between them."""
    with mirrored(4).scope():
        model = build()
    model.fit(X, Y, **FIT)
    return model


@pytest.fixture
def file(trained, tmp_path):
    trained.save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def test_saved_model_loads_without_a_strategy(trained, file):
    loaded = keras.models.load_model(file)
    np.testing.assert_equal(loaded.get_weights(), trained.get_weights())


def test_model_loaded_in_a_scope_predicts_what_the_saved_one_does(trained, file, two_replicas):
    with two_replicas.scope():
        loaded = keras.models.load_model(file)
    assert_close(loaded.predict(X, verbose=0), trained.predict(X, verbose=0))


def test_model_loaded_in_a_scope_goes_on_training_with_its_optimizer(two_replicas, tmp_path):
    def plain():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    with two_replicas.scope():
        model = plain()
    model.fit(X, Y, **FIT)
    model.save(tmp_path / "model.keras")
    with two_replicas.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(loaded.fit(X, Y, **FIT).history, model.fit(X, Y, **FIT).history)


def test_model_trained_without_a_strategy_loads_into_a_scope(tmp_path, two_replicas):
    alone = build()
    alone.fit(X, Y, **FIT)
    alone.save(tmp_path / "model.keras")
    with two_replicas.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(X, verbose=0), alone.predict(X, verbose=0))


def test_weights_load_into_a_model_without_a_strategy(trained, tmp_path):
    trained.save_weights(tmp_path / "model.weights.h5")
    alone = build()
    alone.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_equal(alone.get_weights(), trained.get_weights())


def test_weights_load_into_a_model_on_another_number_of_replicas(trained, tmp_path, two_replicas):
    trained.save_weights(tmp_path / "model.weights.h5")
    with two_replicas.scope():
        model = build()
    model.load_weights(tmp_path / "model.weights.h5")
    assert_close(model.predict(X, verbose=0), trained.predict(X, verbose=0))


def test_model_cloned_in_a_scope_trains_there(two_replicas):
    alone = build()
    with two_replicas.scope():
        clone = keras.models.clone_model(alone)
        clone.compile("adam", "mse")
    clone.set_weights(alone.get_weights())
    clone.fit(X, Y, **FIT)
    assert int(clone.optimizer.iterations.numpy()) == 6


def test_model_behind_fsspec_appears_whole(trained, monkeypatch):
    import io

    import fsspec

    path = "memory://models/model.keras"
    trained.save(path)
    with fsspec.open(path, "rb") as file:
        before = file.read()
    loaded = keras.src.saving.saving_lib.load_model(io.BytesIO(before))
    np.testing.assert_equal(loaded.get_weights(), trained.get_weights())

    def stop(*args):
        raise OSError("no space")

    monkeypatch.setattr(keras.src.saving.saving_lib, "_save_model_to_fileobj", stop)
    with pytest.raises(OSError, match="no space"):
        trained.save(path)
    with fsspec.open(path, "rb") as file:
        assert file.read() == before


def test_model_as_a_folder_appears_whole(trained, tmp_path, monkeypatch):
    trained.save(tmp_path / "model", zipped=False)
    loaded = keras.models.load_model(tmp_path / "model")
    np.testing.assert_equal(loaded.get_weights(), trained.get_weights())

    def stop(model, folder, weights_format):
        raise OSError("no space")

    monkeypatch.setattr(keras.src.saving.saving_lib, "_save_model_to_dir", stop)
    with pytest.raises(OSError, match="no space"):
        trained.save(tmp_path / "model", zipped=False)
    monkeypatch.undo()
    loaded = keras.models.load_model(tmp_path / "model")
    np.testing.assert_equal(loaded.get_weights(), trained.get_weights())


def named(strategy):
    """A model whose variables have the same paths each time, as in processes of their own."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(1, name="out"),
            ],
            name="net",
        )
        model.compile(keras.optimizers.Adam(name="adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_folder_of_kerass_orbax_callback_is_loaded(tmp_path, two_replicas):
    saved = named(two_replicas)
    callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "orbax"))
    saved.fit(X, Y, callbacks=[callback], **FIT)
    loaded = named(mirrored(4))
    loaded.load_weights(tmp_path / "orbax")
    np.testing.assert_equal(loaded.get_weights(), saved.get_weights())
    for own, other in zip(loaded.optimizer.variables, saved.optimizer.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy(), own.path)
    weights = train.load_checkpoint(tmp_path / "orbax" / "1")
    kernel = weights.get_tensor("pytree/trainable_variables/net/out/kernel")
    np.testing.assert_array_equal(kernel, saved.get_layer("out").kernel.numpy())
