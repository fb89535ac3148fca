"""A loop of one's own goes on under another number of replicas as if it had not been stopped."""

import jax.numpy as jnp
import keras
import numpy as np

import unison
import unison.data
from keras_comparison import mirrored
from unison.train import Checkpoint, CheckpointManager

MEAN = unison.VariableAggregation.MEAN
SUM = unison.VariableAggregation.SUM
ON_READ = unison.VariableSynchronization.ON_READ


def loop(replicas, folder, steps, seed):
    """Takes steps of a loop of one's own, from the last checkpoint of a folder; returns losses.

    The loop has all that has a state: weights, an optimizer's slots, statistics and a metric of all
    replicas, random numbers, and a place in a shuffled dataset.
    """
    strategy = mirrored(replicas)
    with strategy.scope():
        weight = unison.Variable(np.ones(3, np.float32), aggregation=MEAN)
        momentum = unison.Variable(np.zeros(3, np.float32), aggregation=MEAN)
        count = unison.Variable(np.float32(0), synchronization=ON_READ, aggregation=SUM)
        metric = keras.metrics.MeanSquaredError()
    generator = np.random.RandomState(seed)
    rows = np.arange(60, dtype=np.float32).reshape(20, 3) / 60
    dataset = unison.data.Dataset.from_tensor_slices(rows).shuffle(20, seed=5).batch(8).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    manager = CheckpointManager(
        Checkpoint(
            weight=weight,
            momentum=momentum,
            count=count,
            metric=metric,
            generator=generator,
            iterator=iterator,
        ),
        folder,
        2,
    )
    manager.restore_or_initialize()

    def step(batch, noise):
        size = batch.shape[0]  # 4, 2, 1 or none at all for a replica
        gradient = (size * (weight.value() - noise) - batch.sum(0)) / 8 * replicas
        momentum.assign(momentum * 0.9 + gradient)
        weight.assign(weight - 0.1 * momentum)
        count.assign_add(batch.shape[0])
        return jnp.sum(batch)

    losses = []
    for _ in range(steps):
        noise = generator.normal(size=3).astype(np.float32)
        of_replicas = strategy.run(step, args=(next(iterator), noise))
        total = strategy.reduce("sum", of_replicas, axis=None)
        metric.update_state(np.zeros(3, np.float32), np.asarray(weight.value()))
        values = (total, np.sum(weight.value()), count.numpy(), metric.result())
        losses.append([float(value) for value in values])
    manager.save()
    return losses


def test_loop_goes_on_under_other_numbers_of_replicas_with_everything_that_has_a_state(tmp_path):
    whole = loop(1, tmp_path / "whole", 12, seed=1)
    parts = [(1, 3, 1), (2, 4, 2), (4, 2, 3), (1, 3, 4)]
    resumed = [
        values
        for replicas, steps, seed in parts
        for values in loop(replicas, tmp_path / "parts", steps, seed)
    ]
    np.testing.assert_allclose(resumed, whole, rtol=1e-5)
