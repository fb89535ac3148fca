"""Iterators over datasets, and the optional elements that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from unison.data.plan import Plan
from unison.data.specs import ArraySpec
from unison.errors import InvalidArgumentError, OutOfRangeError
from unison.lifting import current_lift
from unison.stepping import needs_python

_NOTHING = object()


class ElementIterator:
    """The elements of a dataset, one after the other.

    Args:
        elements: The elements.
        element_spec: What the elements are; called when somebody asks.
        optional: The class of the optional elements.

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

    @property
    def element_spec(self) -> Any:
        """What the elements are."""
        return self._element_spec()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        require_python("Taking the next element of a dataset")
        return next(self._elements)

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
        self._stream = plan.stream()
        self._shown = shown

    def __next__(self) -> Any:
        leaves = self._stream.next()
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
