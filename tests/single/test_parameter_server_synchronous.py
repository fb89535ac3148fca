"""Synchronous training on parameter servers; workers and servers are threads of this process."""

import threading
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from unison import VariableAggregation, VariableSynchronization
from unison.data import Dataset
from unison.parameter_server import FixedShardsPartitioner, current_worker_index

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype("float32")
Y = RNG.normal(size=(12, 1)).astype("float32")
IDS = RNG.integers(0, 30, (12, 3)).astype("int32")


def model_and_optimizer(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(100, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    optimizer.build(model.trainable_variables)
    return model, optimizer


def trained(strategy, make_optimizer, run):
    """Returns the weights after 3 steps, each on all 12 examples."""
    with strategy.scope():
        model, optimizer = model_and_optimizer(make_optimizer())

    def replica_step(ids, y):
        def loss_of(weights):
            predicted, _ = model.stateless_call(weights, [], ids)
            return ((predicted - y) ** 2).sum() / 12  # of the global batch

        weights = [variable.value for variable in model.trainable_variables]
        loss, gradients = jax.value_and_grad(loss_of)(weights)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = run(replica_step)
    return losses, [variable.numpy() for variable in model.trainable_variables]


def on_one_device(make_optimizer):
    strategy = unison.OneDeviceStrategy("CPU:0")

    def run(step):
        return [float(strategy.run(step, (IDS, Y))) for _ in range(3)]

    return trained(strategy, make_optimizer, run)


def on_servers(started, make_optimizer, **cluster):
    strategy, coordinator = started(workers=3, synchronous=True, **cluster)

    def own_part():
        part = slice(current_worker_index() or 0, None, 3)
        while True:
            yield IDS[part], Y[part]

    def run(step):
        iterator = iter(coordinator.create_per_worker_dataset(own_part))

        def scheduled(batches):
            return strategy.run(step, args=next(batches))

        values = [coordinator.schedule(scheduled, args=(iterator,)) for _ in range(3)]
        coordinator.join()
        return [float(strategy.reduce("SUM", value.fetch(), axis=None)) for value in values]

    return trained(strategy, make_optimizer, run)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
}


@pytest.mark.parametrize(("optimizer", "servers"), [("SGD", 2), ("Adam", 1), ("clipped", 2)])
def test_a_step_of_all_workers_equals_one_on_the_global_batch(started, optimizer, servers):
    partitioner = FixedShardsPartitioner(2) if optimizer == "SGD" else None
    make = OPTIMIZERS[optimizer]
    losses, weights = on_servers(started, make, servers=servers, partitioner=partitioner)
    expected_losses, expected = on_one_device(make)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    touched = np.unique(IDS) if optimizer == "Adam" else slice(None)  # other rows keep their slots
    np.testing.assert_allclose(weights[0][touched], expected[0][touched], rtol=1e-4, atol=1e-6)
    for own, other in zip(weights[1:], expected[1:], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_two_runs_give_the_same_bits(started):
    runs = [on_servers(started, OPTIMIZERS["Adam"], servers=2)[1] for _ in range(2)]
    for own, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(own, other)


#: What the third worker waits for. Workers are threads here, so that it reaches them.
MAY_GO_ON = threading.Event()


def powers_of_ten():
    worker = current_worker_index() or 0
    while True:
        if worker == 2:
            MAY_GO_ON.wait(30)
        yield np.float32(10.0**worker)


def test_the_slowest_workers_are_not_waited_for_and_what_they_push_late_is_dropped(started):
    strategy, coordinator = started(workers=3, synchronous=True, backup_workers=1)
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        total = unison.Variable(0.0, aggregation=VariableAggregation.SUM)
    MAY_GO_ON.clear()
    iterator = iter(coordinator.create_per_worker_dataset(powers_of_ten))

    def step(own):
        x = next(own)
        strategy.run(lambda x: total.assign_add(x), args=(x,))
        return x

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(5)]
    coordinator.join()
    assert float(total) == 5 * 11
    assert [float(x) for x in values[0].fetch().values] == [1.0, 10.0]
    MAY_GO_ON.set()
    while strategy.store.ask_all("status")[0]["repeated"] == 0:  # what has come too late
        time.sleep(0.01)
    coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    assert float(total) - 55 in (11, 101, 110)


def test_each_kind_of_variable_is_updated_as_its_annotation_says(started):
    strategy, coordinator = started(workers=3, synchronous=True)
    with strategy.scope():
        steps = unison.Variable(0)
        mean = unison.Variable(0.0, aggregation=VariableAggregation.MEAN)
        counted = unison.Variable(
            0.0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        first = unison.Variable(5.0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        dropout = keras.layers.Dropout(0.5, seed=1)

    def replica():
        worker = jnp.asarray(current_worker_index(), jnp.float32)
        steps.assign_add(1)
        mean.assign(worker)
        counted.assign_add(worker)
        first.assign(worker)
        return dropout(jnp.ones(64), training=True)

    values = [coordinator.schedule(lambda: strategy.run(replica)) for _ in range(2)]
    coordinator.join()
    assert (int(steps), float(mean), float(counted), float(first)) == (2, 1.0, 6.0, 0.0)
    masks = [mask for value in values for mask in value.fetch().values]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 6
    assert int(dropout.seed_generator.state.numpy()[1]) == 2


def test_what_workers_compute_apart_must_be_combined(started):
    strategy, coordinator = started(workers=2, synchronous=True)
    with strategy.scope():
        alone = unison.Variable(0.0, name="alone")
    coordinator.schedule(lambda: alone.assign_add(1.0 * current_worker_index()))
    with pytest.raises(ValueError, match=r"all together.*'alone'"):
        coordinator.join()


def test_fit_of_all_workers_equals_fit_on_one_device(started):
    def compiled():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
        )
        model.compile("adam", loss="mse", metrics=["mae"])
        return model

    with unison.OneDeviceStrategy("CPU:0").scope():
        model = compiled()
    whole = Dataset.from_tensor_slices((X, Y)).batch(12).repeat()
    expected = model.fit(whole, epochs=2, steps_per_epoch=3, verbose=0).history
    strategy, _ = started(workers=2, synchronous=True)
    with strategy.scope():
        on_servers = compiled()

    def own_part():
        part = slice(current_worker_index() or 0, None, 2)
        while True:
            yield X[part], Y[part]

    history = on_servers.fit(own_part, epochs=2, steps_per_epoch=3, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)
    for own, other in zip(on_servers.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)
    assert int(on_servers.optimizer.iterations.numpy()) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"synchronous": True, "max_staleness": 1}, "max_staleness has no meaning"),
        ({"backup_workers": 1}, "without synchronous=True"),
        ({"synchronous": True, "backup_workers": 2}, "from 0 to 1 backup_workers"),
    ],
)
def test_modes_that_exclude_each_other_are_refused(started, options, said):
    with pytest.raises(ValueError, match=said):
        started(workers=2, **options)
