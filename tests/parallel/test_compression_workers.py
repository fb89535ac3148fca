"""Gradients that are compressed between processes are those of one process."""

import numpy as np
import pytest

from warm_workers import launch

SECONDS = 100
METHODS = ("int8", "powersgd")


def train(methods, implementation=None):
    """What every worker's weights are after a few steps, compressed by each method."""
    import keras
    import numpy as np

    import unison
    import unison.train

    if implementation is None:
        strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        options = unison.CommunicationOptions(implementation=implementation)
        strategy = unison.MultiWorkerMirroredStrategy(communication_options=options)
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((64, 32)).astype("float32")
    weights = {}
    for method in methods:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((32,)), *layers])
            compression = getattr(unison.compression, method)()
            optimizer = unison.train.with_compression(keras.optimizers.SGD(0.05), compression)
            model.compile(optimizer, "mse")
        model.fit(x, x[:, :1] * 2, batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights[method] = [weight.tolist() for weight in model.get_weights()]
    return weights


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_workers_train_as_one_process_does(implementation):
    methods = METHODS if implementation == "AUTO" else METHODS[:1]
    alone = train(methods)
    quiet = {"on_line": lambda worker, line: None, "timeout": SECONDS}
    first, second = launch(train, 2, args=(methods, implementation), **quiet)
    assert first == second
    for method in methods:
        # Sums of the network are rounded in another order, which a code may turn into a step of
        # its scale: 1/127 of the largest gradient, times the learning rate.
        tolerance = 2e-3 if method == "int8" else 1e-5
        for own, expected in zip(first[method], alone[method], strict=True):
            np.testing.assert_allclose(own, expected, atol=tolerance)
