"""Users' functions for `map`, `filter` and similar transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves, Structure, flatten

#: A function of stacked elements: takes a block and the elements' numbers.
BlockFunction = Callable[[Leaves, np.ndarray], Leaves]


class ElementFunction:
    """A user's function of elements, as the streams call it: leaves in, leaves out.

    An element that is a tuple is passed as several arguments, as in TensorFlow. A list in the
    result is a tuple of leaves.

    Args:
        function: The function.
        stage: The transformation's name, for messages.
        shown: Converts a leaf to the function's argument: a plan, for example, to its dataset.
        as_leaf: Converts a result to a leaf.
    """

    #: Whether a call depends on earlier calls: on variables, on a stream of random numbers.
    is_stateful = False

    def __init__(
        self,
        function: Callable[..., Any],
        stage: str,
        shown: Callable[[Any], Any],
        as_leaf: Callable[[Any], Any],
    ):
        if not callable(function):
            raise ValueError(f"{stage} needs a function to call. Received: {function!r}")
        self.user_function = function
        self.stage = stage
        self._shown = shown
        self._as_leaf = as_leaf
        #: The structure of the results; known after the first call.
        self.structure: Structure | None = None

    def state(self) -> State:
        """Returns the state of earlier calls that affects later passes."""
        return None

    def restore(self, state: State) -> None:
        """Restores the state of earlier calls of an equal function."""

    def begin_passes_at(self, number: int) -> None:
        """Lets the next pass be pass `number`, which determines its random numbers."""

    def begin(self) -> Any:
        """Returns the common part of the calls of one pass over the elements."""
        return None

    def __call__(
        self, leaves: Leaves, structure: Structure, epoch: Any = None, index: int = 0
    ) -> Leaves:
        """Returns the leaves of the function's result.

        Args:
            leaves: The leaves of the element.
            structure: The structure of the element.
            epoch: The result of `begin` for this pass; None for a call outside of a pass.
            index: The element's number.

        Raises:
            TypeError: The result's structure differs from that of the earlier ones.
        """
        shown = map(self._shown, leaves)
        if structure.is_flat_tuple:
            result = self.user_function(*shown)
        else:
            result = self.call_with(structure.pack(tuple(shown)))
        return tuple(map(self._as_leaf, self.flatten(result)))

    def for_rows(self, structure: Structure, epoch: Any) -> Callable[[Leaves, int], Leaves]:
        """Returns the function of the rows of stacked elements, and their numbers.

        Its result is written into arrays: it does not have to be leaves yet.
        """
        del epoch
        function, flatten = self.user_function, self.flatten
        if structure.is_flat_tuple:
            return lambda leaves, index: flatten(function(*leaves))
        return lambda leaves, index: flatten(self.call_with(structure.pack(leaves)))

    def as_leaves(self, results: Leaves) -> Leaves:
        """Returns results as leaves."""
        return tuple(map(self._as_leaf, results))

    def call_with(self, element: Any) -> Any:
        """Calls the function with an element."""
        # A named tuple is one argument.
        return (
            self.user_function(*element) if type(element) is tuple else self.user_function(element)
        )

    def flatten(self, result: Any) -> Leaves:
        """Returns a result's values at the positions of the leaves."""
        if self.structure is None:
            leaves, structure = flatten(as_tuple(result))
            if not leaves:
                raise TypeError(
                    f"The function of {self.stage} must return something. Received: {result!r}"
                )
            self.structure = structure
            return leaves
        try:
            leaves = self.structure.flatten(result)
            for leaf in leaves:
                if isinstance(leaf, tuple | dict):
                    raise ValueError(f"Expected: {self.structure}, received: {result!r}")
            return leaves
        except ValueError as error:
            raise TypeError(
                f"The function of {self.stage} must return the same structure every time. {error}"
            ) from error

    def adopt(self, structure: Structure) -> None:
        """Records the structure of results in another process.

        Raises:
            TypeError: It differs from that of earlier results.
        """
        if self.structure is None:
            self.structure = structure
        elif self.structure != structure:
            raise TypeError(
                f"The function of {self.stage} must return the same structure every time. "
                f"Expected: {self.structure}. Received: {structure}"
            )

    def signature_of(self, inputs: Signature) -> Signature | None:
        """Returns the signature of the results; None if only a call would determine it."""
        del inputs
        return None

    def on_text_blocks(
        self, sample: Leaves, structure: Structure, most_callers: int
    ) -> BlockFunction | None:
        """Returns the function of stacked elements with text; None if it takes one element at
        time.

        Args:
            sample: The leaves of one of the elements.
            structure: Their structure.
            most_callers: The number of threads that may compute elements.
        """
        del sample, structure, most_callers
        return None

    def on_blocks(self, inputs: Signature) -> BlockFunction | None:
        """Returns the function of stacked elements; None if it takes one element at a time.

        Args:
            inputs: The signature of the elements.
        """
        del inputs
        return None


def as_it_is(leaf: Any) -> Any:
    """Returns the argument for a leaf, of functions that are called with NumPy's types."""
    return leaf


def as_truth(leaves: Leaves, stage: str) -> bool:
    """Returns the result of a predicate.

    Raises:
        ValueError: It is not a truth value.
    """
    answer = leaves[0]
    if len(leaves) == 1 and isinstance(answer, np.bool_):
        return bool(answer)
    raise ValueError(f"The predicate of {stage} must return one bool. Received: {leaves!r}")


def as_tuple(result: Any) -> Any:
    """Returns a function's result; a list is returned as a tuple."""
    return tuple(result) if type(result) is list else result


def note_batch(error: Exception, stage: str, start: int) -> None:
    """Adds a note to an error that names the elements of the batch."""
    error.add_note(f"In {stage}, where element 0 of the batch is element {start} of its input.")


def note_place(error: Exception, stage: str, index: int) -> None:
    """Adds a note to an error that names the stage of the pipeline."""
    error.add_note(f"In the function of {stage}, called for element {index} of the dataset.")
