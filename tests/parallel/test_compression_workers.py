"""Gradients that are compressed between processes are those of one process."""

import numpy as np
import pytest

from unison.runtime import launch

SECONDS = 100


def train(method, implementation=None):
    """What every worker's weights are after a few compressed steps."""
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
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        compression = getattr(unison.compression, method)()
        optimizer = unison.train.with_compression(keras.optimizers.SGD(0.05), compression)
        model.compile(optimizer, "mse")
    model.fit(x, x[:, :1] * 2, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return [weight.tolist() for weight in model.get_weights()]


@pytest.mark.parametrize(
    ("method", "implementation"), [("int8", "AUTO"), ("int8", "RING"), ("powersgd", "AUTO")]
)
def test_workers_train_as_one_process_does(method, implementation):
    alone = train(method)
    quiet = {"on_line": lambda worker, line: None, "timeout": SECONDS}
    first, second = launch(train, 2, args=(method, implementation), **quiet)
    assert first == second
    for own, expected in zip(first, alone, strict=True):
        # Sums of the network are rounded in another order, which a code may turn into a step of
        # its scale: 1/127 of the largest gradient, times the learning rate.
        np.testing.assert_allclose(own, expected, atol=2e-3 if method == "int8" else 1e-5)
