"""What workers push and pull in fewer bits; workers and servers are threads of this process."""

import jax
import numpy as np
import pytest

import unison
from unison import compression
from unison.parameter_server import FixedShardsPartitioner
from unison.parameter_server.compressed import encoded, encoding_for, received, sent

RNG = np.random.default_rng(0)
TARGET = RNG.normal(size=(128, 64)).astype("float32")
#: Orthogonal: what is multiplied by it has to be known whole, and is as long as before.
ROTATION = np.linalg.qr(RNG.normal(size=(64, 64)))[0].astype("float32")


def trained(started, steps=20, **options):
    """Returns the distance from the target, and the bytes on the wire of each later step."""
    strategy, coordinator = started(**options)
    with strategy.scope():
        weights = unison.Variable(np.zeros((128, 64), np.float32))

    def step():
        def replica():
            def loss_of(values):
                return ((values @ ROTATION - TARGET) ** 2).sum() / 2

            gradient = jax.grad(loss_of)(weights.value())
            if strategy.num_replicas_in_sync > 1:
                gradient = unison.get_replica_context().all_reduce("MEAN", gradient)
            weights.assign_sub(0.5 * gradient)

        strategy.run(replica)

    def traffic():
        answers = strategy.store.ask_all("status").values()
        return sum(answer["sent_bytes"] + answer["received_bytes"] for answer in answers)

    def run():
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()

    coordinator.schedule(step)
    coordinator.join()
    before = traffic()
    run()
    moved = (traffic() - before) / steps
    return np.abs(weights.numpy() @ ROTATION - TARGET).max(), moved


@pytest.mark.parametrize(
    ("method", "share", "error"),
    [
        (compression.bfloat16(), 0.5, 0.05),
        (compression.float16(), 0.5, 0.01),
        (compression.int8(), 0.26, 0.2),
        (compression.int4(), 0.15, 2.0),
    ],
)
def test_the_wire_carries_the_small_type(started, method, share, error):
    off, moved = trained(started, compression=method)
    assert off < error
    # Gradients there, variables back, and a few hundred bytes that say what they are.
    assert moved < 2 * share * TARGET.nbytes + 4000
    assert moved > 2 * (share * 0.8) * TARGET.nbytes


def test_shards_and_steps_of_several_workers_are_compressed_alike(started):
    for options in (
        {"servers": 2, "partitioner": FixedShardsPartitioner(2)},
        {"workers": 2, "synchronous": True},
    ):
        off, _ = trained(started, compression=compression.bfloat16(), **options)
        assert off < 0.05


def test_rows_of_a_table_are_compressed(started):
    strategy, coordinator = started(compression=compression.int8())
    with strategy.scope():
        table = unison.Variable(np.ones((500, 8), np.float32))

    def step(ids):
        gradient = jax.grad(lambda values: (values[ids] ** 2).sum())(table.value())
        table.assign_sub(0.25 * gradient)

    for _ in range(2):
        coordinator.schedule(step, args=(np.array([3, 400, 3]),))
    coordinator.join()
    value = table.numpy()
    np.testing.assert_allclose(value[3], 0, atol=0.02)
    np.testing.assert_allclose(value[400], 0.25, atol=0.02)
    assert np.all(np.delete(value, [3, 400], axis=0) == 1)


def test_small_variables_travel_as_they_are(started):
    strategy, coordinator = started(compression=compression.int4())
    with strategy.scope():
        total = unison.Variable(0.0)
    for x in (0.123, 45.6, 0.001):
        coordinator.schedule(lambda x: total.assign_add(x), args=(x,))
    coordinator.join()
    assert float(total) == np.float32(0.123) + np.float32(45.6) + np.float32(0.001)


@pytest.mark.parametrize("by_rows", [False, True])
def test_rounding_by_chance_is_exact_in_expectation(by_rows):
    rng = np.random.default_rng(1)
    array = rng.normal(size=(64, 40)).astype("float32")
    encoding = encoding_for(compression.int8(), "kernel", array, by_rows)
    np.testing.assert_allclose(received(sent(array, encoding), encoding), array, atol=0.02)
    # Other last bits draw other chances.
    errors = [
        received(np.asarray(encoded(near, encoding, is_stochastic=True)), encoding) - near
        for near in (array * (1 + 1e-6 * k) for k in range(200))
    ]
    assert np.abs(np.mean(errors, axis=0)).max() < 0.3 * np.abs(errors).max()


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (compression.int8(error_feedback=True), ValueError),
        (compression.topk(), ValueError),
        (compression.bfloat16(warmup_steps=3), ValueError),
        ("int8", TypeError),
    ],
)
def test_what_needs_state_on_workers_is_refused(started, method, error):
    with pytest.raises(error, match="Received"):
        started(compression=method)
