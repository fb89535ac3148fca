"""Placements of elastic groups that no job has formed."""

from types import SimpleNamespace
from typing import Any

import jax

from unison.runtime.elastic import ElasticOptions, ElasticPlacement


def placement_of(num_replicas: int, **options: Any) -> ElasticPlacement:
    """Returns the placement of two replicas of this worker's, of so many."""
    group = SimpleNamespace(options=ElasticOptions(**options))
    placement = ElasticPlacement(jax.devices()[:2], group)
    placement.number(0, num_replicas)
    return placement
