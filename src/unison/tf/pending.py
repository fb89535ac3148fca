"""Text that is there when a pipeline runs, while its function is being traced.

JAX traces no text. Where the function of `tf.data`'s `map` gets text, operations that make numbers
of it (`tf.io.parse_example`, `tf.io.decode_raw`) are taken out of what is compiled: in a run they
are computed before it, and the program gets the numbers. Where an element is one string, they are
computed for whole blocks of elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from unison.data.structure import Structure, flatten
from unison.eager_fallback import NeedsPythonError
from unison.tf import dtypes
from unison.tf.tensor_spec import TensorShape

#: Takes an array of text: an element's, or those of the elements of a block, stacked. Returns
#: arrays, stacked likewise, with a structure around them.
TextOperation = Callable[[np.ndarray], Any]


class PendingText:
    """A tensor of strings, whose value only a run has.

    Args:
        host: The operations on text of the function that is being traced.
        place: Which of the texts it is.
        shape: Its shape.
        is_in_block: Whether operations get the texts of a block, stacked.
    """

    dtype = dtypes.string
    # Text compares by value, and is no key.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: HostOperations, place: int, shape: tuple[int, ...], is_in_block: bool):
        self._host = host
        self.place = place
        self.shape = TensorShape(shape)
        self.is_in_block = is_in_block

    def get_shape(self) -> TensorShape:
        return self.shape

    def through(self, operation: TextOperation) -> Any:
        """Returns the program's form of an operation's results for this text."""
        return self._host.through(self, operation)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NeedsPythonError("The function asks for the value of a string.")

    def __getattr__(self, name: str) -> NoReturn:
        raise NeedsPythonError(f"The function asks for {name} of a string.")

    __array__ = __bool__ = __bytes__ = __eq__ = __ne__ = __add__ = __radd__ = __getitem__ = _refuse
    __format__ = __iter__ = __len__ = __str__ = _refuse


@dataclasses.dataclass
class HostOperation:
    """An operation on text.

    Attributes:
        place: Which of the texts.
        operation: What is computed of it.
        structure: The structure of the results.
        kinds: The shapes and dtypes of the results, for an element.
    """

    place: int
    operation: TextOperation
    structure: Structure
    kinds: list[tuple[tuple[int, ...], np.dtype]]


class HostOperations:
    """The operations on text that run before a program, in order.

    A function is traced once more for each operation that it turns out to ask for.

    Args:
        sample: The texts of an element, or those of the elements of a block, stacked.
        is_block: Whether it is a block.
    """

    def __init__(self, sample: Sequence[np.ndarray], is_block: bool):
        self._samples = list(sample)
        self._is_block = is_block
        self._given = len(self._samples)
        self._known: list[HostOperation] = []
        self._asked = 0
        self._has_grown = False
        self._values: list[Any] = []

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """The specs of the resulting numbers, for an element."""
        return [kind for known in self._known for kind in known.kinds if kind[1].kind != "O"]

    @property
    def has_grown(self) -> bool:
        """Whether the trace ended because an operation was new."""
        return self._has_grown

    def begin(self, values: Sequence[Any]) -> list[PendingText]:
        """Begins a trace, and returns the texts that the function gets.

        Args:
            values: The placeholders of the numbers.
        """
        self._asked = 0
        self._has_grown = False
        self._values = list(values)
        self._places = self._given
        return [self._text(place) for place in range(self._given)]

    def through(self, text: PendingText, operation: TextOperation) -> Any:
        """Returns the results of an operation in the program's form."""
        if self._asked == len(self._known):
            found, structure = flatten(operation(self._samples[text.place]))
            self._known.append(
                HostOperation(text.place, operation, structure, self._kinds_of(found))
            )
            self._samples += [array for array in found if array.dtype.kind == "O"]
            self._has_grown = True
            raise NeedsPythonError("What comes out of an operation on text is no input yet.")
        known = self._known[self._asked]
        if known.place != text.place:
            raise NeedsPythonError("The function does not ask for the same operations every time.")
        self._asked += 1
        return known.structure.pack([self._seen(dtype) for _, dtype in known.kinds])

    def run(self, texts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the numbers for texts, and all texts.

        Raises:
            ValueError: They are not of the kinds that the sample's are.
        """
        texts = list(texts)
        numbers: list[np.ndarray] = []
        for known in self._known:
            found, structure = flatten(known.operation(texts[known.place]))
            kinds = self._kinds_of(found)
            if structure != known.structure or kinds != known.kinds:
                raise ValueError(f"Expected arrays of {known.kinds}. Received: {kinds}")
            for array in found:
                (texts if array.dtype.kind == "O" else numbers).append(array)
        return numbers, texts

    def _kinds_of(self, arrays: Sequence[np.ndarray]) -> list[tuple[tuple[int, ...], np.dtype]]:
        return [(self._shape_of(array), array.dtype) for array in arrays]

    def _shape_of(self, array: np.ndarray) -> tuple[int, ...]:
        return array.shape[1:] if self._is_block else array.shape

    def _seen(self, dtype: np.dtype) -> Any:
        if dtype.kind != "O":
            return self._values.pop(0)
        self._places += 1
        return self._text(self._places - 1)

    def _text(self, place: int) -> PendingText:
        return PendingText(self, place, self._shape_of(self._samples[place]), self._is_block)
