"""`InputStatistics`: the fraction of an epoch for which Keras' `fit` waits for its input."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import keras

from unison.data import waited_seconds


class InputStatistics(keras.callbacks.Callback):
    """Adds to the logs of each epoch the fraction of its time that was spent waiting for input.

    With an `input_wait` of 0.02, the program waited for a batch of a dataset for 2 % of the epoch;
    the devices may have computed earlier steps in that time. `unison.data.timing` names
    the stage of the pipeline that causes it. Put the callback before those that use
    the entry (`CSVLogger`, `TensorBoard`); the `History` has it anyway. Validation during the
    epoch is included, with its own input.

    Examples:
        history = model.fit(dataset, epochs=2, callbacks=[unison.keras.InputStatistics()])
        history.history["input_wait"]
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin = perf_counter()
        self._waited = waited_seconds()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            elapsed = perf_counter() - self._begin
            logs["input_wait"] = (waited_seconds() - self._waited) / elapsed
