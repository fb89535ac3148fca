"""Records that a program under test can make."""

from __future__ import annotations

from collections.abc import Iterable

from unison.runtime.elastic.lifecycle import happened


def record_examples(epoch: int, seen: Iterable[float]) -> None:
    """Records how often each example has been used, for `check`; otherwise does nothing.

    Must be called at the end of an epoch. Keep the counts in the trained state, so that only steps
    that took effect are counted: for instance in a variable with `aggregation=SUM` to which the
    step adds one at the indices of the batch's examples.

    Args:
        epoch: The index of the epoch, from 0.
        seen: For each example, how often it was used since the start of training.
    """
    happened("examples", epoch=epoch, seen=[round(float(count)) for count in seen])
