"""Outside scopes, Keras is Keras."""

import keras
import numpy as np
import pytest

import unison.keras
from keras_comparison import mirrored, regression_data, run_training

X, Y = regression_data(19)

TOUCHED_IN_SCOPES = [
    (keras.Model, "__new__"),
    (keras.Model, "compile"),
    (keras.Model, "fit"),
    (keras.Model, "evaluate"),
    (keras.Model, "predict"),
    (keras.Model, "train_on_batch"),
    (keras.Variable, "__init__"),
    (keras.optimizers.Optimizer, "__init__"),
    (keras.metrics.Mean, "__init__"),
    (keras.layers.BatchNormalization, "__new__"),
    (keras.layers.BatchNormalization, "__init__"),
]


def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def train(model):
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("owner", "name"), TOUCHED_IN_SCOPES, ids=lambda value: getattr(value, "__name__", value)
)
def test_attribute_is_the_same_object_after_a_scope(owner, name, two_replicas):
    before = owner.__dict__.get(name), getattr(owner, name)
    with two_replicas.scope():
        build()
    assert owner.__dict__.get(name) is before[0]
    assert getattr(owner, name) is before[1]


def test_attribute_is_the_same_object_after_an_error_in_a_scope(two_replicas):
    before = keras.Model.__dict__["__new__"] if "__new__" in vars(keras.Model) else None
    with pytest.raises(ZeroDivisionError), two_replicas.scope():
        1 / 0  # noqa: B018
    assert vars(keras.Model).get("__new__") is before


def test_model_built_after_a_scope_trains_bit_for_bit_as_before():
    before = run_training(build, train)
    with mirrored(2).scope():
        train(build())
    after = run_training(build, train)
    assert after.result == before.result
    np.testing.assert_equal(after.weights, before.weights)


def test_model_built_outside_scopes_has_variables_of_kerass_own_class(two_replicas):
    with two_replicas.scope():
        build()
    assert {type(variable) for variable in build().variables} == {keras.Variable}


def test_batch_normalization_that_is_not_synchronized_stays_kerass_own(two_replicas):
    with two_replicas.scope():
        layer = keras.layers.BatchNormalization()
    assert not isinstance(layer, unison.keras.BatchNormalization)
