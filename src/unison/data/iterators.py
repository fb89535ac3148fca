"""Iterators over datasets, and the optional elements that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from unison.data.plan import Plan, Reading
from unison.data.specs import ArraySpec
from unison.data.state import check_like, decode, encode
from unison.data.statistics import InputStatistics, Meter
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError, OpError, OutOfRangeError
from unison.lifting import current_lift
from unison.runtime import uncaught
from unison.storage.decoding import corrupt, decoding, raised_by
from unison.tracebacks import filter_traceback

_NOTHING = object()

#: What a state consists of, and the number of its format.
_KEYS = ("version", "pipeline", "position", "data")

_REMEDY = "Begin a new epoch, or take another checkpoint."
_VERSION = 1


class ElementIterator:
    """The elements of a dataset, one after the other.

    Args:
        elements: The elements.
        element_spec: What the elements are; called when somebody asks.
        optional: The class of the optional elements.

    Examples:
        Going on in the middle of a pass, here with another iterator, elsewhere in another process:

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
        """What the elements are."""
        return self._element_spec()

    def __iter__(self) -> Iterator[Any]:
        return self

    @filter_traceback
    def __next__(self) -> Any:
        require_python("Taking the next element of a dataset")
        return self._meter.next(self._elements)

    def statistics(self) -> InputStatistics:
        """Returns how many elements were given, and how long the loop waited for them.

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
            OutOfRangeError: There is none left.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(message="End of sequence") from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or the word that there is none."""
        try:
            return self._optional(next(self), self._element_spec)
        except StopIteration:
            return self._optional(_NOTHING, self._element_spec)

    def get_state(self) -> dict[str, Any]:
        """Returns where the iterator is.

        What waits in the buffers of transformations (`shuffle`, `window`, `prefetch`) is part of
        it; what can be computed again, as the order of a shuffled array, is not. A `Checkpoint`
        that is given the iterator saves it.

        Returns:
            Text and arrays, for `set_state`; nothing in it needs pickling.

        Raises:
            TypeError: A buffer holds what cannot be kept, or the elements are no pipeline's.
        """
        return self._pipeline.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where another iterator over an equal dataset was; the next passes, too.

        A generator is read anew up to there; every other source is entered where it was left.

        Args:
            state: What its `get_state` returned.

        Raises:
            ValueError: It is the state of another pipeline. The iterator stays where it is.
        """
        self._pipeline.set_state(state)

    @property
    def _pipeline(self) -> PlanElements:
        if not isinstance(self._elements, PlanElements):
            raise TypeError(
                "Only an iterator over a Dataset knows where it is. Received: "
                f"{self!r} over {self._elements!r}. Make a Dataset of what it goes over, with "
                "Dataset.from_generator, say."
            )
        return self._elements


class Optional:
    """An element, or none: what `get_next_as_optional` returns.

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
        """Returns the word that there is no element."""
        return cls(_NOTHING, lambda: element_spec)

    @property
    def element_spec(self) -> Any:
        """What the element is."""
        return self._element_spec()

    def has_value(self) -> Any:
        """Whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
            InvalidArgumentError: There is none.
        """
        if self._value is _NOTHING:
            raise InvalidArgumentError(message="The given optional does not have a value.")
        return self._value


class PlanElements(Iterator[Any]):
    """The elements of a plan, with the structure around their leaves.

    After an error it goes on with the element behind.

    Args:
        plan: The plan.
        shown: Makes what is seen of a leaf.
    """

    def __init__(self, plan: Plan, shown: Callable[[Any], Any]):
        self._plan = plan
        self._reading = Reading(plan)
        self._shown = shown

    def get_state(self) -> dict[str, Any]:
        """Returns where they are; see `ElementIterator.get_state`."""
        position, data = encode(self._reading.state())
        pipeline = self._plan.description
        return {"version": _VERSION, "pipeline": pipeline, "position": position, "data": data}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where others were; see `ElementIterator.set_state`."""
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
        with decoding("The position of an iterator", _REMEDY):
            check_like(position, self._reading.state())
        try:
            self._reading.restore(position)
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            # A function of the user's may fail as well, where elements are read again.
            if isinstance(error, OpError) or not raised_by(error, "unison", "numpy"):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise corrupt("The position of an iterator", reason, _REMEDY) from error

    def __next__(self) -> Any:
        leaves = self._reading.stream.next()
        if leaves is None:
            raise StopIteration
        return self._plan.structure.pack([self._shown(leaf) for leaf in leaves])


def require_python(what: str) -> None:
    """Raises where a program is being traced, of which every run would see the same element."""
    lift = current_lift()
    needs_python(what)
    if lift is not None:
        raise RuntimeError(
            f"{what} inside a function that strategy.run is tracing would happen once, and every "
            "step would see the same elements. Take them outside, and pass them as arguments."
        )
