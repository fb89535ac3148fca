"""The share of the global batch's examples that the replica being traced has.

In a step of `fit`, whatever a replica computes as a mean over its examples counts by this share:
the global mean is the sum of the replicas' means, each times its share. In a custom loop there is
no share: there the user scales.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_thread = threading.local()


@contextlib.contextmanager
def replica_share(share: float, weighs_loss: bool = False) -> Iterator[None]:
    """Inside, the replica has `share` of the examples: 0 where it has none, 1 where it has all.

    Args:
        share: The share.
        weighs_loss: Whether the loss is multiplied by it before it is differentiated, rather than
            the gradients afterwards.
    """
    previous = current_share(), share_of_gradients()
    _thread.share, _thread.share_of_gradients = share, None if weighs_loss else share
    try:
        yield
    finally:
        _thread.share, _thread.share_of_gradients = previous


def current_share() -> float | None:
    """Returns the replica's share; None outside the steps of a Keras model."""
    return getattr(_thread, "share", None)


def share_of_gradients() -> float | None:
    """Returns what gradients are still to be multiplied by; None where nothing."""
    return getattr(_thread, "share_of_gradients", None)
