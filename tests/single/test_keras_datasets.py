"""`fit`, `evaluate` and `predict` take datasets, with and without a strategy."""

import contextlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from keras_comparison import mirrored, regression_data
from unison.data import Dataset

# 23 examples in batches of 8: the last one has 7, which no number of replicas divides.
X, Y = regression_data(23)


def build():
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def batches():
    return Dataset.from_tensor_slices((X, Y)).batch(8)


def history(model, *args, **kwargs):
    return model.fit(*args, epochs=2, verbose=0, **kwargs).history


def assert_close(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, two[name], rtol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def expected():
    return history(build(), X, Y, batch_size=8, shuffle=False, validation_data=(X, Y))


def test_a_dataset_trains_as_its_arrays_do(expected):
    given = history(build(), batches(), validation_data=batches())
    assert given["loss"] == expected["loss"]
    assert_close(given, expected)


def test_a_dataset_of_the_face_trains_as_its_arrays_do(expected):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    assert_close(history(build(), dataset, validation_data=dataset), expected)


@pytest.mark.parametrize(
    ("replicas", "how"), [(4, "as it is"), (2, "distributed"), (4, "from a function")]
)
def test_a_dataset_trains_on_replicas_as_on_one_device_also_with_an_uneven_end(
    replicas, how, expected
):
    strategy = mirrored(replicas)
    with strategy.scope():
        model = build()
    dataset = batches()
    if how == "distributed":
        dataset = strategy.experimental_distribute_dataset(dataset)
    elif how == "from a function":
        dataset = strategy.distribute_datasets_from_function(
            lambda context: Dataset.from_tensor_slices((X, Y)).batch(8 // replicas)
        )
    assert_close(history(model, dataset, validation_data=dataset), expected)


def test_evaluate_and_predict_take_datasets(two_replicas):
    alone = build()
    with two_replicas.scope():
        model = build()
    for dataset in (batches(), two_replicas.experimental_distribute_dataset(batches())):
        np.testing.assert_allclose(
            model.evaluate(dataset, verbose=0), alone.evaluate(X, Y, verbose=0), rtol=1e-5
        )
    inputs = Dataset.from_tensor_slices(X).batch(8)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), alone.predict(X, verbose=0), rtol=1e-5
    )


def test_an_endless_dataset_goes_on_from_epoch_to_epoch():
    seen = []

    def note(x, y):
        seen.append(float(x[0, 0]))
        return x, y

    steps = history(build(), batches().repeat().map(note), steps_per_epoch=2)
    assert len(steps["loss"]) == 2
    # One batch is looked at to build the model.
    assert seen[1:] == [float(X[row, 0]) for row in (0, 8, 16, 0)]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, dataset: model.fit(dataset, verbose=0),
        lambda model, dataset: model.evaluate(dataset, verbose=0),
        lambda model, dataset: model.predict(dataset, verbose=0),
    ],
)
def test_an_endless_dataset_needs_a_number_of_steps(use):
    with pytest.raises(ValueError, match="is infinite: set the number of batches"):
        use(build(), batches().repeat())
    assert np.isfinite(build().evaluate(batches().repeat(), steps=2, verbose=0)).all()


def test_the_number_of_steps_is_known_from_the_first_epoch_on():
    class Steps(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.steps = self.params["steps"]

    callback = Steps()
    history(build(), batches(), callbacks=[callback])
    assert callback.steps == 3


def test_class_weights_weigh_the_examples_of_a_dataset():
    labels = np.greater(Y, np.median(Y)).astype("int32")
    weights = {0: 1.0, 1: 3.0}
    given = history(build(), Dataset.from_tensor_slices((X, labels)).batch(8), class_weight=weights)
    arrays = history(build(), X, labels, batch_size=8, shuffle=False, class_weight=weights)
    assert_close(given, arrays)


def test_class_weights_and_sample_weights_exclude_each_other():
    dataset = Dataset.from_tensor_slices((X, Y, np.ones(len(X), "float32"))).batch(8)
    with pytest.raises(ValueError, match="either class_weight, or a dataset with sample weights"):
        history(build(), dataset, class_weight={0: 1.0})


def test_sample_weights_come_with_the_dataset():
    weights = np.linspace(0, 2, len(X), dtype="float32")
    given = history(build(), Dataset.from_tensor_slices((X, Y, weights)).batch(8))
    arrays = history(build(), X, Y, sample_weight=weights, batch_size=8, shuffle=False)
    assert_close(given, arrays)


def test_targets_beside_a_dataset_are_refused():
    with pytest.raises(ValueError, match="its batches hold the targets: `y` must not be passed"):
        build().fit(batches(), Y, verbose=0)


def test_a_dataset_that_is_not_batched_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"Use dataset\.batch\(batch_size\)"):
        build().fit(Dataset.range(4), verbose=0)


def test_an_empty_dataset_is_an_error():
    with pytest.raises(ValueError, match="The dataset is empty: it yielded no batch"):
        build().evaluate(batches().take(0), verbose=0)


def test_named_inputs_come_as_dictionaries(two_replicas):
    def build_named():
        keras.utils.set_random_seed(1)
        inputs = {name: keras.Input((X.shape[1],), name=name) for name in ("left", "right")}
        output = keras.layers.Dense(1)(keras.layers.Add()(list(inputs.values())))
        model = keras.Model(inputs, output)
        model.compile("sgd", "mse")
        return model

    data = {"left": X, "right": 2 * X}
    expected = history(build_named(), data, Y, batch_size=8, shuffle=False)
    with two_replicas.scope():
        model = build_named()
    dataset = Dataset.from_tensor_slices((data, Y)).batch(8)
    assert_close(history(model, dataset), expected)


