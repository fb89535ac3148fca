"""All-gathers of values whose sizes differ from replica to replica.

The trace of a replica knows only its own sizes. So if the replicas' shapes differ, each trace ends
at the first all-gather whose sizes are not yet known, and is restarted when those of all replicas
are. The all-gather then pads every value to the largest size, and removes the padding from the
result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from unison.thread_local import ThreadLocal


class SizeWanted(BaseException):
    """Ends a trace at an all-gather whose sizes are unknown; not an error, so not an `Exception`.

    Attributes:
        own: The size on the traced replica.
    """

    def __init__(self, own: int):
        super().__init__(own)
        self.own = own


class GatherSizes:
    """The sizes of the all-gathers of one trace, in order.

    Args:
        known: For every all-gather so far, the sizes on all replicas.
    """

    def __init__(self, known: Sequence[tuple[int, ...]]):
        self._known = known
        self._met = 0

    def meet(self, own: int) -> tuple[int, ...]:
        """Returns the sizes of all replicas in the next all-gather.

        Raises:
            SizeWanted: They are not known.
        """
        if self._met == len(self._known):
            raise SizeWanted(own)
        self._met += 1
        return self._known[self._met - 1]

    @contextlib.contextmanager
    def met(self) -> Iterator[None]:
        """Context manager in which this thread's all-gathers have these sizes, in order."""
        with _met.bound_to(self):
            yield


_met: ThreadLocal[GatherSizes | None] = ThreadLocal(None)


def sizes_of_next_gather(own: int) -> tuple[int, ...] | None:
    """Returns the sizes of all replicas in the next all-gather; None if all are `own`."""
    record = _met.value
    sizes = None if record is None else record.meet(own)
    return None if sizes is None or len(set(sizes)) == 1 else sizes
