"""Plans: the sources and transformations of a dataset, and the computation of its elements.

A `Dataset` is a plan: a tree of `Plan`s, one for each source and transformation. Iterating opens
a `Stream` for each plan, which has a position. Where the semantics permit, elements
are computed as whole blocks:

* `Stream.next_block` returns consecutive elements stacked, for `batch`;
* `Plan.rows` is access by index, with which `shuffle` permutes numbers and not elements.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from unison.data.leaves import NestedDataset, stack
from unison.data.specs import Signature
from unison.data.state import State, check_like, is_same, restored, state_of
from unison.data.structure import Leaves, Structure
from unison.storage.decoding import plain_dict

#: The cardinality of a dataset that never ends. TF: `tf.data.INFINITE_CARDINALITY`.
INFINITE = -1

#: The cardinality of a dataset whose length is known only after iterating.
#: TF: `tf.data.UNKNOWN_CARDINALITY`.
UNKNOWN = -2

#: The library chooses: a number of threads, the size of a buffer. TF: `tf.data.AUTOTUNE`.
AUTOTUNE = -1


class Stream(abc.ABC):
    """The elements of a plan, from the first; opened by `Plan.stream`.

    Its attributes determine the next element. Those that change with reading are
    named in `moving`; their values are the stream's state.
    """

    #: The attributes that change with reading. They hold numbers, text, arrays, elements, random
    #: generators, other streams, and lists of these.
    moving: ClassVar[Sequence[str]] = ()

    def state(self) -> State:
        """Returns the position of the stream; see `restore`."""
        if not self.moving:
            raise TypeError(
                f"{type(self).__qualname__} must name in `moving` what reading changes."
            )
        return {name: state_of(getattr(self, name)) for name in self.moving}

    def restore(self, state: State) -> None:
        """Resumes at the position of another stream of the same plan, also of another process.

        Args:
            state: The result of its `state`.

        Raises:
            ValueError: It is the state of another kind of stream.
        """
        if not isinstance(state, dict) or not state.keys() >= {*self.moving}:
            raise ValueError(
                f"Expected the state of a {type(self).__qualname__}, which has {self.moving}. "
                f"Received: {state!r}"
            )
        for name in self.moving:
            setattr(self, name, restored(getattr(self, name), state[name]))

    @abc.abstractmethod
    def next(self) -> Leaves | None:
        """Returns the next element; None at the end, also in further calls."""

    def next_block(self, count: int) -> Leaves | None:
        """Returns up to `count` of the next elements, stacked; None at the end.

        Raises:
            InvalidArgumentError: They have different shapes.
        """
        elements: list[Leaves] = []
        while len(elements) < count and (element := self.next()) is not None:
            elements.append(element)
        return stack(elements) if elements else None

    def skip(self, count: int) -> int:
        """Skips the next `count` elements; returns how many there were: fewer at the end."""
        for skipped in range(count):
            if self.next() is None:
                return skipped
        return count


class Rows(abc.ABC):
    """The elements of a plan, by index."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> Leaves:
        """Returns the elements at `indices`, in that order, stacked."""

    def slice(self, start: int, stop: int) -> Leaves:
        """Returns the elements from `start` up to `stop`, stacked."""
        return self.take(np.arange(start, stop))

    def element(self, index: int) -> Leaves:
        """Returns one element."""
        return tuple(leaf[0] for leaf in self.slice(index, index + 1))


class RowsStream(Stream):
    """The rows in order."""

    moving = ("_position",)

    def __init__(self, rows: Rows):
        self._rows = rows
        self._position = 0

    def next(self) -> Leaves | None:
        if self._position >= len(self._rows):
            return None
        self._position += 1
        return self._rows.element(self._position - 1)

    def next_block(self, count: int) -> Leaves | None:
        start = self._position
        stop = min(start + count, len(self._rows))
        if start >= stop:
            return None
        self._position = stop
        return self._rows.slice(start, stop)

    def skip(self, count: int) -> int:
        count = max(0, min(count, len(self._rows) - self._position))
        self._position += count
        return count


class Observer(Protocol):
    """Opens streams and access by index itself, to observe them."""

    def stream(self, plan: Plan, open_stream: Callable[[], Stream]) -> Stream:
        """Returns a stream of `plan`, as `open_stream` does."""
        ...

    def rows(self, plan: Plan, open_rows: Callable[[], Rows | None]) -> Rows | None:
        """Returns access by index to `plan`, as `open_rows` does."""
        ...


#: Observes all that is opened; None if nothing does. See `unison.data.statistics.timing`.
observer: Observer | None = None