def test_normalization_adapts_to_a_dataset():
    layer = keras.layers.Normalization()
    layer.adapt(batches())
    np.testing.assert_allclose(np.ravel(layer.mean), X.mean(0), rtol=1e-5)


@pytest.mark.parametrize("first", ["keras", "the dataset"])
def test_keras_takes_datasets_whatever_is_imported_first(first):
    lines = [
        "from unison.data import Dataset; d = Dataset.from_tensor_slices(([[1.0]], [[2.0]]))",
        "import keras",
    ]
    program = [*(lines if first == "the dataset" else lines[::-1])]
    program += [
        "d = d.batch(1)",
        "m = keras.Sequential([keras.layers.Dense(1)]); m.compile('sgd', 'mse')",
        "print(len(m.fit(d, verbose=0).history['loss']))",
    ]
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (finished.returncode, finished.stdout.strip()) == (0, "1"), finished.stderr


def test_what_keras_took_before_it_takes_as_before():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X, Y

    assert np.isfinite(build().evaluate(Batches(), verbose=0)).all()
    assert np.isfinite(build().evaluate(X, Y, verbose=0)).all()
    with pytest.raises(ValueError, match="Unrecognized data type"):
        build().fit({X.shape}, verbose=0)


def test_a_dataset_of_one_strategy_does_not_keep_a_model_of_another_from_training(expected):
    dataset = mirrored(4).experimental_distribute_dataset(batches())
    with unison.OneDeviceStrategy("CPU:0").scope():
        model = build()
    assert_close(history(model, dataset, validation_data=dataset), expected)


# -- other sources, under every strategy -------------------------------------------------------


class Batches(keras.utils.PyDataset):
    """The three batches of the data."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


def generated():
    batches = Batches()
    return (batches[index] for index in range(len(batches)))


def of_grain():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(8).to_iter_dataset()


def of_torch():
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    return torch.utils.data.DataLoader(rows, batch_size=8)


SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": False},
    "a dataset": lambda: {"x": batches()},
    "a generator": lambda: {"x": generated()},
    "a PyDataset": lambda: {"x": Batches(workers=1), "shuffle": False},
    "Grain": lambda: {"x": of_grain()},
    "a dataset of Grain's": lambda: {"x": Dataset.from_source(of_grain())},
    "torch": lambda: {"x": of_torch()},
    "a dataset of torch's": lambda: {"x": Dataset.from_source(of_torch())},
    "a dataset of a generator": lambda: {"x": Dataset.from_generator(generated)},
}
STRATEGIES = {
    "none": lambda: None,
    "MirroredStrategy": lambda: mirrored(2),
    "OneDeviceStrategy": lambda: unison.OneDeviceStrategy("CPU:1"),
    "MultiWorkerMirroredStrategy": tf.distribute.MultiWorkerMirroredStrategy,
}


def built_under(strategy):
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        return build()


@pytest.fixture(scope="module")
def first_epoch():
    model = build()
    loss = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    return loss, model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X, verbose=0)


@pytest.mark.parametrize(
    ("strategy", "source"),
    [("MirroredStrategy", source) for source in SOURCES]
    + [("none", "a dataset of Grain's"), ("none", "a dataset of torch's")]
    + [("OneDeviceStrategy", source) for source in ("arrays", "a dataset", "a generator")]
    + [("MultiWorkerMirroredStrategy", source) for source in ("arrays", "a dataset")],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:Your `PyDataset` class should call")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_every_strategy_takes_every_source(strategy, source, first_epoch):
    model = built_under(STRATEGIES[strategy]())
    loss, metrics, outputs = first_epoch
    trained = model.fit(**SOURCES[source](), verbose=0).history["loss"]
    np.testing.assert_allclose(trained, loss, rtol=2e-5)
    if strategy == "MirroredStrategy":
        again = {key: value for key, value in SOURCES[source]().items() if key != "shuffle"}
        np.testing.assert_allclose(model.evaluate(**again, verbose=0), metrics, rtol=2e-5)
        again = {**SOURCES[source](), "y": None, "shuffle": None}
        given = {key: value for key, value in again.items() if value is not None}
        np.testing.assert_allclose(model.predict(**given, verbose=0), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["MirroredStrategy", "OneDeviceStrategy"])
@pytest.mark.parametrize("use", ["fit", "evaluate", "predict"])
def test_distributed_datasets_that_are_empty_or_endless_are_errors(strategy, use):
    strategy = STRATEGIES[strategy]()
    model = built_under(strategy)
    endless = strategy.experimental_distribute_dataset(batches().filter(lambda *_: True).repeat())
    with pytest.raises(ValueError, match="The dataset is infinite: set the number of batches"):
        getattr(model, use)(endless, verbose=0)
    empty = strategy.experimental_distribute_dataset(batches().filter(lambda *_: False))
    with pytest.raises(ValueError, match="The dataset is empty: it yielded no batch"):
        getattr(model, use)(empty, verbose=0)


@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_arrays_without_an_example_are_an_error(use):
    with pytest.raises(ValueError, match=r"The data is empty: it yields no batch.*ndarray"):
        getattr(build(), use)(X[:0], Y[:0], verbose=0)


def test_elements_of_too_many_components_are_an_error_that_shows_them():
    dataset = Dataset.from_tensor_slices((X, X, X, Y)).batch(8)
    with pytest.raises(ValueError, match=r"\(x, y, sample_weight\). Received elements of 4"):
        build().fit(dataset, verbose=0)


def test_examples_of_another_shape_are_an_error_that_shows_both(two_replicas):
    model = built_under(two_replicas)
    dataset = Dataset.from_tensor_slices((X[:, 1:], Y)).batch(8)
    with pytest.raises(ValueError, match=r"expected axis -1 .* value 6.*shape \(8, 5\)"):
        model.fit(dataset, verbose=0)
