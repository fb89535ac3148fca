"""Loops of one's own on batches that leave replicas without examples."""

import contextlib

import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from keras_comparison import assert_close


@pytest.mark.parametrize("sizes", [[2, 2, 1, 0], [0, 2, 2, 1]], ids=["last idle", "first idle"])
def test_replica_whose_gradients_do_not_exist_trains_along(four_replicas, sizes):
    # Of no examples, `take` is what it takes from, and no gradient reaches the embeddings.
    tokens = np.arange(5)

    def trained(strategy, batches):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential(
                [keras.Input(()), keras.layers.Embedding(6, 2), keras.layers.Dense(2)]
            )
            optimizer = keras.optimizers.SGD(0.1)

        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(rows) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        (strategy or tf.distribute.get_strategy()).run(step, args=(batches,))
        return model.get_weights()

    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    together = trained(four_replicas, unison.PerReplica([tf.constant(part) for part in parts]))
    assert_close(together, trained(None, tf.constant(tokens)))
