"""The state of Keras' callbacks between epochs, for a training that is resumed."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from unison.storage.decoding import (
    decoding,
    dtype_named,
    name_of_dtype,
    plain_bool,
    plain_dict,
    plain_list,
    plain_text,
    whole_number,
)
from unison.train.fit_state import REMEDY
from unison.train.graph import has_state

import keras  # isort: skip

logger = logging.getLogger("unison")


def _best(value: object) -> float | None:
    """Returns a decoded value that a log is compared with: a number, also NaN, or None."""
    if not isinstance(value, int | float | None):
        raise ValueError(f"expected a number or None, received {value!r:.80}")
    return None if value is None else float(value)


def _batch_or_none(value: object) -> int | None:
    return None if value is None else whole_number(value)


def _epochs(value: object) -> list[int]:
    return [whole_number(epoch) for epoch in plain_list(value)]


def _history(value: object) -> dict[str, list[Any]]:
    return {plain_text(name): plain_list(logs) for name, logs in plain_dict(value).items()}


def _weights(value: object) -> list[np.ndarray] | None:
    if value is None:
        return None
    arrays = [np.asarray(weight) for weight in plain_list(value)]
    for array in arrays:
        dtype_named(name_of_dtype(array.dtype))
    return arrays


#: The attributes that hold the state of Keras' callbacks, with what checks a decoded value.
#: Subclasses have them, too.
_REMEMBERED: dict[type, dict[str, Callable[[object], Any]]] = {
    keras.callbacks.EarlyStopping: {
        "wait": whole_number,
        "stopped_epoch": whole_number,
        "best": _best,
        "best_epoch": whole_number,
        "best_weights": _weights,
    },
    keras.callbacks.History: {"epoch": _epochs, "history": _history},
    keras.callbacks.ModelCheckpoint: {
        "best": _best,
        "_batches_seen_since_last_saving": whole_number,
        "_last_batch_seen": _batch_or_none,
    },
    keras.callbacks.ReduceLROnPlateau: {
        "wait": whole_number,
        "cooldown_counter": whole_number,
        "best": _best,
    },
    keras.callbacks.SwapEMAWeights: {"_ema_weights_in_model": plain_bool},
    keras.callbacks.TensorBoard: {
        "_global_train_batch": whole_number,
        "_global_test_batch": whole_number,
    },
}


def states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns the state of the callbacks, by their class and index among those of a class.

    For callbacks that are not Keras', it is the result of their method `get_state`.
    """
    return {
        name: callback.get_state() if has_state(callback) else _attributes(callback)
        for name, callback in _named(callbacks)
    }


def give_states(callbacks: Iterable[Any], states: Mapping[str, Any], source: str) -> None:
    """Restores the state that `states_of` has returned for similar callbacks.

    Of Keras' callbacks, nothing else is set: other attributes say where they write, and what they
    call.

    Args:
        callbacks: The callbacks.
        states: The decoded state.
        source: What holds it, for messages.

    Raises:
        DataLossError: A callback of Keras' does not save such an attribute, or such a value.
    """
    for name, callback in _named(callbacks):
        if name not in states:
            logger.warning("The backup has no state of callback %s: it starts from scratch.", name)
        elif has_state(callback):
            callback.set_state(states[name])
        else:
            with decoding(source, REMEDY):
                checked = _checked(name, callback, plain_dict(states[name]))
            for attribute, value in checked.items():
                setattr(callback, attribute, value)


def _named(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    count: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        if has_state(callback) or isinstance(callback, tuple(_REMEMBERED)):
            count[kind] += 1
            yield (kind if count[kind] == 1 else f"{kind}_{count[kind]}"), callback


def _remembered(callback: Any) -> dict[str, Callable[[object], Any]]:
    """Returns the attributes of a callback of Keras' that hold its state."""
    kinds = [kind for kind in _REMEMBERED if isinstance(callback, kind)]
    return {name: check for kind in kinds for name, check in _REMEMBERED[kind].items()}


def _attributes(callback: Any) -> dict[str, Any]:
    # `EarlyStopping` has its best value after its first epoch.
    return {
        name: _plain(getattr(callback, name))
        for name in _remembered(callback)
        if hasattr(callback, name)
    }


def _checked(name: str, callback: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the decoded attributes of a callback.

    Raises:
        ValueError: The callback does not save such an attribute, or such a value.
    """
    checks = _remembered(callback)
    others = attributes.keys() - checks.keys()
    if others:
        raise ValueError(
            f"expected {', '.join(checks)} of callback {name}, received {min(others)!r:.80}"
        )
    found = {}
    for attribute, value in attributes.items():
        try:
            found[attribute] = checks[attribute](value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{attribute} of callback {name}: {error}") from error
    weights = found.get("best_weights")
    if weights is not None:
        shapes = [tuple(weight.shape) for weight in callback.model.weights]
        if [weight.shape for weight in weights] != shapes:
            raise ValueError(f"best_weights of callback {name} are not those of the model")
    return found


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
