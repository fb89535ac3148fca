"""A task: a thread that computes one worker's part of an iteration into a buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from unison.data.chunks import Chunk, ChunkReader, Pace
from unison.data.leaves import NestedDataset, dtype_of, shape_of, stack
from unison.data.plan import Plan
from unison.data.service.buffers import Buffer, Request, size_of
from unison.errors import OpError

#: The bytes of a chunk, about.
_CHUNK_BYTES = 1 << 22

#: Larger elements are sent as they are: copying them once more would take longer.
_SMALL_BYTES = 1 << 15

#: Seconds for which the thread is awaited.
_SECONDS_TO_CLOSE = 2.0


class Task:
    """Computes a plan ahead of requests.

    Args:
        open_plan: Returns the plan; called in the thread.
        buffer: Where elements are kept.
        when_ended: Called in the thread of a request when no elements are left, once. A task that
            is closed before has not ended.
        name: The thread's name.
    """

    def __init__(
        self,
        open_plan: Callable[[], Plan],
        buffer: Buffer,
        when_ended: Callable[[], None],
        name: str,
    ):
        self._open_plan = open_plan
        self._buffer = buffer
        self._when_ended = when_ended
        self._changed = threading.Condition()
        self._errors: list[BaseException] = []
        #: The reason for which there are no elements at all.
        self._broken: BaseException | None = None
        self._has_computed_all = False
        self._has_ended = False
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, waits: bool = False) -> None:
        """Ends the thread when it has computed its current elements."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        if waits:
            self._thread.join(_SECONDS_TO_CLOSE)

    def take(self, request: Request, seconds: float) -> Chunk | None:
        """Returns elements; None if there are none within `seconds`, or the task is closed.

        Raises:
            StopIteration: There are none left.
            Exception: What computing the next elements has raised.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                chunk = self._buffer.take(request)
                if chunk is not None:
                    self._changed.notify_all()
                    return chunk
                if self._broken is not None:
                    raise self._broken
                if self._errors:
                    error = self._errors.pop()
                    self._changed.notify_all()
                    raise error
                if self._has_computed_all:
                    break
                left = end - time.monotonic()
                if left <= 0 or self.is_closed:
                    return None
                self._changed.wait(left)
            is_first, self._has_ended = not self._has_ended, True
        if is_first:
            self._when_ended()
        raise StopIteration

    def _run(self) -> None:
        broken = None
        try:
            has_computed_all = self._compute(ChunkReader(self._open_plan()))
        except BaseException as error:
            has_computed_all, broken = False, error
        with self._changed:
            self._has_computed_all = has_computed_all
            if not self.is_closed:
                self._broken = broken
            self._changed.notify_all()

    def _compute(self, reader: ChunkReader) -> bool:
        """Computes until the task is closed; returns whether there are no elements left."""
        pace = _PaceOfChunks(self._buffer.chunk_size)
        while self._may_continue():
            begin = time.perf_counter()
            try:
                chunk = reader.read(pace.elements())
            except Exception as error:
                # As everywhere, the element after a failed one is the next one.
                if isinstance(error, OpError) and self.is_closed:
                    return False
                self._fail(error)
                continue
            if chunk is None:
                return True
            pace.note(chunk, time.perf_counter() - begin)
            chunk = compacted(chunk)
            with self._changed:
                self._buffer.add(chunk)
                self._changed.notify_all()
        return False

    def _may_continue(self) -> bool:
        with self._changed:
            while not self.is_closed and (self._buffer.is_full() or self._errors):
                self._changed.wait()
            return not self.is_closed

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._errors.append(error)
            self._changed.notify_all()


def compacted(chunk: Chunk) -> Chunk:
    """Returns a chunk of small elements that have one shape as stacked ones, which are sent faster.

    Examples:
        >>> import numpy as np
        >>> compacted(Chunk(0, elements=[(np.float32(1),), (np.float32(2),)])).is_stacked
        True
    """
    if chunk.is_stacked or len(chunk) == 1 or size_of(chunk) > _SMALL_BYTES * len(chunk):
        return chunk
    if any(isinstance(leaf, NestedDataset) for element in chunk for leaf in element):
        return chunk  # sending it is an error
    kinds = {tuple((shape_of(leaf), dtype_of(leaf)) for leaf in element) for element in chunk}
    if len(kinds) > 1:
        return chunk
    return Chunk(chunk.start, stack(list(chunk)))


class _PaceOfChunks:
    """The number of elements of a chunk: what takes some milliseconds and fits into a message.

    Args:
        fixed: The number, if it is fixed; 0: measured.
    """

    def __init__(self, fixed: int):
        self._fixed = fixed
        self._pace = Pace()
        self._bytes = 0
        self._latest = 1

    def note(self, chunk: Chunk, seconds: float) -> None:
        self._pace.note(len(chunk), seconds)
        self._bytes = max(size_of(chunk) // len(chunk), 1)
        self._latest = len(chunk)

    def elements(self) -> int:
        if self._fixed:
            return self._fixed
        if not self._bytes:
            return 1
        fitting = max(_CHUNK_BYTES // self._bytes, 1)
        # One fast chunk does not mean that many will be.
        return min(self._pace.elements(), fitting, 8 * self._latest)
