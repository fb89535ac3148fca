"""`tf.TensorArray`: tensors that are written one after the other, and stacked in the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.eager_fallback import is_on_trial
from unison.errors import InvalidArgumentError, OutOfRangeError
from unison.program.assertions import require
from unison.program.control_flow import VALUE_WANTED, ControlFlowError
from unison.tf import dtypes
from unison.tf.dtypes import DType, as_dtype
from unison.tf.missing import names_missing_from
from unison.tf.tensor_spec import TensorShape, TypeSpec
from unison.tf.tensors import convert_to_tensor, known_value, sizes, tensor_dtype
from unison.tf.text import StringTensor
from unison.tracebacks import users_line
from unison.unsupported import UnsupportedMember

__getattr__ = names_missing_from(__name__)


@jax.tree_util.register_pytree_node_class
class TensorArray:
    """An array of tensors of one shape and dtype. Writing returns the array with which to continue.

    In compiled programs its size is that with which the loop begins: a write at a computed index
    does not grow it. Where it might have to, a `tf.function` runs step by step.

    Args:
        dtype: The dtype of the elements.
        size: The number of elements. Default: 0.
        dynamic_size: Whether a write beyond the end makes it larger.
        clear_after_read: Without effect.
        tensor_array_name: Without effect.
        handle: Without effect.
        flow: Without effect.
        infer_shape: Without effect: the elements always have one shape, and another is an error.
        element_shape: The shape of the elements; else that of the first that is written.
        colocate_with_first_write_call: Without effect.
        name: Without effect.

    Examples:
        >>> array = TensorArray(dtypes.int32, size=2)
        >>> array = array.write(0, 5).write(1, 7)
        >>> array.stack().tolist()
        [5, 7]

    TF: `tf.TensorArray`.
    """

    close = UnsupportedMember("there is nothing to close: its memory is released with it")
    grad = UnsupportedMember("use tf.GradientTape: reads and writes have gradients")
    flow = UnsupportedMember("there are no graphs: the array is a pytree of its elements")
    handle = UnsupportedMember("there are no graphs: the array is a pytree of its elements")

    def __init__(
        self,
        dtype: Any,
        size: Any = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool | None = None,
        tensor_array_name: str | None = None,
        handle: Any = None,
        flow: Any = None,
        infer_shape: bool = True,
        element_shape: Any = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
    ):
        self.dtype: DType = as_dtype(dtype)
        self.dynamic_size = bool(dynamic_size)
        self._size = 0 if size is None else int(known_value(size))
        self._elements: jax.Array | None = None
        shape = TensorShape(element_shape)
        if shape.is_fully_defined():
            self._elements = self._zeros(sizes(shape))

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        whole = (self._size, *shape)
        if self.dtype == dtypes.string:
            return StringTensor(np.full(whole, b"", object))
        return jnp.zeros(whole, tensor_dtype(self.dtype))

    def _with(self, elements: Any) -> TensorArray:
        new = TensorArray(self.dtype, elements.shape[0], self.dynamic_size)
        new._elements = elements
        return new

    @property
    def element_shape(self) -> TensorShape:
        """The shape of an element, as far as it is known."""
        return TensorShape(None if self._elements is None else self._elements.shape[1:])

    def size(self, name: str | None = None) -> jax.Array:
        """Returns the number of elements."""
        return convert_to_tensor(self._size)

    def write(self, index: Any, value: Any, name: str | None = None) -> TensorArray:
        """Returns the array with `value` at `index`.

        Raises:
            OutOfRangeError: The index is out of range, and the array does not grow.
            InvalidArgumentError: `value` has another dtype; or a compiled program would have to let
                the array grow, when it runs.
            TypeError: It has no elements, and the index is computed in a compiled program.
        """
        value = convert_to_tensor(value, dtype_hint=self.dtype)
        if value.dtype != self.dtype:
            raise InvalidArgumentError(
                message=f"TensorArray dtype is {self.dtype.name} but Op is trying to write dtype "
                f"{value.dtype}"
            )
        elements = self._zeros(value.shape) if self._elements is None else self._elements
        if tuple(value.shape) != tuple(elements.shape[1:]):
            raise InvalidArgumentError(
                message="The elements of a TensorArray have one shape here: expected "
                f"{tuple(elements.shape[1:])}, received {tuple(value.shape)}. Pad them to one "
                "length, or collect them in a list for tf.concat or tf.ragged.stack."
            )
        try:
            place = int(index)
        except VALUE_WANTED:
            if isinstance(elements, StringTensor):
                raise
            if self.dynamic_size or not self._size:
                self._require_room(index)
            return self._with(elements.at[index].set(value))
        if place >= self._size and self.dynamic_size:
            elements = _grown(elements, place + 1 - self._size)
        elif not 0 <= place < self._size:
            raise OutOfRangeError(
                message=f"Tried to write to index {place} but array is not resizeable and size "
                f"is: {self._size}"
            )
        return self._with(_written(elements, place, value))

    def _require_room(self, index: Any) -> None:
        """Refuses a write at an index that the program computes, if it would have to grow."""
        size = self._size
        remedy = (
            f"a compiled program cannot let a TensorArray of {size} elements grow. Give it its "
            "final size: tf.TensorArray(dtype, size=n)"
        )
        if not size or is_on_trial():
            raise ControlFlowError(f"{users_line()}: a write at a computed index: {remedy}.")
        require(index < size, lambda place: f"a write at index {place}: {remedy}.", index)

    def read(self, index: Any, name: str | None = None) -> jax.Array:
        """Returns the element at `index`.

        Raises:
            OutOfRangeError: The index is out of range.
        """
        elements = self.stack()
        try:
            place = int(index)
        except VALUE_WANTED:
            return elements[index]
        if not 0 <= place < self._size:
            raise OutOfRangeError(
                message=f"Tried to read from index {place} but array size is: {self._size}"
            )
        return elements[place]

    def stack(self, name: str | None = None) -> jax.Array:
        """Returns the elements as one tensor; those never written are zero."""
        return self._zeros(()) if self._elements is None else self._elements

    def unstack(self, value: Any, name: str | None = None) -> TensorArray:
        """Returns an array of the slices of `value`."""
        return self._with(convert_to_tensor(value, self.dtype))

    def gather(self, indices: Any, name: str | None = None) -> jax.Array:
        """Returns the elements at `indices` as one tensor."""
        return self.stack()[convert_to_tensor(indices)]

    def scatter(self, indices: Any, value: Any, name: str | None = None) -> TensorArray:
        """Returns the array with the slices of `value` at `indices`."""
        places = known_value(indices)
        array = self
        for place, part in zip(places, convert_to_tensor(value, self.dtype), strict=True):
            array = array.write(int(place), part)
        return array

    def concat(self, name: str | None = None) -> jax.Array:
        """Returns the elements joined along their first axis."""
        elements = self.stack()
        return elements.reshape((-1, *elements.shape[2:]))

    def split(self, value: Any, lengths: Any, name: str | None = None) -> TensorArray:
        """Returns an array of the parts of `value` of these lengths, which must be equal."""
        counts = set(np.asarray(known_value(lengths)).tolist())
        if len(counts) != 1:
            raise ValueError(f"The elements must have one length. Received: {sorted(counts)}")
        value = convert_to_tensor(value, self.dtype)
        return self._with(value.reshape((-1, *counts, *value.shape[1:])))

    def identity(self) -> TensorArray:
        return self

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        leaves = () if self._elements is None else (self._elements,)
        return leaves, (self.dtype, self._size, self.dynamic_size)

    @classmethod
    def tree_unflatten(cls, description: Any, leaves: Any) -> TensorArray:
        dtype, size, dynamic_size = description
        array = cls(dtype, size, dynamic_size)
        array._elements = leaves[0] if leaves else None
        return array

    def __repr__(self) -> str:
        return f"<tf.TensorArray of {self._size} elements, {self.dtype!r} {self.element_shape}>"


def _grown(elements: Any, missing: int) -> Any:
    """Returns elements with so many more at the end, which are zero or empty."""
    widths = [(0, missing), *[(0, 0)] * (elements.ndim - 1)]
    if isinstance(elements, StringTensor):
        return StringTensor(np.pad(np.asarray(elements), widths, constant_values=b""))
    return jnp.pad(elements, widths)


def _written(elements: Any, place: int, value: Any) -> Any:
    """Returns a copy of elements with `value` at a place."""
    if not isinstance(elements, StringTensor):
        return elements.at[place].set(value)
    texts = np.array(elements, object)
    texts[place] = value.numpy()
    return StringTensor(texts)


class TensorArraySpec(TypeSpec):
    """The specification of a `TensorArray`. TF: `tf.TensorArraySpec`."""

    def __init__(
        self,
        element_shape: Any = None,
        dtype: Any = dtypes.float32,
        dynamic_size: bool = False,
        infer_shape: bool = True,
    ):
        self.element_shape = TensorShape(element_shape)
        self.dtype = as_dtype(dtype)
        self.dynamic_size = dynamic_size

    @classmethod
    def from_value(cls, value: TensorArray) -> TensorArraySpec:
        """Returns the specification of a `TensorArray`."""
        return cls(value.element_shape, value.dtype, value.dynamic_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorArraySpec) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.element_shape, self.dtype, self.dynamic_size))

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        return (
            isinstance(spec_or_value, TensorArray | TensorArraySpec)
            and spec_or_value.dtype == self.dtype
            and self.element_shape.is_compatible_with(spec_or_value.element_shape)
        )
