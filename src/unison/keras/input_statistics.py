"""`InputStatistics`: how much of an epoch's time Keras' `fit` waits for its input."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import keras

from unison.data import waited_seconds


class InputStatistics(keras.callbacks.Callback):
    """Adds to the logs of each epoch the share of its time that was spent waiting for input.

    `input_wait` of 0.02 says that for 2 % of the epoch the program stood waiting for a batch of a
    dataset; the devices may have worked on earlier steps in that time. `unison.data.timing` names
    the stage of the pipeline that takes it. Put the callback in front of those that are to see
    the entry (`CSVLogger`, `TensorBoard`); the `History` has it anyway. Validation during the
    epoch counts as well, with its own input.

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
