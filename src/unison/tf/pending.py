"""Text that is there when a pipeline runs, while its function is being traced.

JAX traces no text. Where the function of `tf.data`'s `map` gets text, operations that make numbers
of it (`tf.io.parse_example`, `tf.io.decode_raw`, `tf.io.decode_jpeg`) are taken out of what is
compiled: in a run they are computed before it, and the program gets the numbers. Where an element
is one string, they are computed for whole blocks of elements.

The pixels of image files are a `PendingImage`, since files may differ in size, and the arrays that
a program gets may not: what brings them to one size (`tf.image.resize`) is computed before the
program, too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from unison.data.structure import Structure, flatten
from unison.eager_fallback import NeedsPythonError
from unison.storage.alignment import aligned_empty
from unison.tf import dtypes
from unison.tf.image_scaling import PixelFunction
from unison.tf.tensor_spec import TensorShape
from unison.thread_pool import ThreadPool

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

    def each(self, function: Callable[[bytes], Any]) -> Any:
        """Returns the program's form of the results of a function of one string."""
        if len(self.shape):
            raise NeedsPythonError("The function takes one string, and gets several.")
        return self.through(functools.partial(self._host.each, function))

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NeedsPythonError("The function asks for the value of a string.")

    def __getattr__(self, name: str) -> NoReturn:
        raise NeedsPythonError(f"The function asks for {name} of a string.")

    __array__ = __bool__ = __bytes__ = __eq__ = __ne__ = __add__ = __radd__ = __getitem__ = _refuse
    __format__ = __iter__ = __len__ = __str__ = _refuse


#: The functions of NumPy and JAX that steps are, and those of the module `operator`.
_OPERATORS = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv"}


#: A function of each pixel that was put off, or a cast to a dtype.
PixelStep = PixelFunction | np.dtype


def computed(steps: Sequence[PixelStep], pixels: np.ndarray) -> np.ndarray:
    """Returns the pixels after `steps`; some of them may overwrite an array of floats."""
    for step in steps:
        pixels = pixels.astype(step) if isinstance(step, np.dtype) else step.on_host(pixels)
    return pixels


def with_functions_apart(
    steps: Sequence[PixelStep],
) -> tuple[Sequence[PixelStep], Sequence[PixelFunction]]:
    """Returns `steps` without what is computed in float32 at last; and that, for any pixels."""
    casts = [index for index, step in enumerate(steps) if isinstance(step, np.dtype)]
    if not casts or steps[casts[-1]] != np.float32:
        return steps, ()
    functions = [step for step in steps[casts[-1] :] if isinstance(step, PixelFunction)]
    return steps[: casts[-1]], functions


class DifferentSizesError(ValueError):
    """The elements of a block differ in size."""


def _arithmetic(name: str, is_first: bool = False) -> Any:
    """Returns a method that computes with another operand, which may be the first one."""

    def method(self: PendingImage, other: Any) -> Any:
        return self.with_operand(name, other, is_first)

    return method


