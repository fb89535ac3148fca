"""Unison: a cluster with a slow worker, whose share of the batch is equal, given or measured."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import unison
from benchmarks.protocol import Contestant
from benchmarks.workloads import SharesWork

_WIDTH = 512
_LAYERS = 8


def no_slow_worker(work: SharesWork) -> Contestant:
    return _SlowWorker(work, None, slowness=1)


def equal(work: SharesWork) -> Contestant:
    return _SlowWorker(work, None, work.slowness)


def given(work: SharesWork) -> Contestant:
    return _SlowWorker(work, [work.slowness, 1], work.slowness)


def measured(work: SharesWork) -> Contestant:
    return _SlowWorker(work, "measured", work.slowness)


class _Repeated(keras.layers.Layer):
    """Computes a chain of products, on the last replica several times."""

    def __init__(self, slowness: int):
        super().__init__()
        self._slowness = slowness

    def build(self, shape: Any) -> None:
        self.chain = self.add_weight(shape=(_LAYERS, _WIDTH, _WIDTH), trainable=False)

    def call(self, x: Any) -> Any:
        context = unison.get_replica_context()
        if context is None or not isinstance(x, jax.core.Tracer):
            return x
        is_last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
        start = jax.lax.stop_gradient(x)

        def once(_: Any, before: Any) -> Any:
            rows = start + 1e-9 * before
            for matrix in self.chain.value:
                rows = jnp.tanh(rows @ matrix)
            return rows

        times = jnp.where(is_last, self._slowness, 1)
        return x + 1e-9 * jax.lax.fori_loop(0, times, once, jnp.zeros_like(start))


class _SlowWorker(Contestant):
    def __init__(self, work: SharesWork, batch_shares: Any, slowness: int):
        self._work = work
        self._strategy = unison.MultiWorkerMirroredStrategy(batch_shares=batch_shares)
        keras.utils.set_random_seed(0)
        with self._strategy.scope():
            layers = [keras.Input((_WIDTH,)), _Repeated(slowness), keras.layers.Dense(10)]
            self._model = keras.Sequential(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._model.compile("sgd", loss)
        generator = np.random.default_rng(0)
        count = work.steps * work.batch
        self._x = generator.normal(size=(count, _WIDTH)).astype("float32")
        self._y = generator.integers(10, size=count)
        self._loss = 0.0

    @property
    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "unison": unison.__version__}

    def round(self) -> float:
        begin = time.perf_counter()
        history = self._model.fit(
            self._x, self._y, batch_size=self._work.batch, shuffle=False, verbose=0
        )
        self._loss = history.history["loss"][-1]
        return 1e3 * (time.perf_counter() - begin) / self._work.steps

    def facts(self) -> dict[str, Any]:
        return {"loss": self._loss, "first share": self._strategy.batch_shares[0]}
