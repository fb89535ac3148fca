"""The state of `fit` as a file or another worker has it: its fields are checked before any is used.

A backup has right checksums whoever has written it. So each field is held to the types and bounds
of those that `fit_position` saves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unison.storage.decoding import (
    plain_bool,
    plain_dict,
    plain_list,
    plain_text,
    real_number,
    whole_number,
)
from unison.train.random_state import checked_numpy_and_python

#: The source of a state that is not in a file of the user, in messages.
SOURCE = "The position in fit"

#: The remedy for a state that does not fit: it is damaged, or the program is another one.
REMEDY = (
    "Remove it to go on from an earlier state, or from the start; or call fit with the data, batch "
    "size, steps_per_epoch and callbacks of the run that saved it."
)


def checked_position(state: object) -> dict[str, Any]:
    """Returns the decoded state of a `FitPosition`, if its fields are valid.

    The states of the callbacks are checked by `give_states`.

    Raises:
        ValueError, KeyError: They are not.
    """
    given = plain_dict(state)
    whole_number(given["epoch"])
    whole_number(given["batch"])
    plain_bool(given["has_stopped"])
    plain_dict(given["callbacks"])
    if given["data"] is not None:
        _check_batches(plain_dict(given["data"]))
    return given


def checked_sizes(sizes: object) -> list[tuple[int, float]]:
    """Returns the decoded batches of a pass at which the size changes, with the factors.

    Raises:
        ValueError: They are not numbers, or none is for the first batch.
    """
    pairs = [plain_list(pair, 2) for pair in plain_list(sizes)]
    checked = [(whole_number(start), real_number(factor, least=0.0)) for start, factor in pairs]
    if checked and checked[0][0] != 0:
        raise ValueError(f"expected the size of batch 0 first, received {checked[0]}")
    return checked


def _check_batches(given: dict[str, Any]) -> None:
    """Checks the state of the batches; see `Batches.state`."""
    taken = whole_number(given["taken"])
    plain_bool(given["looks_ahead"])
    _check_origin(plain_dict(given["begun"]))
    if given["now"] is not None:
        _check_origin(plain_dict(given["now"]))
    elif not taken:
        raise ValueError("the state before the first batch of a pass is missing")


def _check_origin(given: dict[str, Any]) -> None:
    """Checks the state that determines batches."""
    checked_numpy_and_python(given)
    parts = whole_number(given.get("num_parts", 1), least=1)
    for share in plain_list([] if given.get("shares") is None else given["shares"]):
        real_number(share, least=0.0)
    if given["memories"] is None:
        return
    if parts == 1:
        text, data = plain_list(given["memories"], 2)
        plain_text(text)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError("expected the state of the passes over a dataset as bytes")
        return
    if not plain_list(given["memories"]):
        raise ValueError("the states of the passes of all workers are missing")
    for of_worker in given["memories"]:
        text, data = map(plain_text, plain_list(of_worker, 2))
        bytes.fromhex(data)
