"""`prefetch`: a thread computes elements before they are requested."""

from __future__ import annotations

import atexit
import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from unison.data.chunks import Chunk, ChunkReader, Pace
from unison.data.leaves import concatenate
from unison.data.plan import AUTOTUNE, Plan, Rows, SameElements, Stream
from unison.data.state import State
from unison.data.structure import Leaves
from unison.errors import InternalError, InvalidArgumentError
from unison.interrupts import wait_until
from unison.thread_local import ThreadLocal

Item = TypeVar("Item")

#: The number of buffered elements under `AUTOTUNE`: one is being used, one is ready.
AUTOTUNE_SIZE = 2

#: The timeout in seconds for all threads together at the end of the process.
_GRACE = 5.0


class Prefetch(SameElements):
    """The elements, some of which are computed ahead.

    Args:
        source: The input.
        buffer_size: The number of buffered elements; 0 for none, `AUTOTUNE` for a few, None for as
            many as are read in a few milliseconds.
        when_ready: Called in the thread when an element is ready.

    Raises:
        InvalidArgumentError: `buffer_size` is invalid.
    """

    def __init__(
        self,
        source: Plan,
        buffer_size: int | None,
        when_ready: Callable[[], None] | None = None,
    ):
        super().__init__(source)
        if buffer_size is not None and buffer_size < AUTOTUNE:
            raise InvalidArgumentError(
                message="Expected a buffer_size of at least 0, or tf.data.AUTOTUNE. Received: "
                f"{buffer_size}"
            )
        self._buffer_size = AUTOTUNE_SIZE if buffer_size == AUTOTUNE else buffer_size
        self._when_ready = when_ready

    def rows(self) -> Rows | None:
        # With access by index, nothing has to be read ahead.
        return self._input.rows()

    def _stream(self) -> Stream:
        if self._buffer_size == 0:
            return self._input.stream()
        return ReadAheadStream(self._input, self._buffer_size, self._when_ready)


class ReadsChunks:
    """Base of streams whose elements come in chunks."""

    _chunk: Chunk | None = None
    _place = 0

    def _read(self) -> Chunk | None:
        """Returns the next chunk; None at the end."""
        raise NotImplementedError

    def _ask_for(self, count: int) -> None:
        """Says how many elements are wanted next."""

    def next(self) -> Leaves | None:
        self._ask_for(1)
        chunk = self._present()
        if chunk is None:
            return None
        self._place += 1
        return chunk[self._place - 1]

    def next_block(self, count: int) -> Leaves | None:
        self._ask_for(count)
        blocks: list[Leaves] = []
        while count and (chunk := self._present()) is not None:
            part = chunk.part(self._place, self._place + count)
            self._place += len(part)
            count -= len(part)
            blocks.append(part.stacked())
        return concatenate(blocks) if blocks else None

    @property
    def _has_chunk(self) -> bool:
        return self._chunk is not None and self._place < len(self._chunk)

    def _present(self) -> Chunk | None:
        """Returns the chunk that contains the next element at its current position."""
        if not self._has_chunk:
            self._chunk = self._read()
            self._place = 0
        return self._chunk


