"""`map`: a function of every element, of whole blocks if possible, in threads or processes."""

from __future__ import annotations

import abc
import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from unison.data.chunks import Chunk, ChunkFunction, ChunkReader, Outcome, Pace, Results
from unison.data.functions import BlockFunction, ElementFunction
from unison.data.leaves import concatenate, count_rows, is_text
from unison.data.plan import AUTOTUNE, Plan, Rows, Stream, Transformation
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves, Structure
from unison.data.workers.pool import WorkerPool
from unison.errors import InvalidArgumentError
from unison.interrupts import is_of_a_signal_handler
from unison.runtime.cores import available_cores
from unison.thread_pool import ThreadPool

#: Under `AUTOTUNE`, the seconds of a call from which on a thread pays.
_SECONDS_WORTH_A_THREAD = 5e-4

#: The number of consecutive rows that are computed at a time, and the factor by which it grows each
#: time: few sizes, because functions of tensors are compiled for each.
_MOST_COMPUTED = 256
_GROWTH = 16

#: The bytes of the rows that are computed at a time, if one row is not larger.
_MOST_BYTES = 1 << 25

#: The number of calls that `AUTOTUNE` measures; the first one, which may compile, is not counted.
_MEASURED_CALLS = 4


class Map(Transformation):
    """A function of every element.

    Args:
        source: The input.
        function: The function.
        parallel_calls: The number of threads or processes; None for none, `AUTOTUNE` to
            measure whether threads pay, or for as many processes as there are CPUs.
        is_ordered: Whether the results keep the order of the elements.
        executor: "thread" or "process".
        takes_blocks: Whether the function takes stacked elements.

    Raises:
        InvalidArgumentError: Invalid `parallel_calls` or `executor`.
    """

    identity = ("_takes_blocks",)
    lasting = ("function",)

    def __init__(
        self,
        source: Plan,
        function: ElementFunction,
        parallel_calls: int | None = None,
        is_ordered: bool = True,
        executor: str = "thread",
        takes_blocks: bool = False,
    ):
        check_parallel_calls(parallel_calls)
        if executor not in ("thread", "process"):
            raise InvalidArgumentError(
                message=f'Expected executor to be "thread" or "process". Received: {executor!r}'
            )
        super().__init__(source)
        #: The function.
        self.function = function
        self._parallel_calls = parallel_calls
        self._is_ordered = is_ordered
        #: Whether worker processes call it.
        self.in_processes = executor == "process"
        self._takes_blocks = takes_blocks
        self._pool: WorkerPool | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Another process makes processes and a lock of its own.
        return {**vars(self), "_pool": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def is_of_single_elements(self) -> bool:
        """Whether this process calls the function for any element, in any order: it gets nothing
        but the element.
        """
        is_plain = type(self.function) is ElementFunction
        return is_plain and not (self.in_processes or self._takes_blocks)

    @property
    def most_callers(self) -> int:
        """The number of threads, or processes, that may call the function."""
        count = self._parallel_calls or 1
        return available_cores() if count == AUTOTUNE else count

    def with_function(self, function: Any) -> Map:
        """Returns the same map with another function."""
        made = copy.copy(self)
        made.function = function
        made._pool, made._lock = None, threading.Lock()
        return made

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        if self.in_processes or self._takes_blocks:
            return None
        return self.function.signature_of(inputs[0])

    @property
    def structure(self) -> Structure:
        if self.function.structure is not None:
            return self.function.structure
        return self.signature.structure

    def rows(self) -> Rows | None:
        if self.in_processes or (self._takes_blocks and self._parallel_calls is not None):
            return None
        block_function = self._on_blocks()
        rows = None if block_function is None else self._input.rows()
        if rows is None or block_function is None:
            return None
        return _MappedRows(rows, block_function)

    def _on_blocks(self) -> BlockFunction | None:
        if self.in_processes:
            return None
        if self._takes_blocks:
            function = self._chunk_function()
            return lambda block, indices: function.of_block(block, int(indices[0]))
        inputs = self._input.known_signature
        if inputs is not None and inputs.is_static:
            return self.function.on_blocks(inputs)
        sample = self._input.sample()
        if sample is None or not any(map(is_text, sample)):
            return None
        return self.function.on_text_blocks(sample, self._input.structure, self.most_callers)

    def _chunk_function(self) -> ChunkFunction:
        source, epoch = self._input, self.function.begin()
        # If it were called before there is an element, a generator would run to determine the
        # structure. (And the worker processes, which end with `self`, would keep it alive.)
        return ChunkFunction(self.function, lambda: source.structure, self._takes_blocks, epoch)

    def _stream(self) -> Stream:
        if self.in_processes:
            return _AheadStream(ChunkReader(self._input), self._processes(), self._is_ordered)
        if not self._takes_blocks:
            block_function = self._on_blocks()
            if block_function is not None:
                return _BlockMapStream(self._input.stream(), block_function)
        inputs, function = ChunkReader(self._input), self._chunk_function()
        if self._parallel_calls is None or self._parallel_calls == 1:
            return _MapStream(inputs, function)
        return _ParallelMapStream(inputs, function, self._parallel_calls, self._is_ordered)

    def _processes(self) -> WorkerPool:
        """Returns the worker processes, which all passes over the dataset share."""
        with self._lock:
            if self._pool is None or self._pool.is_closed:
                self._pool = WorkerPool(self._chunk_function(), self.most_callers)
            return self._pool


def check_parallel_calls(count: int | None) -> None:
    """Raises an InvalidArgumentError if `num_parallel_calls` is not a number of threads."""
    if count is not None and count != AUTOTUNE and count < 1:
        raise InvalidArgumentError(
            message="Expected num_parallel_calls to be a positive number, tf.data.AUTOTUNE or "
            f"None. Received: {count}"
        )


class _MappedRows(Rows):
    """Rows that a function of blocks computes: growing blocks if they are taken in order."""

    def __init__(self, rows: Rows, function: BlockFunction):
        self._rows = rows
        self._function = function
        #: The results computed ahead, as one value: several threads may take rows.
        self._computed = _Computed(0, 0, ())

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Leaves:
        return self._function(self._rows.take(indices), indices)

    def slice(self, start: int, stop: int) -> Leaves:
        return self._function(self._rows.slice(start, stop), np.arange(start, stop))

    def element(self, index: int) -> Leaves:
        computed = self._computed
        if not computed.start <= index < computed.stop:
            computed = self._computed = self._compute(index, computed)
        return tuple(leaf[index - computed.start] for leaf in computed.block)

    def _compute(self, index: int, before: _Computed) -> _Computed:
        if index == before.stop and index:
            rows = before.stop - before.start
            of_row = sum(leaf.nbytes for leaf in before.block) // rows
            count = min(rows * _GROWTH, _MOST_COMPUTED, max(_MOST_BYTES // max(of_row, 1), 1))
            stop = min(index + count, len(self))
            try:
                return _Computed(index, stop, self.slice(index, stop))
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise
                # The row that fails may not have been requested.
        return _Computed(index, index + 1, self.slice(index, index + 1))


class _Computed(NamedTuple):
    """The rows from `start` up to `stop`, stacked."""

    start: int
    stop: int
    block: Leaves


class _BlockMapStream(Stream):
    """A function of whole blocks."""

    moving = ("_stream", "_position")

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


class _ResultsStream(Stream):
    """Base of the streams of results that are computed in chunks.

    Their state is the elements whose results have not been returned: the function is called
    for them again.
    """

    def __init__(self, inputs: ChunkReader):
        self._inputs = inputs
        self._results: Results | None = None

    @abc.abstractmethod
    def compute(self, missing: int, asked_for: int) -> Results | None:
        """Returns the next results; None at the end.

        Args:
            missing: The number of requested results.
            asked_for: The number of results that are requested at a time.
        """

    def _open(self, missing: int, asked_for: int) -> Results | None:
        if not self._results:
            self._results = self.compute(missing, asked_for)
        return self._results

    def next(self) -> Leaves | None:
        results = self._open(1, 1)
        return None if results is None else results.next()

    def next_block(self, count: int) -> Leaves | None:
        blocks: list[Leaves] = []
        missing = count
        while missing and (results := self._open(missing, count)) is not None:
            blocks.append(results.next_block(missing))
            missing -= count_rows(blocks[-1])
        return concatenate(blocks) if blocks else None

    def before(self) -> list[Chunk]:
        """Returns the elements that have been read and whose results have not been returned."""
        return [self._results.rest()] if self._results else []

    def state(self) -> State:
        return self._inputs.state_with(self.before())

    def restore(self, state: State) -> None:
        self._inputs.restore(state)
        self._results = None


class _MapStream(_ResultsStream):
    """Consecutive calls that are made when their results are requested."""

    def __init__(self, inputs: ChunkReader, function: ChunkFunction):
        super().__init__(inputs)
        self._function = function

    def next(self) -> Leaves | None:
        if self._results or self._function.takes_blocks:
            return super().next()
        chunk = self._inputs.read(1)
        return None if chunk is None else self._function.of_element(chunk[0], chunk.start)

    def compute(self, missing: int, asked_for: int) -> Results | None:
        chunk = self._inputs.read(self._function.count_for(missing))
        return None if chunk is None else Results(chunk, self._function(chunk))


class Crew(Protocol):
    """Threads or processes that call a function for chunks."""

    @property
    def most_under_way(self) -> int:
        """The number of chunks that should be in flight."""
        ...

    def size(self, asked_for: int) -> tuple[int, int]:
        """Returns the number of elements of a chunk, as two factors.

        Args:
            asked_for: The number of elements that are requested at a time, which limits the first
                factor.
        """
        ...

    def submit(self, chunk: Chunk) -> Ticket:
        """Submits a call of the function."""
        ...

    def wait(self, tickets: Sequence[Any]) -> None:
        """Waits until one of the calls has ended."""
        ...

    def rest(self) -> None:
        """Called when nothing is in flight, and nothing will be soon."""
        ...


class Ticket(Protocol):
    """A call in flight; a `concurrent.futures.Future` is one."""

    def done(self) -> bool: ...

    def result(self) -> Outcome: ...


class _Threads:
    """Threads that call a function. They end when this object is dropped."""

    def __init__(self, function: ChunkFunction, count: int):
        self._function = function
        self._count = count
        self._pace = Pace()
        self._executor: ThreadPool | None = None

    @property
    def most_under_way(self) -> int:
        return self._count

    def size(self, asked_for: int) -> tuple[int, int]:
        if self._function.takes_blocks:
            return self._function.count_for(asked_for), 1
        return min(asked_for, self._pace.elements()), 1

    def submit(self, chunk: Chunk) -> Ticket:
        if self._executor is None:
            self._executor = ThreadPool(self._count, "unison-data-map")
        return self._executor.submit(_timed, self._function, chunk, self._pace)

    def wait(self, tickets: Sequence[Any]) -> None:
        wait(tickets, return_when=FIRST_COMPLETED)

    def rest(self) -> None:
        self._executor = None


def _timed(function: ChunkFunction, chunk: Chunk, pace: Pace) -> Outcome:
    begin = time.perf_counter()
    outcome = function(chunk)
    pace.note(len(chunk), time.perf_counter() - begin)
    return outcome


class _Raised:
    """An error of the input, in its place among the calls."""

    def __init__(self, error: Exception):
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> Outcome:
        return [self._error]


class _AheadStream(_ResultsStream):
    """Calls that threads or processes make before their results are requested."""

    def __init__(self, inputs: ChunkReader, crew: Crew, is_ordered: bool):
        super().__init__(inputs)
        self._crew = crew
        self._is_ordered = is_ordered
        self._under_way: list[tuple[Chunk, Ticket]] = []

    def compute(self, missing: int, asked_for: int) -> Results | None:
        self._submit(asked_for)
        if not self._under_way:
            self._crew.rest()
            return None
        place = 0 if self._is_ordered else self._first_done()
        chunk, ticket = self._under_way[place]
        if not ticket.done():
            self._crew.wait([ticket])
        del self._under_way[place]
        return Results(chunk, ticket.result())

    def _submit(self, count: int) -> None:
        while len(self._under_way) < self._crew.most_under_way:
            try:
                chunk = self._inputs.read(*self._crew.size(count))
            except Exception as error:
                self._under_way.append((Chunk(0, elements=[]), _Raised(error)))
                return
            if chunk is None:
                return
            self._under_way.append((chunk, self._crew.submit(chunk)))

    def _first_done(self) -> int:
        tickets = [ticket for _, ticket in self._under_way]
        if not any(ticket.done() for ticket in tickets):
            self._crew.wait(tickets)
        return next(place for place, ticket in enumerate(tickets) if ticket.done())

    @property
    def num_ready(self) -> int:
        """The number of chunks that have been computed and not consumed."""
        return sum(ticket.done() for _, ticket in self._under_way)

    def before(self) -> list[Chunk]:
        return [*super().before(), *(chunk for chunk, _ in self._under_way if len(chunk))]

    def restore(self, state: State) -> None:
        super().restore(state)
        self._under_way = []


class _ParallelMapStream(_ResultsStream):
    """Calls that are made in threads, if this is correct and pays.

    Calls that depend on each other are made sequentially. Under `AUTOTUNE`, so are calls
    that take less time than passing them to a thread.
    """

    def __init__(
        self, inputs: ChunkReader, function: ChunkFunction, parallel_calls: int, is_ordered: bool
    ):
        super().__init__(inputs)
        self._function = function
        self._parallel_calls = parallel_calls
        self._is_ordered = is_ordered
        self._seconds: list[float] = []
        self._chosen: _ResultsStream | None = None

    def compute(self, missing: int, asked_for: int) -> Results | None:
        if self._chosen is not None:
            return self._chosen.compute(missing, asked_for)
        chunk = self._inputs.read(
            self._function.count_for(missing if self._function.takes_blocks else 1)
        )
        if chunk is None:
            return None
        begin = time.perf_counter()
        outcome = self._function(chunk)
        self._seconds.append(time.perf_counter() - begin)
        if self._parallel_calls != AUTOTUNE or len(self._seconds) > _MEASURED_CALLS:
            self._chosen = self._choose()
        return Results(chunk, outcome)

    def _choose(self) -> _ResultsStream:
        threads = self._parallel_calls
        if threads == AUTOTUNE:
            is_worth_it = min(self._seconds[1:]) > _SECONDS_WORTH_A_THREAD
            threads = available_cores() if is_worth_it else 1
        if threads == 1 or self._function.function.is_stateful:
            return _MapStream(self._inputs, self._function)
        return _AheadStream(self._inputs, _Threads(self._function, threads), self._is_ordered)

    def before(self) -> list[Chunk]:
        return [*super().before(), *(self._chosen.before() if self._chosen is not None else [])]

    def restore(self, state: State) -> None:
        super().restore(state)
        self._chosen = None
