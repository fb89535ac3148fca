"""Keras layers list the shards of divided weights, as they do in TensorFlow."""

from __future__ import annotations

from typing import Any

from unison.parameter_server.sharded import is_sharded, shards_of


def weights_by_shards(original: property) -> property:
    """Returns the property `Layer.weights` with the shards of a divided weight in its place."""
    listed = original.fget
    assert listed is not None

    def weights(self: Any) -> list[Any]:
        found: list[Any] = []
        for weight in listed(self):
            found += shards_of(weight) if is_sharded(weight) else [weight]
        return found

    return property(weights, doc=original.__doc__)
