"""Iterators over datasets, and the optional elements that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from unison.data.plan import Plan, Reading
from unison.data.specs import ArraySpec
from unison.data.state import decode, encode, restore_checked
from unison.data.statistics import InputStatistics, Meter
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError, OutOfRangeError
from unison.lifting import current_lift
from unison.runtime import uncaught
from unison.tracebacks import filter_traceback

_NOTHING = object()

#: The parts of a state, and the version of its format.
_KEYS = ("version", "pipeline", "position", "data")

_VERSION = 1


class ElementIterator:
    """The consecutive elements of a dataset.

    Args:
        elements: The elements.
        element_spec: Returns their specs.
        optional: The class of the optional elements.

    Examples:
        Resuming in the middle of a pass, here with another iterator, elsewhere in another process:

        >>> from unison.data import Dataset
        >>> dataset = Dataset.range(6).shuffle(6, seed=1).batch(2)
        >>> iterator, other = iter(dataset), iter(dataset)
        >>> _ = next(iterator)
        >>> other.set_state(iterator.get_state())
        >>> [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]
        True

    TF: `tf.data.Iterator`.
    """

    def __init__(
        self,
        elements: Iterator[Any],
        element_spec: Callable[[], Any],
        optional: type[Optional] | None = None,
    ):
        self._elements = elements
        self._element_spec = element_spec
        self._optional = optional or Optional
        self._meter = Meter()
        uncaught.install()

    @property
    def element_spec(self) -> Any:
        """The specs of the elements."""
        return self._element_spec()

    def __iter__(self) -> Iterator[Any]:
        return self

    @filter_traceback
    def __next__(self) -> Any:
        require_python("Taking the next element of a dataset")
        return self._meter.next(self._elements)

    def statistics(self) -> InputStatistics:
        """Returns the number of returned elements, and the time for which the loop waited for them.

        Examples:
            >>> from unison.data import Dataset
            >>> iterator = iter(Dataset.range(6).batch(2))
            >>> for batch in iterator:
            ...     pass
            >>> iterator.statistics().elements
            3
        """
        return self._meter.statistics()

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
            OutOfRangeError: There is no further element.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(message="End of sequence") from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element as an optional, which is empty at the end."""
        try:
            return self._optional(next(self), self._element_spec)
        except StopIteration:
            return self._optional(_NOTHING, self._element_spec)

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the iterator.

        The buffers of transformations (`shuffle`, `window`, `prefetch`) are part of
        it; what can be computed again, such as the order of a shuffled array, is not. A
        `Checkpoint` that contains the iterator saves it.

        Returns:
            Text and arrays, for `set_state`; nothing in it needs pickling.

        Raises:
            TypeError: A buffer holds what cannot be saved, or the elements are not a pipeline's.
        """
        return self._pipeline.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes at the position of another iterator over an equal dataset; the next passes, too.

        A generator is read again up to the position; all other sources resume directly.

        Args:
            state: The result of `get_state`.

        Raises:
            ValueError: It is the state of another pipeline. The iterator keeps its position.
        """
        self._pipeline.set_state(state)

    @property
    def _pipeline(self) -> PlanElements:
        if not isinstance(self._elements, PlanElements):
            raise TypeError(
                "Only an iterator over a Dataset has a position to save. Received: "
                f"{self!r} over {self._elements!r}. Make a Dataset of what it iterates over, with "
                "Dataset.from_generator, say."
            )
        return self._elements


class Optional:
    """An element, or none: the result of `get_next_as_optional`.

    TF: `tf.experimental.Optional`.
    """

    def __init__(self, value: Any, element_spec: Callable[[], Any]):
        self._value = value
        self._element_spec = element_spec

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """Returns `value` as an optional element."""
        return cls(value, lambda: ArraySpec.like(value))

    @classmethod
    def empty(cls, element_spec: Any) -> Self:
        """Returns the empty optional."""
        return cls(_NOTHING, lambda: element_spec)

    @property
    def element_spec(self) -> Any:
        """The specs of the element."""
        return self._element_spec()

    def has_value(self) -> Any:
        """Whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
            InvalidArgumentError: It is empty.
        """
        if self._value is _NOTHING:
            raise InvalidArgumentError(message="The given optional does not have a value.")
        return self._value


class PlanElements(Iterator[Any]):
    """The elements of a plan, with the structure around their leaves.

    After an error, it continues with the next element.

    Args:
        plan: The plan.
        shown: Converts a leaf for the user.
    """

    def __init__(self, plan: Plan, shown: Callable[[Any], Any]):
        self._plan = plan
        self._reading = Reading(plan)
        self._shown = shown

    def get_state(self) -> dict[str, Any]:
        """Returns their position; see `ElementIterator.get_state`."""
        position, data = encode(self._reading.state())
        pipeline = self._plan.description
        return {"version": _VERSION, "pipeline": pipeline, "position": position, "data": data}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes at another position; see `ElementIterator.set_state`."""
        texts = "pipeline", "position"
        has_keys = isinstance(state, dict) and state.keys() == {*_KEYS}
        if not has_keys or not all(isinstance(state[key], str) for key in texts):
            raise ValueError(
                "Expected what get_state of an iterator over a Dataset has returned. Received: "
                f"{str(state)[:1000]}"
            )
        pipeline = self._plan.description
        if (state["version"], state["pipeline"]) != (_VERSION, pipeline):
            version = str(state["version"])[:20]
            raise ValueError(
                f"The state is one of another pipeline. Expected: {pipeline} (version {_VERSION}). "
                f"Received: {state['pipeline'][:1000]} (version {version}). Make the dataset as it "
                "was when the state was saved, or begin a new epoch."
            )
        position = decode(state["position"], state["data"])
        restore_checked(self._reading, position)

    def __next__(self) -> Any:
        leaves = self._reading.stream.next()
        if leaves is None:
            raise StopIteration
        return self._plan.structure.pack([self._shown(leaf) for leaf in leaves])


def require_python(what: str) -> None:
    """Raises if a program is being traced: every run of it would use the same element."""
    lift = current_lift()
    needs_python(what)
    if lift is not None:
        raise RuntimeError(
            f"{what} inside a function that strategy.run is tracing would happen once, and every "
            "step would see the same elements. Take them outside, and pass them as arguments."
        )