def _observed(rows: Callable[[Any], Rows | None]) -> Callable[[Any], Rows | None]:
    """Returns a plan's method `rows`, with which the observer opens them."""

    @functools.wraps(rows)
    def opened(self: Plan) -> Rows | None:
        if observer is None:
            return rows(self)
        return observer.rows(self, functools.partial(rows, self))

    return opened


class Plan(NestedDataset):
    """A source or a transformation.

    A subclass implements `_stream` or `rows`, and returns what is known of its elements in advance
    (`cardinality`, `signature_from`).
    """

    #: The name of the dataset in messages.
    name: ClassVar[str]
    inputs: Sequence[Plan] = ()

    #: The attributes that, with the inputs, distinguish it from other plans of its class: numbers,
    #: text, and tuples of them. A state of another plan is rejected.
    identity: ClassVar[Sequence[str]] = ()

    #: The attributes that passes change and later passes depend on: the number of passes.
    lasting: ClassVar[Sequence[str]] = ()
    #: Whether it is one worker's, where each reads a part of its own: its files, or the elements
    #: that it has stored.
    lasts_on_worker: ClassVar[bool] = False

    _found_signature: Signature | None = None

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__
        if "rows" in vars(cls):
            setattr(cls, "rows", _observed(vars(cls)["rows"]))  # noqa: B010

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        """Returns the signature of the elements, given those of the inputs.

        None if only an element would determine it.
        """
        del inputs
        return None

    @property
    def known_signature(self) -> Signature | None:
        """The signature of the elements; None if only an element would determine it."""
        inputs = [plan.known_signature for plan in self.inputs]
        known = [signature for signature in inputs if signature is not None]
        return self.signature_from(known) if len(known) == len(inputs) else None

    @property
    def signature(self) -> Signature:
        """The signature of the elements; computes the first one if nothing else determines it.

        Raises:
            ValueError: There is no element to compute.
        """
        # Not functools.cached_property: before Python 3.12 it holds one lock for all plans, also
        # while the first element is computed, for which threads may need another plan's signature.
        if self._found_signature is None:
            self._found_signature = self._find_signature()
        return self._found_signature

    def _find_signature(self) -> Signature:
        signature = self.signature_from([plan.signature for plan in self.inputs])
        if signature is not None:
            return signature
        with looking_at(self):
            first = self.stream().next()
        if first is None:
            raise ValueError(
                f"The element_spec of {self.name} is inferred from an element, and there is "
                "none. Use the element_spec of its source."
            )
        # One element does not determine the sizes of all.
        signature = Signature.of(first, self.structure)
        return signature.map(lambda spec: spec.with_unknown_sizes())

    @property
    def structure(self) -> Structure:
        """The structure of the elements; known once an element has been computed."""
        return self.signature.structure

    def cardinality(self) -> int:
        """Returns the number of elements, `INFINITE` or `UNKNOWN`."""
        return UNKNOWN

    def rows(self) -> Rows | None:
        """Returns access by index; None if it is not available."""
        return None

    def sample(self) -> Leaves | None:
        """Returns one of the elements, to try a function on; None if this would take long, or
        would have effects that users notice.
        """
        return None

    def stream(self) -> Stream:
        """Opens the elements, from the first."""
        return self._open() if observer is None else observer.stream(self, self._open)

    def _open(self) -> Stream:
        rows = self.rows()
        return self._stream() if rows is None else RowsStream(rows)

    def _stream(self) -> Stream:
        raise TypeError(f"The class of plans {self.name} must define `_stream`, or `rows`.")

    @property
    def opened(self) -> Sequence[Plan]:
        """The plans that its streams read: the inputs, and plans that choose between them."""
        return self.inputs

    @property
    def description(self) -> str:
        """The plan in one line, such as `Slices(length=9).Shuffle(buffer_size=5).Batch(size=2)`."""
        values = (f"{name.lstrip('_')}={getattr(self, name)!r}" for name in self.identity)
        own = f"{self.name}({', '.join(values)})"
        inputs = [plan.description for plan in self.opened]
        if len(inputs) > 1:
            return f"({', '.join(inputs)}).{own}"
        return ".".join([*inputs, own])

    def memory(self) -> State:
        """Returns the state of earlier passes that affects later ones."""
        return {name: state_of(getattr(self, name)) for name in self.lasting}

    def remember(self, memory: State) -> None:
        """Restores this state, of passes over an equal plan; see `memory`."""
        for name in self.lasting:
            setattr(self, name, restored(getattr(self, name), memory[name]))

    def with_inputs(self, inputs: Sequence[Plan]) -> Self:
        """Returns this transformation of other inputs."""
        made = copy.copy(self)
        made.inputs = tuple(inputs)
        made._found_signature = None  # which was that of the elements of these inputs
        return made

    @property
    def batch_size(self) -> int | None:
        """The number of examples in every element except the last ones; None if unknown."""
        signature = self.known_signature
        return None if signature is None else signature.batch_size


