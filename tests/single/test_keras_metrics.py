"""Metrics are those of the whole data, however it was divided."""

import keras
import numpy as np
import pytest

from keras_comparison import assert_close, class_data, mirrored

# Batches of 16, 16 and 3: the last one leaves one of 4 replicas idle.
X, LABELS = class_data(35)
ONE_HOT = np.eye(3, dtype="float32")[LABELS]
WEIGHTS = np.random.default_rng(5).uniform(0.1, 2.0, size=35).astype("float32")

METRICS = [
    lambda: keras.metrics.AUC(name="auc"),
    lambda: keras.metrics.AUC(name="multi_label_auc", multi_label=True, num_labels=3),
    lambda: keras.metrics.Precision(name="precision"),
    lambda: keras.metrics.Recall(name="recall"),
    lambda: keras.metrics.F1Score(name="f1", average="macro"),
    lambda: keras.metrics.TopKCategoricalAccuracy(2, name="top2"),
    lambda: keras.metrics.OneHotMeanIoU(3, name="iou"),
    lambda: keras.metrics.CategoricalAccuracy(name="accuracy"),
    lambda: keras.metrics.R2Score(name="r2"),
    lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    lambda: keras.metrics.SensitivityAtSpecificity(0.5, name="sensitivity"),
]


def classifier():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(
        "sgd",
        "categorical_crossentropy",
        metrics=[make() for make in METRICS],
        weighted_metrics=[keras.metrics.MeanSquaredError(name="weighted_mse")],
    )
    return model


def results(model):
    return model.evaluate(
        X, ONE_HOT, sample_weight=WEIGHTS, batch_size=16, verbose=0, return_dict=True
    )


@pytest.fixture(scope="module")
def alone():
    return results(classifier())


@pytest.fixture(scope="module", params=[2, 4], ids="{}-replicas".format)
def together(request):
    with mirrored(request.param).scope():
        model = classifier()
    return results(model)


@pytest.mark.parametrize("name", [make().name for make in METRICS])
def test_metric_counts_every_example_once(name, alone, together):
    assert_close(together[name], alone[name])


def test_weighted_metric_weighs_every_example(alone, together):
    assert_close(together["weighted_mse"], alone["weighted_mse"])


def test_loss_weighs_every_example(alone, together):
    assert_close(together["loss"], alone["loss"])


def test_results_have_no_other_names_than_on_one_device(alone, together):
    assert list(together) == list(alone)


def test_states_of_keras_metrics_are_known_as_sums(two_replicas, caplog):
    with two_replicas.scope():
        results(classifier())
    assert "another way" not in caplog.text


def test_metrics_start_again_with_every_evaluation(two_replicas):
    with two_replicas.scope():
        model = classifier()
    assert_close(results(model), results(model))


def test_metrics_are_exchanged_by_compiling_again(two_replicas):
    x, y = X[:8], ONE_HOT[:8]
    with two_replicas.scope():
        model = classifier()
        model.compile("sgd", "mse", metrics=["mae"])
        model.evaluate(x, y, verbose=0)
        model.compile("sgd", "mse", metrics=["mse"])
    received = model.evaluate(x, y, verbose=0, return_dict=True)
    assert_close(received, {"loss": received["loss"], "mse": received["loss"]})


def test_metric_updated_in_a_replica_program_is_read_over_all_replicas(four_replicas):
    from unison import PerReplica

    with four_replicas.scope():
        mean = keras.metrics.Mean()
    four_replicas.run(mean.update_state, args=(PerReplica([np.float32(v) for v in (1, 2, 3, 10)]),))
    assert float(mean.result()) == 4.0


def test_mean_of_numbers_in_a_replica_program_counts_each_replica(four_replicas):
    from unison import PerReplica

    with four_replicas.scope():
        mean = keras.metrics.Mean()
    parts = PerReplica(
        [np.float32([1.0]), np.float32([2.0, 3.0]), np.float32([]), np.float32([6.0])]
    )
    four_replicas.run(mean.update_state, args=(parts,))
    assert float(mean.result()) == 3.0


def test_metric_can_be_reset_between_programs(two_replicas):
    with two_replicas.scope():
        mean = keras.metrics.Mean()
    two_replicas.run(mean.update_state, args=(5.0,))
    mean.reset_state()
    two_replicas.run(mean.update_state, args=(7.0,))
    assert float(mean.result()) == 7.0
