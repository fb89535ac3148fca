"""`unison.keras.TensorBoard`: what it writes, read back from its files."""

import gzip
import json
import struct
import sys

import keras
import numpy as np
import pytest

import unison
import unison.keras
import unison.train
from unison import compression
from unison.keras.tensorboard import skew

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")

STEPS = 6


def scalars(folder):
    """The numbers that were written into a folder, by name: by step."""
    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def fit(strategy, callback, epochs=2, compressed_by=None, **arguments):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(8 * STEPS, 32)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(40), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.01)
        if compressed_by is not None:
            unison.train.with_compression(optimizer, compressed_by)
        model.compile(optimizer, "mse")
    given = {"batch_size": 8, "epochs": epochs, "verbose": 0, **arguments}
    return model.fit(x, x[:, :1], callbacks=[callback], **given), model


@pytest.fixture
def strategy():
    return unison.MirroredStrategy(["CPU:0", "CPU:1"])


def test_it_writes_metrics_speed_and_bytes_of_each_epoch(tmp_path, strategy):
    history, model = fit(strategy, unison.keras.TensorBoard(tmp_path), validation_split=0.5)
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    losses = dict(enumerate(history.history["loss"]))
    assert train["epoch_loss"] == pytest.approx(losses)
    assert validation["epoch_loss"] == pytest.approx(dict(enumerate(history.history["val_loss"])))
    assert train["epoch_learning_rate"] == pytest.approx({0: 0.01, 1: 0.01})
    assert set(train["speed/step_milliseconds"]) == {0, 1}
    seconds = train["speed/step_milliseconds"][1] / 1000 * (STEPS // 2)
    assert train["speed/examples_per_second"][1] == pytest.approx(8 * (STEPS // 2) / seconds)
    assert 0 <= train["speed/input_wait"][1] <= 1
    # Of two replicas each sends all gradients once, and the sums that the loss is made of.
    gradients = 4 * sum(weight.size for weight in model.get_weights())
    for epoch in (0, 1):
        assert gradients <= train["communication/bytes_a_step"][epoch] <= gradients + 64
    assert "workers/skew_milliseconds" not in train


def test_an_evaluation_writes_its_metrics_by_the_step_as_keras_does(tmp_path, strategy):
    board = unison.keras.TensorBoard(tmp_path)
    data = np.ones((16, 32), "float32"), np.ones((16, 1), "float32")
    _, model = fit(strategy, keras.callbacks.Callback(), epochs=1)
    results = [
        model.evaluate(*data, batch_size=8, verbose=0, return_dict=True, callbacks=[board])
        for _ in range(2)
    ]
    written = scalars(tmp_path / "validation")
    assert set(written) == {"evaluation_loss_vs_iterations"}
    steps = written["evaluation_loss_vs_iterations"]
    assert steps == pytest.approx({STEPS: results[0]["loss"]})
    assert not (tmp_path / "train").exists()


def test_a_validation_within_fit_is_written_by_the_step_too(tmp_path, strategy):
    history, _ = fit(strategy, unison.keras.TensorBoard(tmp_path), validation_split=0.5)
    steps = scalars(tmp_path / "validation")["evaluation_loss_vs_iterations"]
    losses = history.history["val_loss"]
    assert steps == pytest.approx({STEPS // 2: losses[0], STEPS: losses[1]})


def test_it_writes_steps_where_it_is_asked_to(tmp_path, strategy):
    fit(strategy, unison.keras.TensorBoard(tmp_path, update_freq=4))
    assert set(scalars(tmp_path / "train")["batch_loss"]) == {4, 8, 12}


def test_steps_run_together_where_only_epochs_are_written(tmp_path):
    from unison.keras.progress import StepCallbacks

    def batch_hooks(callback):
        list_of_it = StepCallbacks.__new__(StepCallbacks)
        list_of_it.callbacks = [callback]
        return list_of_it._overriding("on_train_batch_begin", "on_train_batch_end")

    of_epochs = unison.keras.TensorBoard(tmp_path)
    of_steps = unison.keras.TensorBoard(tmp_path, update_freq="batch")
    assert batch_hooks(of_epochs) == []
    assert batch_hooks(of_steps) == [of_steps]


def test_a_compression_tells_what_it_saves_and_holds_back(tmp_path, strategy):
    _, model = fit(strategy, unison.keras.TensorBoard(tmp_path), 1, compression.sign(momentum=0))
    train = scalars(tmp_path / "train")
    sent, norm = unison.train.compression_report(model.optimizer)
    assert train["communication/bytes_a_step"][0] == pytest.approx(sent.bytes_sent)
    assert train["communication/bytes_saved_a_step"][0] == pytest.approx(sent.bytes_saved)
    assert train["communication/residual_norm"][0] == pytest.approx(norm)
    assert norm > 0


def test_profiled_steps_make_a_trace_and_the_times_of_its_regions(tmp_path, strategy):
    callback = unison.keras.TensorBoard(tmp_path, profile_batch=(3, 5))
    fit(strategy, callback, epochs=1)
    train = scalars(tmp_path / "train")
    for region in ("forward", "backward", "aggregate", "update"):
        assert train[f"profile/{region}_milliseconds"][5] > 0
    with gzip.open(tmp_path / "profile" / "trace.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert {"forward", "backward", "aggregate", "update"} <= set(names)


def test_a_training_shorter_than_what_is_profiled_ends_the_profile(tmp_path, strategy):
    fit(strategy, unison.keras.TensorBoard(tmp_path, profile_batch=(3, 500)), epochs=1)
    assert (tmp_path / "profile" / "trace.json.gz").exists()


def test_models_without_a_strategy_are_written_too(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(
        np.ones((8, 4)),
        np.ones((8, 1)),
        batch_size=4,
        verbose=0,
        callbacks=[unison.keras.TensorBoard(tmp_path)],
    )
    train = scalars(tmp_path / "train")
    assert set(train) >= {"epoch_loss", "speed/step_milliseconds", "speed/input_wait"}


def test_the_skew_is_that_of_the_steps_that_all_remember():
    assert skew([[9.0, 1.0, 2.0], [1.5, 2.5]]) == 0.5
    assert skew([[], [1.0]]) == 0.0


@pytest.mark.parametrize("arguments", [{"update_freq": 0}, {"update_freq": "step"}])
def test_it_says_how_often_it_can_write(arguments):
    with pytest.raises(ValueError, match=r'update_freq must be "epoch", "batch", or a number'):
        unison.keras.TensorBoard(**arguments)


@pytest.mark.parametrize("bounds", [(5, 3), (0, 2), -1, (1, 2, 3)])
def test_it_says_which_steps_it_can_profile(bounds):
    with pytest.raises(ValueError, match="profile_batch must be a step or the first and the last"):
        unison.keras.TensorBoard(profile_batch=bounds)


def test_it_names_the_package_that_is_missing(tmp_path, strategy, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'unison\[tensorboard\]'"):
        fit(strategy, unison.keras.TensorBoard(tmp_path))
