"""What the two contestants that run Keras' `fit` on JAX share."""

from __future__ import annotations

from typing import Any

import jax
import keras

from benchmarks.contestants import keras_models, live_arrays
from benchmarks.workloads import FitWork


class _Scales(keras.callbacks.Callback):
    """Weighs the live arrays between two steps, and keeps the largest sum.

    Before a step and not behind it: a callback that wants a step's logs makes `fit` wait for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.most = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch:
            self.most = max(self.most, live_arrays.bytes_on_fullest_device())


class KerasOnJax(keras_models.KerasFit):
    """A round of `fit` that also tells the bytes of live arrays, if the workload weighs."""

    def __init__(self, model: keras.Model, work: FitWork, libraries: dict[str, str]):
        self._scales = _Scales()
        callbacks = [self._scales] if work.weighs else []
        super().__init__(model, work, {"jax": jax.__version__, **libraries}, callbacks)

    def facts(self) -> dict[str, Any]:
        facts = super().facts() | live_arrays.peak_bytes()
        return facts | {"live_bytes": self._scales.most} if self._scales.most else facts
