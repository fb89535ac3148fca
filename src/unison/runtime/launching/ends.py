"""What the end of a worker's process means for its elastic job.

The supervisor asks; the tests explore it together with the group (tests/elastic_model.py).
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from unison.runtime.elastic.protocol import REFUSED, REGISTER_LOST


class End(enum.Enum):
    """What follows from the end of a process."""

    #: Its part in the job is over.
    FINAL = "final"
    #: It is lost, and is started again.
    LOSS = "loss"
    #: It would end so again: the job ends, too.
    FAILURE = "failure"


def end_of(
    code: int,
    *,
    final_codes: Collection[int],
    is_job_over: bool,
    is_called_off: bool,
    has_joined: bool,
    has_lost_another: bool = False,
    is_error_a_loss: bool = False,
) -> End:
    """Returns what the end of a worker's process means.

    Args:
        code: Its exit code, as shells give it.
        final_codes: The codes with which a worker ends whose part is over.
        is_job_over: Whether the group has ended, or the job is being stopped.
        is_called_off: Whether the process was told to end as it was not in the group when that
            ended: what it says then is about itself, and not about the job.
        has_joined: Whether it has been in the group.
        has_lost_another: Whether it ended because it misses another worker, or its machine is lost.
        is_error_a_loss: Whether a program that fails is started again.

    Examples:
        >>> running = dict(final_codes={0}, is_job_over=False, is_called_off=False, has_joined=True)
        >>> [end_of(code, **running).value for code in (0, 1, 137, REGISTER_LOST)]
        ['final', 'failure', 'loss', 'loss']
    """
    if code in final_codes or is_called_off:
        return End.FINAL
    # Of one that has joined, only the way to the register was lost. One that has never found it
    # would not find it again.
    is_cut_off = code == REGISTER_LOST and has_joined
    if code > 128 or code == REFUSED or is_cut_off or has_lost_another:
        return End.FINAL if is_job_over else End.LOSS
    if is_error_a_loss and not is_job_over:
        return End.LOSS
    return End.FAILURE