def _through_tensor(name: str) -> Any:
    """Returns a method that is the tensor's."""

    def method(self: PendingImage, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    return method


class _File:
    """An image file whose pixels a program asks for.

    Args:
        content: The content of the file.
        pixels: See `PendingImage`.
    """

    def __init__(self, content: PendingText, pixels: Callable[..., np.ndarray]):
        self.content = content
        self.pixels = pixels

    @functools.cached_property
    def tensor(self) -> Any:
        """The program's form of the pixels, which are decoded once."""
        return self.content.each(lambda content: self.pixels(content, True))


class PendingImage:
    """The pixels of an image file, whose height and width only a run has.

    Arithmetic with numbers is put off, so that `resized` may follow; anything else makes it the
    tensor of the images of a block, which must be of one size.

    Args:
        file: The file.
        dtype: The dtype of the pixels, after all `steps`.
        shape: What is known of their shape.
        steps: What is computed of each pixel.
    """

    # Arrays of NumPy and JAX leave operators to this class.
    __array_priority__ = 200

    def __init__(
        self, file: _File, dtype: np.dtype, shape: TensorShape, steps: tuple[PixelStep, ...] = ()
    ):
        self._file = file
        self._steps = steps
        self.dtype = dtype
        self.shape = shape

    @classmethod
    def of_file(
        cls,
        content: PendingText,
        pixels: Callable[..., np.ndarray],
        dtype: np.dtype,
        shape: TensorShape,
    ) -> PendingImage:
        """Returns the pixels of a file.

        Args:
            content: The content of the file.
            pixels: Returns an image's pixels, `[height, width, channels]`, given the content of the
                file, and whether they are not used after the thread's next call.
            dtype: Their dtype.
            shape: What is known of their shape.
        """
        return cls(_File(content, pixels), dtype, shape)

    def get_shape(self) -> TensorShape:
        return self.shape

    def set_shape(self, shape: Any) -> None:
        """Notes what TensorFlow is told of the shape."""
        told = TensorShape(shape)
        if not told.is_compatible_with(self.shape):
            raise ValueError(f"Expected a shape like {self.shape}. Received: {shape}")
        self.shape = self.shape.merge_with(told)

    def astype(self, dtype: Any) -> Any:
        """Returns the pixels in another dtype."""
        if np.issubdtype(dtype, np.floating):
            return self._then(np.dtype(dtype), np.dtype(dtype))
        return self.tensor().astype(dtype)

    def _then(self, step: PixelStep, dtype: np.dtype) -> PendingImage:
        return PendingImage(self._file, dtype, self.shape, (*self._steps, step))

    def resized(self, function: Callable[[np.ndarray, Sequence[PixelStep]], np.ndarray]) -> Any:
        """Returns the program's form of what brings images to one size.

        Args:
            function: Takes the pixels of an image, and the steps that are left to do with them.
        """
        decoded, steps = self._file.pixels, self._steps
        return self._file.content.each(lambda content: function(decoded(content, True), steps))

    def tensor(self) -> Any:
        """Returns the program's form of the images of a block, which must be of one size."""
        pixels = self._file.tensor
        for step in self._steps:
            pixels = pixels.astype(step) if isinstance(step, np.dtype) else step(pixels)
        return pixels

    def with_operand(self, name: str, other: Any, is_first: bool) -> Any:
        """Returns the result of a function of the pixels and a number or a tensor."""
        is_number = isinstance(other, int | float) and not isinstance(other, bool)
        if is_number and np.issubdtype(self.dtype, np.floating):
            # A number of NumPy's float64 would be computed with in 64 bits on the host.
            number = float(other) if isinstance(other, float) else other
            return self._then(PixelFunction(name, number, is_first), self.dtype)
        pair = (other, self.tensor()) if is_first else (self.tensor(), other)
        return getattr(operator, _OPERATORS[name])(*pair)

    __add__, __radd__ = _arithmetic("add"), _arithmetic("add", is_first=True)
    __sub__, __rsub__ = _arithmetic("subtract"), _arithmetic("subtract", is_first=True)
    __mul__, __rmul__ = _arithmetic("multiply"), _arithmetic("multiply", is_first=True)
    __truediv__ = _arithmetic("divide")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __jax_array__(self) -> Any:
        return self.tensor()

    __getitem__, __len__ = map(_through_tensor, ("__getitem__", "__len__"))
    __iter__, __bool__ = map(_through_tensor, ("__iter__", "__bool__"))
    __eq__, __ne__ = map(_through_tensor, ("__eq__", "__ne__"))
    __lt__, __le__ = map(_through_tensor, ("__lt__", "__le__"))
    __gt__, __ge__ = map(_through_tensor, ("__gt__", "__ge__"))
    __neg__, __abs__ = map(_through_tensor, ("__neg__", "__abs__"))
    __pow__, __rtruediv__ = map(_through_tensor, ("__pow__", "__rtruediv__"))
    __mod__, __floordiv__ = map(_through_tensor, ("__mod__", "__floordiv__"))
    __hash__ = None  # type: ignore[assignment]


class _Stack:
    """The results for the strings of a block, which several threads may put in their places.

    Args:
        count: Their number.
    """

    def __init__(self, count: int):
        self._count = count
        self._lock = threading.Lock()
        self._array: np.ndarray | None = None

    def put(self, place: int, result: Any) -> None:
        """Copies a result, which is an array or `bytes`.

        Raises:
            DifferentSizesError: Another one has another shape or dtype.
        """
        is_text = isinstance(result, bytes)
        shape, dtype = ((), np.dtype(object)) if is_text else (result.shape, result.dtype)
        with self._lock:
            if self._array is None:
                self._array = aligned_empty((self._count, *shape), dtype)
        if (shape, dtype) != (self._array.shape[1:], self._array.dtype):
            raise DifferentSizesError(
                f"Expected: {self._array.dtype}{self._array.shape[1:]}. Received: {dtype}{shape}"
            )
        self._array[place] = result

    @property
    def array(self) -> np.ndarray:
        """All results."""
        assert self._array is not None
        return self._array


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
        most_callers: The number of threads that may compute the elements of a block.
    """

    def __init__(self, sample: Sequence[np.ndarray], is_block: bool, most_callers: int = 1):
        self._most_callers = most_callers
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

    def each(self, function: Callable[[bytes], Any], texts: np.ndarray) -> np.ndarray:
        """Returns the results, arrays or `bytes`, of a function of one string for a block of them.

        Raises:
            DifferentSizesError: They differ in shape.
        """
        given = texts.reshape(-1).tolist()
        results = _Stack(len(given))

        def compute(place: int) -> None:
            results.put(place, function(given[place]))

        count = min(self._most_callers, len(given))
        if count == 1:
            for place in range(len(given)):
                compute(place)
        else:
            # Threads that stay would end when the garbage collector finds this object.
            with ThreadPool(count, "unison-data-map") as threads:
                for _ in threads.map(compute, range(len(given))):
                    pass
        return results.array if texts.ndim else results.array[0, ...]

    def run(self, texts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the numbers for texts, and all texts.

        Raises:
            DifferentSizesError: They are not of the kinds that the sample's are.
        """
        texts = list(texts)
        numbers: list[np.ndarray] = []
        for known in self._known:
            found, structure = flatten(known.operation(texts[known.place]))
            kinds = self._kinds_of(found)
            if structure != known.structure or kinds != known.kinds:
                raise DifferentSizesError(f"Expected: {known.kinds}. Received: {kinds}")
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
