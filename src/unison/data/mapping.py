"""`map`: a function of every element, of whole blocks where it can be, in threads where asked."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from unison.data.functions import BlockFunction, ElementFunction, note_place
from unison.data.leaves import count_rows
from unison.data.plan import (
    AUTOTUNE,
    Plan,
    Rows,
    Stream,
    Transformation,
)
from unison.data.specs import Signature
from unison.data.structure import Leaves, Structure
from unison.errors import InvalidArgumentError

#: Under `AUTOTUNE`, a call that takes so many seconds is worth a thread.
_SECONDS_WORTH_A_THREAD = 5e-4

#: How many calls `AUTOTUNE` measures; the first one, which may compile, does not count.
_MEASURED_CALLS = 4


class Map(Transformation):
    """The function of every element.

    Args:
        source: The input.
        function: What is computed.
        parallel_calls: How many threads compute; None for none, `AUTOTUNE` to measure first.
        is_ordered: Whether the results come in the order of the elements.

    Raises:
        InvalidArgumentError: `parallel_calls` is no number of threads.
    """

    def __init__(
        self,
        source: Plan,
        function: ElementFunction,
        parallel_calls: int | None = None,
        is_ordered: bool = True,
    ):
        check_parallel_calls(parallel_calls)
        super().__init__(source)
        self._function = function
        self._parallel_calls = parallel_calls
        self._is_ordered = is_ordered

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return self._function.signature_of(inputs[0])

    @property
    def structure(self) -> Structure:
        if self._function.structure is not None:
            return self._function.structure
        return self.signature.structure

    def rows(self) -> Rows | None:
        rows = self._input.rows()
        block_function = None if rows is None else self._on_blocks()
        if rows is None or block_function is None:
            return None
        return _MappedRows(rows, block_function)

    def _on_blocks(self) -> BlockFunction | None:
        inputs = self._input.known_signature
        if inputs is None or not inputs.is_static:
            return None
        return self._function.on_blocks(inputs)

    def _stream(self) -> Stream:
        stream = self._input.stream()
        block_function = self._on_blocks()
        if block_function is not None:
            return _BlockMapStream(stream, block_function)
        calls = _Calls(stream, self._input, self._function)
        if self._parallel_calls is None or self._parallel_calls == 1:
            return _MapStream(calls)
        return _ParallelMapStream(calls, self._function, self._parallel_calls, self._is_ordered)


def check_parallel_calls(count: int | None) -> None:
    """Raises an InvalidArgumentError where `num_parallel_calls` is no number of threads."""
    if count is not None and count != AUTOTUNE and count < 1:
        raise InvalidArgumentError(
            message="Expected num_parallel_calls to be a positive number, tf.data.AUTOTUNE or "
            f"None. Received: {count}"
        )


class _MappedRows(Rows):
    def __init__(self, rows: Rows, function: BlockFunction):
        self._rows = rows
        self._function = function

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Leaves:
        return self._function(self._rows.take(indices), indices)

    def slice(self, start: int, stop: int) -> Leaves:
        return self._function(self._rows.slice(start, stop), np.arange(start, stop))


class _BlockMapStream(Stream):
    """A function that takes whole blocks."""

    def __init__(self, stream: Stream, function: BlockFunction):
        self._stream = stream
        self._function = function
        self._position = 0

    def next(self) -> Leaves | None:
        block = self.next_block(1)
        return None if block is None else tuple(leaf[0] for leaf in block)

    def next_block(self, count: int) -> Leaves | None:
        block = self._stream.next_block(count)
        if block is None:
            return None
        start = self._position
        self._position += count_rows(block)
        return self._function(block, np.arange(start, self._position))


class _Calls:
    """The calls of a function that are still to be made, one an element."""

    def __init__(self, stream: Stream, source: Plan, function: ElementFunction):
        self._stream = stream
        self._source = source
        self._function = function
        self._epoch = function.begin()
        self._position = 0

    def next(self) -> Callable[[], Leaves] | None:
        """Returns the next call; None at the end."""
        element = self._stream.next()
        if element is None:
            return None
        index = self._position
        self._position += 1

        def call() -> Leaves:
            try:
                return self._function(element, self._source.structure, self._epoch, index)
            except Exception as error:
                note_place(error, self._function.stage, index)
                raise

        return call


class _MapStream(Stream):
    """One call after the other."""

    def __init__(self, calls: _Calls):
        self._calls = calls

    def next(self) -> Leaves | None:
        call = self._calls.next()
        return None if call is None else call()


class _ThreadedMapStream(Stream):
    """Calls in several threads, no more of them waiting than there are threads.

    The threads end when the stream is dropped, or the calls have ended.
    """

    def __init__(self, calls: _Calls, threads: int, is_ordered: bool):
        self._calls = calls
        self._threads = threads
        self._is_ordered = is_ordered
        self._executor: ThreadPoolExecutor | None = None
        self._running: collections.deque[Future[Leaves]] = collections.deque()
        self._has_ended = False

    def next(self) -> Leaves | None:
        while not self._has_ended and len(self._running) < self._threads:
            call = self._calls.next()
            if call is None:
                self._has_ended = True
            else:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(self._threads, "unison-data-map")
                self._running.append(self._executor.submit(call))
        if not self._running:
            self._executor = None
            return None
        if self._is_ordered:
            return self._running.popleft().result()
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        first = next(future for future in self._running if future in done)
        self._running.remove(first)
        return first.result()


class _ParallelMapStream(Stream):
    """Calls that are made in threads, if that turns out to be right and worth while.

    Calls that depend on each other are made one after the other. Under `AUTOTUNE`, so are those
    that take less time than handing them to a thread.
    """

    def __init__(
        self, calls: _Calls, function: ElementFunction, parallel_calls: int, is_ordered: bool
    ):
        self._calls = calls
        self._function = function
        self._parallel_calls = parallel_calls
        self._is_ordered = is_ordered
        self._seconds: list[float] = []
        self._chosen: Stream | None = None

    def next(self) -> Leaves | None:
        if self._chosen is not None:
            return self._chosen.next()
        call = self._calls.next()
        if call is None:
            return None
        begin = time.perf_counter()
        element = call()
        self._seconds.append(time.perf_counter() - begin)
        if self._parallel_calls != AUTOTUNE or len(self._seconds) > _MEASURED_CALLS:
            self._chosen = self._choose()
        return element

    def _choose(self) -> Stream:
        threads = self._parallel_calls
        if threads == AUTOTUNE:
            is_worth_it = min(self._seconds[1:]) > _SECONDS_WORTH_A_THREAD
            threads = (os.cpu_count() or 1) if is_worth_it else 1
        if threads == 1 or self._function.is_stateful:
            return _MapStream(self._calls)
        return _ThreadedMapStream(self._calls, threads, self._is_ordered)
