"""The state of Keras' callbacks between epochs, for a training that is resumed."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from unison.train.graph import has_state

import keras  # isort: skip

logger = logging.getLogger("unison")

#: The attributes that hold the state of Keras' callbacks; subclasses have them, too.
_REMEMBERED = {
    keras.callbacks.EarlyStopping: (
        "wait",
        "stopped_epoch",
        "best",
        "best_epoch",
        "best_weights",
    ),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}


def states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns the state of the callbacks, by their class and index among those of a class.

    For callbacks that are not Keras', it is the result of their method `get_state`.
    """
    return {
        name: callback.get_state() if has_state(callback) else _attributes(callback)
        for name, callback in _named(callbacks)
    }


def give_states(callbacks: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Restores the state that `states_of` has returned for similar callbacks."""
    for name, callback in _named(callbacks):
        if name not in states:
            logger.warning("The backup has no state of callback %s: it starts from scratch.", name)
        elif has_state(callback):
            callback.set_state(states[name])
        else:
            for attribute, value in states[name].items():
                setattr(callback, attribute, value)


def _named(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    count: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        if has_state(callback) or isinstance(callback, tuple(_REMEMBERED)):
            count[kind] += 1
            yield (kind if count[kind] == 1 else f"{kind}_{count[kind]}"), callback


def _attributes(callback: Any) -> dict[str, Any]:
    names = [
        name for kind in _REMEMBERED if isinstance(callback, kind) for name in _REMEMBERED[kind]
    ]
    # `EarlyStopping` has its best value after its first epoch.
    return {name: _plain(getattr(callback, name)) for name in names if hasattr(callback, name)}


def _plain(value: Any) -> Any:
    """Returns a value in which arrays are NumPy's: numbers, and copies of the others."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return array if array.ndim else array.item()
    return value
