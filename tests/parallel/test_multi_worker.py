"""`MultiWorkerMirroredStrategy` on several workers: what one process with the same replicas gives.

The programs are in `programs.py`.
"""

import functools
import json
import os

import numpy as np
import pytest

import unison
from keras_forms import FORMS, IMPORTED
from parallel import programs
from unison.runtime import WorkerError
from warm_workers import launch

SECONDS = 100


@functools.cache
def results_of(name: str, workers: int, devices: int, form: str | None = None) -> list:
    """What every worker's program returns, in a form in which Keras comes to it."""
    return launch(
        programs.on_workers,
        workers,
        args=(name, form) if form else (name,),
        imported=IMPORTED[form or "keras"],
        devices_per_worker=devices,
        timeout=SECONDS,
        on_line=lambda worker, line: None,
    )


@functools.cache
def expected(name: str, replicas: int) -> dict:
    """What the program returns in this process."""
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    return getattr(programs, name)(strategy)


@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (3, 1), (2, 2)])
def test_replica_programs_give_what_one_process_gives(workers, devices):
    alone = expected("replica_programs", workers * devices)
    for result in results_of("replica_programs", workers, devices):
        assert json.loads(json.dumps(result)) == json.loads(json.dumps(alone))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", ["loss", "accuracy", "val_loss", "evaluate", "predict", "weights"])
def test_keras_trains_as_one_process_does(part, form):
    alone = expected("keras_fit", 2)[part]
    # The same programs, whose sums go over the wire: round-off of float32 is all that may differ.
    for result in results_of("keras_fit", 2, 1, form):
        for own, of_alone in zip(_arrays(result[part]), _arrays(alone), strict=True):
            np.testing.assert_allclose(own, of_alone, rtol=1e-5, atol=1e-6)


def _arrays(value):
    return [np.array(part) for part in value]


@pytest.mark.smoke
def test_a_custom_loop_trains_as_in_one_process():
    alone = expected("custom_loop", 2)
    for result in results_of("custom_loop", 2, 1):
        assert result["late"] == alone["late"]
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-5)


def test_predictions_of_a_shuffled_dataset_have_each_example_once():
    for result in results_of("predict_shuffled", 2, 1):
        assert result == [float(number) for number in range(20)]


def test_a_worker_that_raises_ends_the_job_at_once():
    def fail():
        import jax

        import unison

        strategy = unison.MultiWorkerMirroredStrategy()
        if jax.process_index() == 1:
            raise ValueError("one is unwell")
        strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None)

    # JAX would wait for five minutes.
    with pytest.raises(WorkerError, match=r"(?s)worker 1 failed.*one is unwell"):
        launch(fail, workers=2, timeout=120, on_line=lambda *line: None)


def test_components_of_several_dtypes_are_refused_on_all_workers():
    def mixed():
        import unison

        strategy = unison.MultiWorkerMirroredStrategy()
        kinds = [np.int32, np.float32]
        value = strategy.experimental_distribute_values_from_function(
            lambda context: kinds[context.replica_id_in_sync_group](1)
        )
        strategy.reduce("SUM", value, axis=None)

    with pytest.raises(WorkerError, match="must have one rank and one dtype"):
        launch(mixed, 2, (), 1, timeout=SECONDS, on_line=lambda *line: None)


def test_workers_hold_bit_equal_weights():
    first, second = results_of("keras_fit", 2, 1)
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("part", ["steps", "rest", "loss", "weights"])
def test_datasets_are_divided_as_in_one_process(part):
    alone = expected("datasets", 4)[part]
    for result in results_of("datasets", 2, 2):
        # Sums of floats, in another order.
        np.testing.assert_allclose(result[part], alone, rtol=1e-5)


def test_every_line_of_every_file_is_seen_once():
    first, second = results_of("files", 2, 1)
    assert first == second
    of_files, of_functions = first
    numbers = sorted(number for step in of_files for number in step)
    assert numbers == [0, 1, 2, *range(100, 107), 200]
    numbers = sorted(number for step in of_functions for number in step)
    assert numbers == sorted([*range(5), *range(8)])


def test_all_workers_start_with_the_first_ones_values():
    first, second = results_of("initial_values", 2, 1)
    assert first == second
    assert first[0] == [5.0, 5.0, 5.0]


def looking():
    """Small steps, of which the workers look at others, and at another pace."""
    import time

    import jax
    import keras

    import unison

    index = jax.process_index

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.002)

    strategy = unison.MultiWorkerMirroredStrategy()

    def batches():
        for step in range(60):
            time.sleep(0.01 * index())
            yield np.full((64, 32), step % 5, np.float32), np.ones((64, 1), np.float32)

    with strategy.scope():
        layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile("adam", "mse", metrics=["mae"])
    losses = []
    for verbose, callbacks in ((2, []), (2 * (1 - index()), []), (0, [Looks()] * index())):
        history = model.fit(
            unison.data.Dataset.from_generator(batches),
            epochs=2,
            verbose=verbose,
            callbacks=callbacks,
        )
        losses += history.history["loss"]
    return losses


def test_workers_may_look_at_different_steps():
    first, second = launch(looking, 2, timeout=SECONDS, on_line=lambda *line: None)
    assert first == second
    assert len(first) == 6


def diverging(is_keras):
    """Gives worker 1 another value than worker 0, and runs steps that look."""
    import jax
    import keras

    import unison

    strategy = unison.MultiWorkerMirroredStrategy(check_every=2)
    with strategy.scope():
        fine = unison.Variable(np.float32(1.0), name="fine")
        spoilt = unison.Variable(np.float32(1.0), name="spoilt")
        model = keras.Sequential([keras.layers.Dense(1, name="layer")])
        model.compile("sgd", "mse")
        model.build((None, 2))
    if is_keras:
        model.layers[0].bias.assign([float(jax.process_index())])
        model.fit(np.ones((12, 2)), np.ones((12, 1)), batch_size=2, verbose=0)
    strategy.run(lambda: fine.value())
    spoilt.assign(jax.process_index())
    strategy.run(lambda: fine.value())


@pytest.mark.parametrize(
    ("is_keras", "said"),
    [
        (False, "After step 2, variable 'spoilt'"),
        (True, "After step 2, variable 'sequential/layer/bias'"),
    ],
)
def test_the_first_variable_that_differs_is_named(is_keras, said):
    message = f"{said} differs between worker 0 and worker 1"
    with pytest.raises(WorkerError, match=message):
        launch(diverging, 2, args=(is_keras,), timeout=SECONDS, on_line=lambda *line: None)


def test_a_worker_that_never_comes_is_named():
    def wait_for_another():
        import unison
        from unison.runtime.cluster import ClusterSpec
        from unison.runtime.cluster_resolvers import SimpleClusterResolver

        (own,) = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        cluster = ClusterSpec({"worker": [own, "127.0.0.1:1"]})
        resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=0)
        options = unison.CommunicationOptions(timeout_seconds=2)
        unison.MultiWorkerMirroredStrategy(resolver, options)

    missing = r"Timed out waiting for workers: \['worker 1 \(127.0.0.1:1\)'\]"
    with pytest.raises(WorkerError, match=missing):
        launch(wait_for_another, workers=1, timeout=SECONDS, on_line=lambda *line: None)


def test_jax_must_not_have_started():
    def early():
        import jax

        import unison

        jax.devices()
        unison.MultiWorkerMirroredStrategy()

    with pytest.raises(WorkerError, match="Create the strategy before the first JAX computation"):
        launch(early, workers=2, timeout=SECONDS, on_line=lambda *line: None)
