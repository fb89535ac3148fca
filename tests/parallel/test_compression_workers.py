"""Gradients that are compressed between processes are those of one process."""

import numpy as np
import pytest

from warm_workers import launch

SECONDS = 200

#: How far weights may be from those of one process. Sums of the network are rounded in another
#: order, which a code may turn into a step of its scale.
TOLERANCES = {
    "int8": 2e-3,
    "int8 after a warm-up": 2e-3,
    "sign": 1e-5,
    "topk": 1e-5,
    "powersgd": 1e-5,
    "local_sgd": 1e-5,
    "diloco": 1e-5,
}


def train(names, implementation=None):
    """What every worker's weights are after a few steps, compressed by each method."""
    import keras
    import numpy as np

    import unison
    import unison.train
    from unison import compression

    methods = {
        "int8": compression.int8(),
        "int8 after a warm-up": compression.int8(warmup_steps=5),
        "sign": compression.sign(),
        "topk": compression.topk(0.1, clipnorm=1.0, warmup_steps=1, ramp_steps=3),
        "powersgd": compression.powersgd(),
        "local_sgd": compression.local_sgd(3),
        "diloco": compression.diloco(3),
    }
    if implementation is None:
        strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        options = unison.CommunicationOptions(implementation=implementation)
        strategy = unison.MultiWorkerMirroredStrategy(communication_options=options)
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((64, 32)).astype("float32")
    weights = {}
    for name in names:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((32,)), *layers])
            sgd = unison.train.with_compression(keras.optimizers.SGD(0.05), methods[name])
            model.compile(sgd, "mse")
        # Eight steps: the replicas that train apart are apart at the end.
        model.fit(x, x[:, :1] * 2, batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights[name] = [weight.tolist() for weight in model.get_weights()]
    return weights


@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_workers_train_as_one_process_does(implementation):
    names = list(TOLERANCES) if implementation == "AUTO" else ["int8"]
    alone = train(names)
    first, second = launch(
        train,
        2,
        args=(names, implementation),
        devices_per_worker=1,  # what a sign says, and what is largest, depends on the division
        on_line=lambda worker, line: None,
        timeout=SECONDS,
    )
    assert first == second
    for name in names:
        for own, expected in zip(first[name], alone[name], strict=True):
            np.testing.assert_allclose(own, expected, atol=TOLERANCES[name], err_msg=name)
