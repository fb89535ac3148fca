"""What cannot be trained under a strategy is one error that says what to do instead."""

import keras
import numpy as np
import pytest

from keras_comparison import mirrored, regression_data
from subprocess_program import run_program

X, Y = regression_data(16)


def layers():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])


@pytest.fixture
def other_strategy():
    return mirrored(4)


def test_model_built_outside_cannot_be_compiled_inside(two_replicas):
    model = layers()
    with (
        two_replicas.scope(),
        pytest.raises(ValueError, match=r"built outside it.*inside `with strategy\.scope\(\):`"),
    ):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_model_built_outside_cannot_be_used_inside(method, two_replicas):
    model = layers()
    model.compile("sgd", "mse")
    with two_replicas.scope(), pytest.raises(ValueError, match="built outside it"):
        getattr(model, method)(X, Y)


@pytest.mark.parametrize("method", ["predict", "predict_on_batch"])
def test_model_built_outside_cannot_predict_inside(method, two_replicas):
    model = layers()
    with two_replicas.scope(), pytest.raises(ValueError, match="built outside it"):
        getattr(model, method)(X)


def test_model_of_one_strategy_cannot_be_trained_in_the_scope_of_another(
    two_replicas, other_strategy
):
    with two_replicas.scope():
        model = layers()
        model.compile("sgd", "mse")
    with other_strategy.scope(), pytest.raises(ValueError, match="another strategy"):
        model.fit(X, Y, verbose=0)


def test_model_made_of_layers_of_another_strategy_is_refused(two_replicas, other_strategy):
    with two_replicas.scope():
        foreign = keras.layers.Dense(1)
        foreign.build((None, 6))
    with other_strategy.scope():
        model = keras.Sequential([keras.Input((6,)), foreign])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"another strategy.*Build the model inside"):
        model.fit(X, Y, verbose=0)


def test_optimizer_of_another_strategy_is_refused(two_replicas, other_strategy):
    with other_strategy.scope():
        optimizer = keras.optimizers.SGD()
    with two_replicas.scope():
        model = layers()
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="another strategy"):
        model.fit(X, Y, verbose=0)


def test_scope_of_another_strategy_cannot_be_entered_inside_a_scope(two_replicas, other_strategy):
    with (
        two_replicas.scope(),
        pytest.raises(RuntimeError, match="inside the scope of another strategy"),
        other_strategy.scope(),
    ):
        pass


def test_model_cannot_be_fitted_inside_a_replica_program(two_replicas):
    with two_replicas.scope():
        model = layers()
        model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="must be called in cross-replica context"):
        two_replicas.run(lambda: model.fit(X, Y, verbose=0))


def test_run_cannot_be_called_inside_a_replica_program(two_replicas):
    with pytest.raises(RuntimeError, match=r"strategy\.run\(\) must be called in cross-replica"):
        two_replicas.run(lambda: two_replicas.run(lambda: 1.0))


def test_arrays_of_different_lengths_are_refused(two_replicas):
    with two_replicas.scope():
        model = layers()
        model.compile("sgd", "mse")

    def batches():
        yield X[:8], Y[:8]  # on the first batch Keras builds the model, with errors of its own
        yield X[:8], Y[:6]

    with pytest.raises(ValueError, match=r"same number of examples.*\(8, 6\), \(6, 1\)"):
        model.fit(batches(), verbose=0)


def test_scalar_in_a_batch_is_refused(two_replicas):
    with two_replicas.scope():
        model = layers()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="same number of examples"):
        model.train_on_batch(X, np.float32(1.0))


def test_failed_step_leaves_the_model_usable(two_replicas):
    with two_replicas.scope():
        model = layers()
        model.compile("sgd", "mse")

    def batches():
        yield X[:8], Y[:8]
        yield X[:8], Y[:6]

    with pytest.raises(ValueError, match="same number of examples"):
        model.fit(batches(), verbose=0)
    assert np.isfinite(model.fit(X, Y, verbose=0).history["loss"]).all()


def test_keras_on_another_backend_is_refused():
    program = run_program(
        "import sys, types\n"
        "sys.modules['keras'] = keras = types.ModuleType('keras')\n"
        "keras.backend = types.SimpleNamespace(backend=lambda: 'torch')\n"
        "import unison.keras\n"
    )
    assert "Expected: keras.backend.backend() == 'jax'. Received: 'torch'" in program.stderr


def test_keras_that_is_first_imported_in_a_scope_is_refused():
    program = run_program(
        "import unison\n"
        "with unison.MirroredStrategy(['CPU:0', 'CPU:1']).scope():\n"
        "    import keras\n",
        env={"UNISON_CPU_DEVICES": "2", "KERAS_BACKEND": "jax"},
    )
    assert program.returncode != 0
    assert "Import keras before the scope is entered" in program.stderr


# -- shapes of a replica's share -------------------------------------------------------------------


def trained_on_8_rows(strategy, model):
    model.compile("sgd", "mse")
    x, y = np.ones((8, 5, 3), "float32"), np.ones((8, 2), "float32")
    model.fit(x, y, batch_size=8, verbose=0)
    return model


def stateful(batch_size):
    inputs = keras.Input(batch_shape=(batch_size, 5, 3))
    return keras.Sequential([inputs, keras.layers.LSTM(2, stateful=True)])


class FixedReshape(keras.layers.Layer):
    """A layer that is made for batches of 8."""

    def call(self, x):
        return keras.ops.reshape(x, (8, 15))[:, :2]


@pytest.mark.parametrize(
    "make", [lambda: stateful(8), lambda: keras.Sequential([FixedReshape()])], ids=["rnn", "layer"]
)
def test_an_error_of_shapes_says_that_they_are_those_of_a_share(make, two_replicas):
    with two_replicas.scope(), pytest.raises((ValueError, TypeError)) as caught:
        trained_on_8_rows(two_replicas, make())
    notes = " ".join(caught.value.__notes__)
    assert "the batch of 8 rows is divided among 2 replicas" in notes
    assert "The batch: (8, 5, 3), (8, 2). The share: (4, 5, 3), (4, 2)." in notes


def test_an_error_that_does_not_speak_of_the_share_has_no_such_note(two_replicas):
    with two_replicas.scope():
        model = layers()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="incompatible") as caught:
        model.fit(np.ones((16, 5), "float32"), Y, verbose=0)
    assert "replica" not in " ".join(caught.value.__notes__)


def test_a_model_with_the_batch_size_of_a_share_is_trained(two_replicas):
    with two_replicas.scope():
        model = trained_on_8_rows(two_replicas, stateful(4))
    assert model.predict(np.ones((8, 5, 3), "float32"), batch_size=8, verbose=0).shape == (8, 2)
