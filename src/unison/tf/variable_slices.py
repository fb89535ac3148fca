"""Slices of variables that can be assigned to: `variable[1:3].assign(value)`.

A slice is an array, which cannot have attributes of its own. It is remembered which variable, and
which index of it, an array came from, as long as the array lives.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class _Origin(NamedTuple):
    """The origin of an array, which is `variable[index]`."""

    part: weakref.ref[Any]
    variable: Any
    index: Any


#: The origins of living arrays, by their ids.
_origins: dict[int, _Origin] = {}


def assignable(part: Any, variable: Any, index: Any) -> Any:
    """Returns `part`, which is `variable[index]`, as an array that can be assigned to."""
    if part.shape == variable.shape:
        # All of the variable may be the very array that it stores: it would keep itself alive.
        part = jax.numpy.copy(part)
    key = id(part)
    forget = functools.partial(_origins.pop, key, None)
    _origins[key] = _Origin(weakref.ref(part, lambda _: forget()), variable, index)
    return part


def assign_of(part: Any) -> Callable[..., Any]:
    """Returns the method `assign` of a slice of a variable.

    Raises:
        AttributeError: `part` is another tensor.

    TF: the `assign` of what `tf.Variable.__getitem__` returns.
    """
    origin = _origins.get(id(part))
    if origin is None or origin.part() is not part:
        raise AttributeError(
            "A tensor has no assign: variables have, and their slices (variable[1:3].assign(x)).",
            name="assign",
        )

    def assign(value: Any, name: str | None = None) -> Any:
        del name
        from unison.tf.slicing import places_of

        variable = origin.variable
        return variable.assign_slice(places_of(origin.index, variable.shape), value)

    return assign