class ReadAheadStream(ReadsChunks, Stream):
    """A stream that is read in its own thread: elements, or blocks if those are requested.

    Args:
        plan: The plan that is read.
        size: The number of buffered elements; None: as many as are read in a few milliseconds.
        when_ready: Called in the thread when an element is ready.
    """

    #: Its time is that of the stages that the thread runs.
    only_waits = True

    def __init__(self, plan: Plan, size: int | None, when_ready: Callable[[], None] | None = None):
        self._source = _Chunks(ChunkReader(plan, for_blocks=True), size)
        self._size = size
        self._when_ready = when_ready
        self._begin()

    def _begin(self) -> None:
        # The thread must not reference this object, so that dropping it ends the thread.
        size = AUTOTUNE_SIZE if self._size is None else self._size
        self._ahead = ReadAhead(self._source.next, size, self._when_ready)
        self._chunk = None
        self._place = 0

    def _read(self) -> Chunk | None:
        return self._ahead.get()

    @property
    def num_ready(self) -> int:
        """The number of buffered elements, or of blocks."""
        return self._ahead.num_ready + self._has_chunk

    def has_ready(self, count: int) -> bool:
        """Whether a number of elements is buffered."""
        present = len(self._chunk) - self._place if self._chunk is not None else 0
        waiting = sum(len(chunk) for chunk in self._ahead.waiting() if chunk is not None)
        return present + waiting >= count

    def start(self) -> None:
        """Starts reading."""
        self._ahead.start()

    def _ask_for(self, count: int) -> None:
        self._source.asked_for = count
        if self._size is not None:
            self._ahead.resize(-(-self._size // count))

    def state(self) -> State:
        with self._ahead.paused() as waiting:
            before = [chunk for chunk in waiting if chunk is not None]
            if self._chunk is not None and self._has_chunk:
                before.insert(0, self._chunk.part(self._place, len(self._chunk)))
            return self._source.reader.state_with(before)

    def restore(self, state: State) -> None:
        with self._ahead.paused():
            self._ahead.close()
            self._source.reader.restore(state)
        self._begin()


class _Chunks:
    """The reader in the thread.

    Args:
        reader: Reads the elements.
        size: As in `ReadAheadStream`.
    """

    def __init__(self, reader: ChunkReader, size: int | None):
        self.reader = reader
        self._pace = Pace() if size is None else None
        #: The number of elements that are requested at a time.
        self.asked_for = 1

    def next(self) -> Chunk | None:
        if self._pace is None:
            return self.reader.read(self.asked_for)
        begin = time.perf_counter()
        count = self.asked_for
        chunk = self.reader.read(count, max(self._pace.elements() // count, 1))
        if chunk is not None:
            self._pace.note(len(chunk), time.perf_counter() - begin)
        return chunk


class ReadAhead(Generic[Item]):
    """Calls a function in a thread, before its results are requested.

    The thread starts with the first `get`. It ends after a result of None, and when this object
    is dropped.

    Args:
        produce: Returns the next result, None at the end. `get` raises its errors, in
            order; then it is called again.
        size: The number of buffered results.
        when_ready: Called in the thread when a result is ready.
    """

    def __init__(
        self,
        produce: Callable[[], Item | None],
        size: int,
        when_ready: Callable[[], None] | None = None,
    ):
        self._channel = _Channel(size, when_ready)
        self._produce: Callable[[], Item | None] | None = produce
        # The thread references the channel only, so that dropping this object ends it.
        self._finalizer = weakref.finalize(self, self._channel.close)

    def start(self) -> None:
        """Starts the thread, unless it has been started."""
        if self._produce is not None:
            self._channel.start(self._produce)
            self._produce = None

    def get(self) -> Item | None:
        """Returns the next result; None at the end, also in further calls."""
        self.start()
        return self._channel.get()

    @property
    def num_ready(self) -> int:
        """The number of buffered results."""
        return self._channel.num_ready

    def waiting(self) -> list[Item | None]:
        """Returns the buffered results."""
        return self._channel.waiting()

    def resize(self, size: int) -> None:
        """Changes the number of buffered results to `size`."""
        self._channel.size = size

    @contextlib.contextmanager
    def paused(self) -> Iterator[list[Item | None]]:
        """Inside, `produce` is not running; yields the buffered results."""
        with self._channel.paused():
            yield self._channel.waiting()

    def close(self) -> None:
        """Ends the thread when it has computed its current result."""
        self._finalizer()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


#: Returned where no result is buffered; None is the end.
_NOTHING = object()


class _Channel:
    """The buffered results, between the thread that computes and the one that consumes them."""

    def __init__(self, size: int, when_ready: Callable[[], None] | None):
        #: The maximum number of buffered results.
        self.size = size
        self._when_ready = when_ready
        self._waiting: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_paused = False
        self._is_computing = False
        self._has_ended = False
        self._thread: threading.Thread | None = None

    def start(self, produce: Callable[[], Any]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(produce,), name="unison-data-prefetch", daemon=True
        )
        _open_channels.add(self)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread when it has computed its current result."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits for the thread, at most `seconds`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    @property
    def num_ready(self) -> int:
        return len(self._waiting)

    def waiting(self) -> list[Any]:
        with self._changed:
            return [item for item in self._waiting if not isinstance(item, _Failure)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._changed:
            self._is_paused = True
        try:
            wait_until(self._changed, self._is_at_rest, lambda: None)
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def _is_at_rest(self) -> bool:
        return not (self._is_computing and self._is_alive)

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def get(self) -> Any:
        with self._changed:
            item = self._taken() if self._waiting else _NOTHING
        if item is _NOTHING:
            item = wait_until(self._changed, self._may_be_taken, self._taken)
        if isinstance(item, _Failure):
            try:
                raise item.error
            finally:
                del item  # its traceback references this frame
        if item is None:
            self._has_ended = True
        return item

    def _may_be_taken(self) -> bool:
        is_over = self._has_ended or self._is_closed or not self._is_alive
        return bool(self._waiting) or is_over

    def _taken(self) -> Any:
        """Returns the first buffered result; None if there will be none."""
        if self._waiting:
            item = self._waiting.popleft()
            self._changed.notify_all()
            return item
        if self._has_ended or self._is_closed:
            return None
        raise InternalError(
            message="The thread that reads the dataset ahead has ended without a result or an "
            "error."
        )

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _run(self, produce: Callable[[], Any]) -> None:
        _channel.value = self
        has_ended = False
        while not has_ended:
            with self._changed:
                while not self._is_closed and (self._is_paused or len(self._waiting) >= self.size):
                    self._changed.wait()
                if self._is_closed:
                    return
                self._is_computing = True
            item: Any
            try:
                item = produce()
            except BaseException as error:
                item = _Failure(error)
            with self._changed:
                self._is_computing = False
                has_ended = item is None or self._is_closed
                if not self._is_closed:
                    self._waiting.append(item)
                # An error references the frames that it went through, and one of them the iterator:
                # stored here while the thread waits, it would keep both alive.
                item = None
                self._changed.notify_all()
            if self._when_ready is not None:
                self._when_ready()


#: The consumer for which the thread reads ahead.
_channel: ThreadLocal[_Channel | None] = ThreadLocal(None)


def is_wanted() -> bool:
    """Whether the result that this thread waits for may still be needed."""
    return _channel.value is None or not _channel.value.is_closed


_open_channels: weakref.WeakSet[_Channel] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends all threads before the interpreter deletes what they use."""
    channels = list(_open_channels)
    for channel in channels:
        channel.close()
    for channel in channels:
        with contextlib.suppress(RuntimeError):
            channel.join(_GRACE / len(channels))
