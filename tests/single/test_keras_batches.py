"""Whatever the size of a batch and the kind of a model, every example counts exactly once."""

import keras
import numpy as np
import pytest

from keras_comparison import (
    assert_same_outcome,
    on_four_replicas,
    regression_data,
    run_training,
    run_training_under,
)


def sequential():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )


def functional():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    joined = keras.layers.Concatenate()([inputs, hidden])
    return keras.Model(inputs, keras.layers.Dense(1)(joined))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


def sequential_without_input():
    return keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def compiled(model, optimizer="adam"):
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


# With 4 replicas a batch of 16 gives each of them 4 examples; 3 leave one idle, 1 leaves three.
@pytest.mark.parametrize(
    ("examples", "batch_size"),
    [(32, 16), (35, 16), (33, 16), (18, 9), (3, 16), (6, 2)],
    ids=[
        "even",
        "last batch of 3",
        "last batch of 1",
        "first batch uneven",
        "only batch smaller than it should be",
        "batches of 2",
    ],
)
def test_every_example_counts_once(examples, batch_size, assert_trains_as_alone):
    x, y = regression_data(examples)
    assert_trains_as_alone(
        lambda: compiled(sequential()),
        lambda model: model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0),
    )


@on_four_replicas
@pytest.mark.parametrize(
    "kind", [functional, Subclassed, sequential_without_input], ids=lambda kind: kind.__name__
)
def test_kind_of_model_trains_as_on_one_device(kind, assert_trains_as_alone):
    x, y = regression_data(35)
    assert_trains_as_alone(
        lambda: compiled(kind()),
        lambda model: model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0),
    )


@on_four_replicas
def test_an_input_without_features_trains_as_on_one_device(assert_trains_as_alone):
    def build():
        inputs = [keras.Input((0,)), keras.Input((6,))]
        joined = keras.layers.Concatenate()(inputs)
        return compiled(keras.Model(inputs, keras.layers.Dense(1)(joined)))

    x, y = regression_data(35)
    nothing = np.zeros((35, 0), "float32")
    assert_trains_as_alone(
        build, lambda model: model.fit([nothing, x], y, batch_size=16, epochs=2, verbose=0)
    )


@on_four_replicas
def test_model_that_is_built_on_an_uneven_batch_trains_as_on_one_device(assert_trains_as_alone):
    x, y = regression_data(5)
    assert_trains_as_alone(
        lambda: compiled(Subclassed()),
        lambda model: model.fit(x, y, batch_size=5, epochs=2, verbose=0, shuffle=False),
    )


@on_four_replicas
def test_shuffled_epochs_see_the_order_of_one_device(assert_trains_as_alone):
    x, y = regression_data(35)
    assert_trains_as_alone(
        lambda: compiled(sequential()),
        lambda model: model.fit(x, y, batch_size=16, epochs=2, verbose=0),
    )


@on_four_replicas
def test_steps_per_execution_change_nothing(assert_trains_as_alone):
    x, y = regression_data(83)

    def build():
        model = sequential()
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=4)
        return model

    assert_trains_as_alone(
        build, lambda model: model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    )


@on_four_replicas
def test_gradients_accumulated_over_uneven_batches_are_those_of_one_device(assert_trains_as_alone):
    x, y = regression_data(35)
    assert_trains_as_alone(
        lambda: compiled(sequential(), keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)),
        lambda model: model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0),
    )


@on_four_replicas
def test_validation_data_are_evaluated_as_on_one_device(assert_trains_as_alone):
    x, y = regression_data(35)
    held_out = regression_data(19, seed=1)
    assert_trains_as_alone(
        lambda: compiled(sequential()),
        lambda model: model.fit(
            x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_data=held_out
        ),
    )


@on_four_replicas
def test_validation_split_is_evaluated_as_on_one_device(assert_trains_as_alone):
    x, y = regression_data(50)
    assert_trains_as_alone(
        lambda: compiled(sequential()),
        lambda model: model.fit(
            x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_split=0.3
        ),
    )


class Batches(keras.utils.PyDataset):
    """Batches of 12, 12 and 7 examples."""

    def __init__(self):
        super().__init__()
        self.x, self.y = regression_data(31)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(12 * index, 12 * index + 12)
        return self.x[rows], self.y[rows]


@on_four_replicas
def test_py_dataset_trains_as_on_one_device(assert_trains_as_alone):
    assert_trains_as_alone(
        lambda: compiled(sequential()),
        lambda model: model.fit(Batches(), epochs=2, shuffle=False, verbose=0),
    )


def test_generator_of_changing_batches_trains_as_on_one_device(four_replicas):
    x, y = regression_data(40)

    def batches():
        for rows in (slice(0, 16), slice(16, 21), slice(21, 23), slice(23, 40)):
            yield x[rows], y[rows]

    def train(model):
        return model.fit(batches(), epochs=1, verbose=0)

    def build():
        return compiled(sequential())

    assert_same_outcome(run_training_under(four_replicas, build, train), run_training(build, train))


@on_four_replicas
def test_fit_goes_on_where_an_earlier_fit_ended(assert_trains_as_alone):
    x, y = regression_data(35)

    def train(model):
        arguments = {"batch_size": 16, "shuffle": False, "verbose": 0}
        first = model.fit(x, y, epochs=1, **arguments).history
        return first, model.fit(x, y, initial_epoch=1, epochs=3, **arguments).history

    assert_trains_as_alone(lambda: compiled(sequential()), train)


def test_fit_inside_the_scope_is_fit_outside_it(two_replicas):
    x, y = regression_data(19)

    def build():
        return compiled(sequential())

    def train(model):
        return model.fit(x, y, batch_size=8, shuffle=False, verbose=0)

    def train_inside(model):
        with two_replicas.scope():
            return train(model)

    inside = run_training_under(two_replicas, build, train_inside)
    outside = run_training_under(two_replicas, build, train)
    np.testing.assert_equal(inside.weights, outside.weights)
    assert inside.result == outside.result


def test_model_compiled_outside_the_scope_trains_as_on_one_device(two_replicas):
    x, y = regression_data(19)

    def build_in_scope():
        with two_replicas.scope():
            model = sequential()
        return compiled(model)

    def train(model):
        return model.fit(x, y, batch_size=8, shuffle=False, verbose=0)

    together = run_training(build_in_scope, train)
    assert_same_outcome(together, run_training(lambda: compiled(sequential()), train))


@on_four_replicas
def test_model_compiled_again_takes_the_new_optimizer(assert_trains_as_alone):
    x, y = regression_data(35)

    def train(model):
        arguments = {"batch_size": 16, "shuffle": False, "verbose": 0}
        first = model.fit(x, y, **arguments).history
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mae")
        return first, model.fit(x, y, **arguments).history

    assert_trains_as_alone(lambda: compiled(sequential()), train)


def test_frozen_layer_stays_bit_equal(two_replicas):
    with two_replicas.scope():
        model = sequential()
        model.layers[0].trainable = False
        compiled(model)
    before = model.layers[0].get_weights()
    model.fit(*regression_data(19), batch_size=8, verbose=0)
    np.testing.assert_equal(model.layers[0].get_weights(), before)


@on_four_replicas
def test_layer_frozen_between_two_fits_trains_as_on_one_device(assert_trains_as_alone):
    x, y = regression_data(35)

    def train(model):
        arguments = {"batch_size": 16, "shuffle": False, "verbose": 0}
        first = model.fit(x, y, **arguments).history
        model.layers[0].trainable = False
        compiled(model)
        return first, model.fit(x, y, **arguments).history

    assert_trains_as_alone(lambda: compiled(sequential()), train)
