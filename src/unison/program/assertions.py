"""Assertions of a program, which are checked when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unison.errors import InvalidArgumentError
from unison.tracebacks import users_line


def require(holds: Any, message: Callable[..., str], *shown: Any) -> None:
    """Raises with `message(*shown)` unless all of `holds` is true; in a program, when it runs.

    Args:
        holds: A Boolean array, or one of NumPy.
        message: Maps `shown`, as NumPy arrays, to the message.
        shown: What the message needs.

    Raises:
        InvalidArgumentError: Not all of it is true.
    """
    values = [holds, *shown]
    later = [i for i, value in enumerate(values) if isinstance(value, jax.core.Tracer)]
    place = users_line() if later else ""

    def check(*arrived: Any) -> None:
        known = list(values)
        for index, value in zip(later, arrived, strict=True):
            known[index] = value
        if not np.all(np.asarray(known[0])):
            error = InvalidArgumentError(message=message(*map(np.asarray, known[1:])))
            if place:
                error.add_note(f"Asserted at {place}.")
            raise error

    if later:
        jax.debug.callback(check, *(values[index] for index in later))
    else:
        check()
