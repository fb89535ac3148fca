"""All-gathers of values whose sizes differ from replica to replica.

A replica that is traced knows its own sizes only. So where the replicas' shapes differ, the trace
of each ends at the first all-gather whose sizes are not yet known, and is begun again when those
of all replicas are. The all-gather then sends every value padded to the largest, and cuts the
padding out of what it gets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

_thread = threading.local()


class SizeWanted(BaseException):
    """Ends a trace at an all-gather whose sizes are not known; no error, so not an `Exception`.

    Attributes:
        own: The size on the traced replica.
    """

    def __init__(self, own: int):
        super().__init__(own)
        self.own = own


class GatherSizes:
    """The sizes that the all-gathers of one trace meet, in their order.

    Args:
        known: Of every all-gather so far, the sizes on all replicas.
    """

    def __init__(self, known: Sequence[tuple[int, ...]]):
        self._known = known
        self._met = 0

    def meet(self, own: int) -> tuple[int, ...]:
        """Returns the sizes that all replicas give to the next all-gather.

        Raises:
            SizeWanted: They are not known.
        """
        if self._met == len(self._known):
            raise SizeWanted(own)
        self._met += 1
        return self._known[self._met - 1]

    @contextlib.contextmanager
    def met(self) -> Iterator[None]:
        """Makes these the sizes that this thread's all-gathers meet, from the first on."""
        outer = getattr(_thread, "sizes", None)
        _thread.sizes = self
        try:
            yield
        finally:
            _thread.sizes = outer


def sizes_of_next_gather(own: int) -> tuple[int, ...] | None:
    """Returns the sizes that all replicas give to the next all-gather; None if all give `own`."""
    record = getattr(_thread, "sizes", None)
    sizes = None if record is None else record.meet(own)
    return None if sizes is None or len(set(sizes)) == 1 else sizes
