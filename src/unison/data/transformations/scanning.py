"""`scan`: a function of a state that is passed from element to element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unison.data.functions import ElementFunction, note_place
from unison.data.plan import Plan, Stream, Transformation
from unison.data.specs import Signature
from unison.data.structure import Leaves, Structure, tuple_of


class Scan(Transformation):
    """The outputs of a function that is called with a state and every element.

    Args:
        source: The input.
        state: The leaves of the first state.
        state_structure: Their structure.
        function: Takes the state and an element; returns the next state and the output.
    """

    lasting = ("_function",)

    def __init__(
        self, source: Plan, state: Leaves, state_structure: Structure, function: ElementFunction
    ):
        super().__init__(source)
        self._state = state
        self._state_structure = state_structure
        self._function = function

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        (inner,) = inputs
        arguments = tuple_of(self._state_structure, inner.structure)
        state = Signature.of(self._state, self._state_structure)
        result = self._function.signature_of(Signature(arguments, state.specs + inner.specs))
        if result is None:
            return None
        self.check(result.structure)
        return Signature(result.structure.children[1], result.specs[len(self._state) :])

    @property
    def structure(self) -> Structure:
        if self._function.structure is not None:
            return self._function.structure.children[1]
        return self.signature.structure

    def check(self, result: Structure) -> None:
        """Raises a TypeError if the function does not return a state and an output."""
        if result.kind is not tuple or len(result.children) != 2:
            raise TypeError(
                "The function of scan must return a pair: the new state and the output. "
                f"Received: {result}"
            )
        if result.children[0] != self._state_structure:
            raise TypeError(
                "The state that the function of scan returns must have the structure of the first "
                f"one, {self._state_structure}. Received: {result.children[0]}"
            )

    def _stream(self) -> Stream:
        return _ScanStream(self, self._input.stream(), self._state, self._function.begin())

    def step(self, state: Leaves, element: Leaves, epoch: Any, index: int) -> tuple[Leaves, Leaves]:
        """Returns the next state and the output."""
        arguments = tuple_of(self._state_structure, self._input.structure)
        try:
            leaves = self._function(state + element, arguments, epoch, index)
            assert self._function.structure is not None
            self.check(self._function.structure)
        except Exception as error:
            note_place(error, "scan", index)
            raise
        return leaves[: len(state)], leaves[len(state) :]


class _ScanStream(Stream):
    moving = ("_stream", "_state", "_position")

    def __init__(self, plan: Scan, stream: Stream, state: Leaves, epoch: Any):
        self._plan = plan
        self._stream = stream
        self._state = state
        self._epoch = epoch
        self._position = 0

    def next(self) -> Leaves | None:
        element = self._stream.next()
        if element is None:
            return None
        self._state, output = self._plan.step(self._state, element, self._epoch, self._position)
        self._position += 1
        return output
