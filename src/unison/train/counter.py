"""The number of checkpoints, in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unison.train.graph import key_of

#: The name of the number of checkpoints, in a `Checkpoint`.
COUNTER = "save_counter"
_COUNTER_KEY = key_of([COUNTER], "VARIABLE_VALUE")


def with_wide_counter(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays with the number of checkpoints as a 64-bit integer.

    It is one also without JAX's 64-bit mode, so that a program with that can restore it.
    """
    counter = arrays.get(_COUNTER_KEY)
    if counter is None or counter.dtype.kind != "i":  # another object of that name
        return dict(arrays)
    return {**arrays, _COUNTER_KEY: counter.astype(np.int64)}
