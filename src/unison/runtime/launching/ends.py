"""The consequences of the end of a worker's process for its elastic job.

The supervisor calls this; the tests explore it together with the group (tests/elastic_model.py).
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from unison.runtime.elastic.protocol import REFUSED, REGISTER_LOST
from unison.runtime.exit_codes import OF_SIGNALS


class End(enum.Enum):
    """The consequence of the end of a process."""

    #: Its part in the job is over.
    FINAL = "final"
    #: It is lost, and is restarted.
    LOSS = "loss"
    #: It would fail again: the job ends, too.
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
    """Returns the consequence of the end of a worker's process.

    Args:
        code: Its exit code, as in a shell.
        final_codes: The exit codes of a worker whose part is over.
        is_job_over: Whether the group has ended, or the job is being stopped.
        is_called_off: Whether the process was terminated because it was not in the group when the
            group ended: its exit code then does not concern the job.
        has_joined: Whether it has been a member of the group.
        has_lost_another: Whether it ended because another worker or its own machine is lost.
        is_error_a_loss: Whether a program that fails is restarted.

    Examples:
        >>> running = dict(final_codes={0}, is_job_over=False, is_called_off=False, has_joined=True)
        >>> [end_of(code, **running).value for code in (0, 1, 137, REGISTER_LOST)]
        ['final', 'failure', 'loss', 'loss']
    """
    if code in final_codes or is_called_off:
        return End.FINAL
    # A worker that has joined has only lost its connection to the register. One that has never
    # reached the register would not reach it after a restart either.
    is_cut_off = code == REGISTER_LOST and has_joined
    if code in OF_SIGNALS or code == REFUSED or is_cut_off or has_lost_another:
        return End.FINAL if is_job_over else End.LOSS
    if is_error_a_loss and not is_job_over:
        return End.LOSS
    return End.FAILURE
