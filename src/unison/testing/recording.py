"""What a program under test may say of itself."""

from __future__ import annotations

from collections.abc import Iterable

from unison.runtime.elastic.happenings import happened


def record_examples(epoch: int, seen: Iterable[float]) -> None:
    """Writes down how often each example has been used, for `check`; elsewhere it does nothing.

    To be called at the end of an epoch. Count in the state that is trained, so that only what has
    taken effect is counted: for instance in a variable with `aggregation=SUM` to which the step
    adds one at the numbers of the batch's examples.

    Args:
        epoch: The number of the epoch, from 0.
        seen: For each example, how often it was used since the training began.
    """
    happened("examples", epoch=epoch, seen=[round(float(count)) for count in seen])