class Transformation(Plan):
    """Base of the plans of one input.

    Args:
        source: The input.
    """

    def __init__(self, source: Plan):
        self._input = source
        self.inputs = (source,)

    def with_inputs(self, inputs: Sequence[Plan]) -> Self:
        made = super().with_inputs(inputs)
        made._input = made.inputs[0]
        return made

    @property
    def structure(self) -> Structure:
        return self._input.structure

    def cardinality(self) -> int:
        return self._input.cardinality()


class SameElements(Transformation):
    """Base of the transformations that do not change elements."""

    def sample(self) -> Leaves | None:
        return self._input.sample()

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return inputs[0]

    @property
    def batch_size(self) -> int | None:
        return self._input.batch_size


class Reading:
    """The elements of a plan that is read, with a state at which reading can resume elsewhere.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        # The way in which the plan was opened may differ when the state is requested: a
        # cache may have been filled.
        self._before = memories_of(plan)
        #: The elements.
        self.stream = plan.stream()

    def state(self) -> State:
        """Returns its position, and the state of passes over the plan."""
        return {"before": self._before, **position_of(self._plan, self.stream)}

    def restore(self, state: State) -> None:
        """Resumes at the state of another one, of an equal plan; if it fails, nothing changes."""
        self.stream = stream_at(self._plan, state)
        self._before = state["before"]


def position_of(plan: Plan, stream: Stream) -> State:
    """Returns the position of a stream over `plan`, from which `stream_at` resumes."""
    memories = memories_of(plan)
    while True:
        position = {"plans": memories, "stream": stream.state()}
        memories = memories_of(plan)
        # Otherwise, a thread that reads ahead has begun another pass; it soon fills its
        # buffer.
        if is_same(memories, position["plans"]):
            return position


def stream_at(plan: Plan, position: State) -> Stream:
    """Opens the elements of `plan` at a position.

    Args:
        plan: The plan, or an equal one; see `Plan.description`.
        position: The result of `position_of`, or of `Reading.state`.
    """
    present = memories_of(plan)
    try:
        recall(plan, position.get("before", position["plans"]))
        stream = plan.stream()
        stream.restore(position["stream"])
    except BaseException:
        recall(plan, present)
        raise
    # Opening a stream counts a pass, but this one continues a pass.
    recall(plan, position["plans"])
    return stream


@contextlib.contextmanager
def looking_at(plan: Plan) -> Iterator[None]:
    """Inside, reading a plan does not count as a pass."""
    before = memories_of(plan)
    try:
        yield
    finally:
        recall(plan, before)


def memories_of(plan: Plan, of_all_workers: bool = False) -> list[State]:
    """Returns the state of earlier passes over a plan, and its inputs, that affects later ones.

    Transformations without such a state are left out, since an equal plan may lack them:
    options, batches of other sizes.

    Args:
        plan: The plan.
        of_all_workers: Whether each worker reads a part of its own, and gets the same state.
    """
    return [each.memory() for each in _remembering(plan, of_all_workers)]


def recall(plan: Plan, memories: Sequence[State], of_all_workers: bool = False) -> None:
    """Restores the state of passes over an equal plan; see `memories_of`.

    Raises:
        ValueError: It is the state of another number of transformations, or of other ones. Nothing
            is restored.
    """
    remembering = list(_remembering(plan, of_all_workers))
    if len(remembering) != len(memories):
        raise ValueError(
            f"Expected the states of {len(remembering)} transformations of {plan.description}. "
            f"Received: {len(memories)}."
        )
    for each, memory in zip(remembering, memories, strict=True):
        own = each.memory()
        if plain_dict(memory).keys() != own.keys():
            raise ValueError(f"expected the state of {[*own]}, received that of {[*memory]!r:.80}")
        check_like(memory, own)
    for each, memory in zip(remembering, memories, strict=True):
        each.remember(memory)


def _remembering(plan: Plan, of_all_workers: bool) -> Iterator[Plan]:
    for each in _tree(plan):
        if each.memory() and not (of_all_workers and each.lasts_on_worker):
            yield each


def _tree(plan: Plan) -> Iterator[Plan]:
    """Yields a plan, and its inputs."""
    yield plan
    for source in plan.opened:
        yield from _tree(source)
