"""Keras layers list the shards of divided weights, as they do in TensorFlow."""

from __future__ import annotations

from typing import Any

from unison.parameter_server.sharded import is_sharded, shards_of
from unison.thread_local import ThreadLocal

_lists_shards = ThreadLocal(True)


def weights_by_shards(original: property) -> property:
    """Returns the property `Layer.weights` with the shards of a divided weight in its place."""
    listed = original.fget
    assert listed is not None

    def weights(self: Any) -> list[Any]:
        if not _lists_shards.value:
            return listed(self)
        found: list[Any] = []
        for weight in listed(self):
            found += shards_of(weight) if is_sharded(weight) else [weight]
        return found

    return property(weights, doc=original.__doc__)


def of_whole_weights(original: property) -> property:
    """Returns a property that selects from `Layer.weights`, with its divided weights whole.

    Keras regularizes and averages what it lists, which are variables, and not shards.
    """
    select = original.fget
    assert select is not None

    def selected(self: Any) -> list[Any]:
        with _lists_shards.bound_to(False):
            return select(self)

    return property(selected, doc=original.__doc__)
