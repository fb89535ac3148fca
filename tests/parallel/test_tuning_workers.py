"""Two workers tune, profile and tell TensorBoard together."""

import functools
import gzip
import json

import numpy as np
import pytest

from warm_workers import launch

SECONDS = 150


def train(folder):
    """What a worker chooses, and its weights with and without."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    import unison
    import unison.keras
    import unison.tf
    from unison.strategies import tuning

    tuning._PACKS, tuning._ROUNDS = (2**20,), 2

    def weights_after_fit(strategy, callbacks=()):
        keras.utils.set_random_seed(1)
        x = np.random.default_rng(0).normal(size=(8 * 20, 64)).astype("float32")
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(x, x[:, :32], batch_size=8, verbose=0, callbacks=list(callbacks))
        return [np.asarray(weight).tolist() for weight in model.get_weights()]

    strategy = unison.MultiWorkerMirroredStrategy(
        communication_options=unison.CommunicationOptions(auto_tune=True, timeout_seconds=120)
    )
    tuned = weights_after_fit(strategy)
    chosen = strategy.communication_options
    seen = unison.keras.TensorBoard(folder, profile_batch=(3, 4))
    as_tensorflow = unison.tf.keras.callbacks.TensorBoard(f"{folder}/tf", profile_batch=(6, 7))
    told = weights_after_fit(strategy, [seen, as_tensorflow])
    return {
        "chosen": [chosen.method.name, chosen.bytes_per_pack, chosen.compresses],
        "settled": strategy.tuning.has_settled,
        "tuned": tuned,
        "told": told,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("board")


@functools.cache
def results(folder):
    return launch(train, 2, args=(str(folder),), timeout=SECONDS, on_line=lambda worker, line: None)


def test_workers_settle_for_the_same_way(folder):
    first, second = results(folder)
    assert first["settled"]
    assert second["settled"]
    assert first["chosen"] == second["chosen"]


def test_tuned_steps_train_as_others_and_leave_equal_weights(folder):
    first, second = results(folder)
    assert first["tuned"] == second["tuned"]
    for tuned, after in zip(first["tuned"], first["told"], strict=True):
        np.testing.assert_allclose(tuned, after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("board", [".", "tf"])
def test_the_workers_are_in_one_trace_on_one_clock(board, folder):
    results(folder)
    with gzip.open(folder / board / "profile" / "trace.json.gz") as file:
        said = json.load(file)
    events, workers = said["traceEvents"], said["metadata"]["workers"]
    assert [worker["worker"] for worker in workers] == [0, 1]
    # On one machine they have one clock.
    assert abs(workers[1]["clock_ahead_s"]) <= workers[1]["clock_error_s"] < 1
    spans = [
        [event["ts"] for event in events if event["pid"] == pid and event["name"] == "aggregate"]
        for pid in (0, 1)
    ]
    assert all(spans)
    assert max(map(min, spans)) < min(map(max, spans))  # at the same time


@pytest.mark.parametrize("board", [".", "tf"])
def test_one_worker_writes_what_tensorboard_reads(board, folder):
    results(folder)
    assert len(list((folder / board / "train").glob("events.out.tfevents.*"))) == 1
