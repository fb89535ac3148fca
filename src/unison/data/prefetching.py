"""`prefetch`: elements are computed in a thread of their own, before they are asked for."""

from __future__ import annotations

import atexit
import collections
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from unison.data.plan import AUTOTUNE, Plan, Rows, SameElements, Stream
from unison.data.structure import Leaves
from unison.errors import InternalError, InvalidArgumentError

Item = TypeVar("Item")

#: How many elements wait under `AUTOTUNE`: one is being used, one is ready.
_AUTOTUNE_SIZE = 2

#: Seconds after which a waiting thread looks whether the other one is still there.
_LOOK_AFTER = 1.0

#: Seconds for which the end of the process waits for the threads, all together.
_GRACE = 5.0


class Prefetch(SameElements):
    """The elements, some of which are computed ahead.

    Args:
        source: The input.
        buffer_size: How many elements may wait; 0 for none, `AUTOTUNE` for a few.

    Raises:
        InvalidArgumentError: `buffer_size` is neither.
    """

    def __init__(self, source: Plan, buffer_size: int):
        super().__init__(source)
        if buffer_size < AUTOTUNE:
            raise InvalidArgumentError(
                message="Expected a buffer_size of at least 0, or tf.data.AUTOTUNE. Received: "
                f"{buffer_size}"
            )
        self._buffer_size = _AUTOTUNE_SIZE if buffer_size == AUTOTUNE else buffer_size

    def rows(self) -> Rows | None:
        # What has access by index need not be read ahead.
        return self._input.rows()

    def _stream(self) -> Stream:
        stream = self._input.stream()
        return ReadAheadStream(stream, self._buffer_size) if self._buffer_size else stream


class ReadAheadStream(Stream):
    """A stream that is read in a thread of its own.

    Args:
        stream: What is read. Nobody else may read it.
        size: How many elements may wait.
    """

    def __init__(self, stream: Stream, size: int):
        self._ahead = ReadAhead(stream.next, size)

    def next(self) -> Leaves | None:
        return self._ahead.get()


class ReadAhead(Generic[Item]):
    """Calls a function in a thread, ahead of those who want its results.

    The thread starts with the first `get`. It ends after a result of None, and when this object
    is dropped.

    Args:
        produce: Returns the next result, None at the end. What it raises, `get` raises in its
            turn; then it is called again.
        size: How many results may wait.
    """

    def __init__(self, produce: Callable[[], Item | None], size: int):
        self._channel = _Channel(size)
        self._produce: Callable[[], Item | None] | None = produce
        # The thread knows the channel only, so that dropping this object ends it.
        self._finalizer = weakref.finalize(self, self._channel.close)

    def get(self) -> Item | None:
        """Returns the next result; None at the end, and ever after."""
        if self._produce is not None:
            self._channel.start(self._produce)
            self._produce = None
        return self._channel.get()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


class _Channel:
    """The results that wait, between the thread that computes and the one that wants them."""

    def __init__(self, size: int):
        self._size = size
        self._waiting: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_ended = False
        self._thread: threading.Thread | None = None

    def start(self, produce: Callable[[], Any]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(produce,), name="unison-data-prefetch", daemon=True
        )
        _open_channels.add(self)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread as soon as it has the result that it is computing."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits for the thread, `seconds` at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def get(self) -> Any:
        with self._changed:
            while not self._waiting:
                if self._has_ended or self._is_closed:
                    return None
                if self._thread is None or not self._thread.is_alive():
                    raise InternalError(
                        message="The thread that reads the dataset ahead has ended without a word."
                    )
                self._changed.wait(_LOOK_AFTER)
            item = self._waiting.popleft()
            self._changed.notify_all()
        if isinstance(item, _Failure):
            raise item.error
        if item is None:
            self._has_ended = True
        return item

    def _run(self, produce: Callable[[], Any]) -> None:
        item: Any = _Failure  # anything but None
        while item is not None:
            with self._changed:
                while len(self._waiting) >= self._size and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            try:
                item = produce()
            except BaseException as error:
                item = _Failure(error)
            with self._changed:
                if self._is_closed:
                    return
                self._waiting.append(item)
                self._changed.notify_all()


_open_channels: weakref.WeakSet[_Channel] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends all threads before the interpreter takes away what they use."""
    channels = list(_open_channels)
    for channel in channels:
        channel.close()
    for channel in channels:
        with contextlib.suppress(RuntimeError):
            channel.join(_GRACE / len(channels))
