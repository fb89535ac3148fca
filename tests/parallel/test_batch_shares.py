"""`batch_shares` on two workers, one of them slowed down: a smaller share, the same result.

The tests say nothing about times; `python -m benchmarks shares` measures them.
"""

import functools
import json

import numpy as np
import pytest

import unison
from parallel import programs
from unison.runtime import WorkerError
from warm_workers import launch

SECONDS = 200


def on_workers(shares, names):
    """Runs the named programs as a worker; each gets a strategy with the shares."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import unison
    from parallel import programs

    strategy = unison.MultiWorkerMirroredStrategy(batch_shares=shares)
    return {name: getattr(programs, name)(strategy) for name in names}


def launched(function, *args):
    return launch(function, 2, args, 1, timeout=SECONDS, on_line=lambda worker, line: None)


@functools.cache
def results_of_shares():
    return launched(on_workers, [3, 1], ["keras_fit", "custom_loop", "datasets"])


@functools.cache
def expected(name):
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"], batch_shares=[3, 1])
    return getattr(programs, name)(strategy)


@pytest.mark.parametrize("part", ["loss", "accuracy", "val_loss", "evaluate", "predict", "weights"])
def test_keras_trains_as_one_process_does(part):
    for result in results_of_shares():
        pairs = zip(result["keras_fit"][part], expected("keras_fit")[part], strict=True)
        for own, of_alone in pairs:
            np.testing.assert_allclose(np.array(own), np.array(of_alone), rtol=1e-5, atol=1e-6)


def test_a_custom_loop_trains_as_in_one_process():
    for result in results_of_shares():
        losses = result["custom_loop"]["losses"]
        np.testing.assert_allclose(losses, expected("custom_loop")["losses"], rtol=1e-5)


@pytest.mark.parametrize("part", ["steps", "rest", "loss", "weights"])
def test_datasets_are_divided_as_in_one_process(part):
    for result in results_of_shares():
        # Sums of floats, in another order.
        np.testing.assert_allclose(result["datasets"][part], expected("datasets")[part], rtol=1e-5)


def with_a_slow_worker():
    """Trains by measured shares; the second worker needs four times as long for an example."""
    import os
    import time

    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras
    import numpy as np

    import unison
    from unison.strategies import batch_shares

    strategy = unison.MultiWorkerMirroredStrategy(batch_shares="measured")
    batch_shares._FIRST_STEPS = 1
    seconds = 0.5e-3 * 4 ** jax.process_index()
    seen = []

    def sleep(rows):
        seen.append(len(rows))
        time.sleep(seconds * len(rows))
        return rows

    class Slow(keras.layers.Layer):
        def call(self, x):
            if not isinstance(x, jax.core.Tracer) or x.shape[0] is None:
                return x
            kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return x + 0 * jax.pure_callback(sleep, kind, jax.lax.stop_gradient(x))

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    history = model.fit(x, x.sum(1), batch_size=64, epochs=2, verbose=0, shuffle=False).history
    dataset = unison.data.Dataset.from_tensor_slices(x).batch(64)
    custom = strategy.experimental_distribute_dataset(dataset)
    return {
        "loss": history["loss"],
        "weights": [weight.tolist() for weight in model.get_weights()],
        "shares": strategy.batch_shares,
        "last step": seen[-1],
        "parts": [[len(part) for part in batch.values] for batch in custom],
    }


@functools.cache
def results_of_slow_worker():
    return json.loads(json.dumps(launched(with_a_slow_worker)))


def test_the_slow_worker_gets_the_smaller_share_on_both_workers():
    first, second = results_of_slow_worker()
    assert first["shares"] == second["shares"]
    assert first["shares"][0] > first["shares"][1]  # 4:1 where nothing else takes time


def test_the_replicas_compute_their_shares_only():
    first, second = results_of_slow_worker()
    counts = [first["last step"], second["last step"]]
    assert counts == [round(64 * share) for share in first["shares"]]
    assert first["parts"] == [[counts[0]]] * 4
    assert second["parts"] == [[counts[1]]] * 4


def test_measured_shares_train_as_one_device_does():
    import keras

    keras.utils.set_random_seed(0)
    with unison.OneDeviceStrategy("CPU:0").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    alone = model.fit(x, x.sum(1), batch_size=64, epochs=2, verbose=0, shuffle=False).history
    first, second = results_of_slow_worker()
    assert first["weights"] == second["weights"]
    np.testing.assert_allclose(first["loss"], alone["loss"], rtol=1e-5)
    for own, of_alone in zip(first["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(own, of_alone, rtol=1e-5, atol=1e-6)


def test_different_shares_on_two_workers_are_refused():
    def different():
        import json
        import os

        import unison

        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        unison.MultiWorkerMirroredStrategy(batch_shares=[3, 1 + index])

    with pytest.raises(WorkerError, match=r"the same batch_shares. Worker . has \[3, .\]"):
        launched(different)
