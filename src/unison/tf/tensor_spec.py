"""`tf.TensorShape`, `tf.TensorSpec` and `tf.TypeSpec`: the properties of a value known in advance.

The shape of a tensor itself is a tuple, as JAX has it; `tensor.get_shape()` is a `TensorShape`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from unison.tf import dtypes
from unison.tf.dtypes import DType, as_dtype
from unison.tf.missing import names_missing_from
from unison.tf.trace_types import TraceTypeMembers
from unison.unsupported import UnsupportedMember

__getattr__ = names_missing_from(__name__)


class TensorShape(TraceTypeMembers):
    """A shape some of whose sizes, or all, may be unknown.

    Args:
        dims: The sizes, None for an unknown one; None for an unknown number of them; a single
            size for a vector.

    Examples:
        >>> shape = TensorShape([None, 3])
        >>> shape.rank, shape.as_list(), shape.is_compatible_with((2, 3)), shape[1:]
        (2, [None, 3], True, TensorShape([3]))

    TF: `tf.TensorShape`.
    """

    __slots__ = ("_dims",)

    as_proto = UnsupportedMember("there are no protocol buffers of shapes: use shape.as_list()")
    most_specific_common_supertype = UnsupportedMember("use most_specific_compatible_shape")

    def __init__(self, dims: Any = None):
        self._dims: tuple[int | None, ...] | None
        if isinstance(dims, TensorShape):
            self._dims = dims._dims
        elif dims is None:
            self._dims = None
        else:
            sizes = dims if isinstance(dims, list | tuple) or np.ndim(dims) else [dims]
            self._dims = tuple(_size(size) for size in sizes)

    @property
    def rank(self) -> int | None:
        """The number of axes; None if unknown."""
        return None if self._dims is None else len(self._dims)

    ndims = rank

    @property
    def dims(self) -> list[int | None] | None:
        """The sizes; None if their number is unknown."""
        return None if self._dims is None else list(self._dims)

    def as_list(self) -> list[int | None]:
        """Returns the sizes.

        Raises:
            ValueError: Their number is unknown.
        """
        return list(self._known("as_list"))

    def num_elements(self) -> int | None:
        """Returns the number of elements; None if a size is unknown."""
        if self._dims is None or None in self._dims:
            return None
        return math.prod(size for size in self._dims if size is not None)

    def is_fully_defined(self) -> bool:
        return self._dims is not None and None not in self._dims

    def assert_is_fully_defined(self) -> None:
        if not self.is_fully_defined():
            raise ValueError(f"Shape {self} is not fully defined")

    def is_compatible_with(self, other: Any) -> bool:
        """Whether there is a shape that both describe."""
        other = TensorShape(other)
        if self._dims is None or other._dims is None:
            return True
        return len(self._dims) == len(other._dims) and all(
            None in (one, another) or one == another
            for one, another in zip(self._dims, other._dims, strict=True)
        )

    def assert_is_compatible_with(self, other: Any) -> None:
        if not self.is_compatible_with(other):
            raise ValueError(f"Shapes {self} and {TensorShape(other)} are incompatible")

    def is_subtype_of(self, other: Any) -> bool:
        """Whether `other` describes everything that this does."""
        other = TensorShape(other)
        if other._dims is None:
            return True
        return self.rank == other.rank and all(
            wide in (None, own) for own, wide in zip(self, other, strict=True)
        )

    def merge_with(self, other: Any) -> TensorShape:
        """Returns the merged properties of both.

        Raises:
            ValueError: They are incompatible.
        """
        self.assert_is_compatible_with(other)
        other = TensorShape(other)
        if self._dims is None or other._dims is None:
            return other if self._dims is None else self
        return TensorShape(
            [two if one is None else one for one, two in zip(self, other, strict=True)]
        )

    def most_specific_compatible_shape(self, other: Any) -> TensorShape:
        """Returns the narrowest shape that describes both."""
        other = TensorShape(other)
        if self.rank is None or self.rank != other.rank:
            return TensorShape(None)
        return TensorShape([a if a == b else None for a, b in zip(self, other, strict=True)])

    def concatenate(self, other: Any) -> TensorShape:
        other = TensorShape(other)
        if self._dims is None or other._dims is None:
            return TensorShape(None)
        return TensorShape([*self._dims, *other._dims])

    def with_rank(self, rank: int) -> TensorShape:
        """Returns the shape, which must have this rank.

        Raises:
            ValueError: It has another.
        """
        try:
            return self.merge_with([None] * rank)
        except ValueError as error:
            raise ValueError(f"Shape {self} must have rank {rank}") from error

    def with_rank_at_least(self, rank: int) -> TensorShape:
        if self.rank is not None and self.rank < rank:
            raise ValueError(f"Shape {self} must have rank at least {rank}")
        return self

    def with_rank_at_most(self, rank: int) -> TensorShape:
        if self.rank is not None and self.rank > rank:
            raise ValueError(f"Shape {self} must have rank at most {rank}")
        return self

    def assert_has_rank(self, rank: int) -> None:
        if self.rank not in (None, rank):
            raise ValueError(f"Shape {self} must have rank {rank}")

    def assert_same_rank(self, other: Any) -> None:
        other = TensorShape(other)
        if None not in (self.rank, other.rank) and self.rank != other.rank:
            raise ValueError(f"Shapes {self} and {other} must have the same rank")

    def _known(self, what: str) -> tuple[int | None, ...]:
        if self._dims is None:
            raise ValueError(f"{what}: the number of axes of this TensorShape is unknown.")
        return self._dims

    def __len__(self) -> int:
        return len(self._known("len()"))

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._known("iteration"))

    def __getitem__(self, key: Any) -> Any:
        if self._dims is None:
            return TensorShape(None) if isinstance(key, slice) else None
        part = self._dims[key]
        return TensorShape(list(part)) if isinstance(key, slice) else part

    def __bool__(self) -> bool:
        return self._dims is not None

    def __add__(self, other: Any) -> TensorShape:
        return self.concatenate(other)

    def __radd__(self, other: Any) -> TensorShape:
        return TensorShape(other).concatenate(self)

    def __eq__(self, other: object) -> bool:
        try:
            return self._dims == TensorShape(other)._dims
        except (TypeError, ValueError):
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self._dims)

    def __repr__(self) -> str:
        return f"TensorShape({self.dims})"

    def __str__(self) -> str:
        if self._dims is None:
            return "<unknown>"
        comma = "," if len(self._dims) == 1 else ""
        return f"({', '.join(map(str, self._dims))}{comma})"

    def __reduce__(self) -> Any:
        return TensorShape, (self.dims,)


def is_symbolic_size(value: Any) -> bool:
    """Returns whether `value` is a size for which JAX traces with a symbol."""
    from jax import export

    return export.is_symbolic_dim(value)


def _size(size: Any) -> int | None:
    if size is None or is_symbolic_size(size):
        return None
    number = operator.index(size)
    if number < 0:
        raise ValueError(f"A dimension cannot be negative. Received: {number}")
    return number


def broadcast_shapes(one: Any, another: Any) -> TensorShape:
    """Returns the shape that tensors of two shapes broadcast to, as far as it is known.

    Raises:
        ValueError: They do not broadcast.
    """
    one, another = TensorShape(one), TensorShape(another)
    if one.rank is None or another.rank is None:
        return TensorShape(None)
    rank = max(one.rank, another.rank)
    padded = [[1] * (rank - len(shape)) + shape.as_list() for shape in (one, another)]
    return TensorShape([_broadcast(a, b, one, another) for a, b in zip(*padded, strict=True)])


def _broadcast(a: int | None, b: int | None, one: TensorShape, another: TensorShape) -> int | None:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if a is None or b is None:
        return a or b
    raise ValueError(f"Incompatible shapes for broadcasting: {one} and {another}")


class TypeSpec(TraceTypeMembers):
    """Base of the specifications. TF: `tf.TypeSpec`."""

    value_type = UnsupportedMember("use isinstance(value, tf.Tensor), or spec.is_compatible_with")

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Whether a value, or all that another specification describes, is described by this."""
        raise NotImplementedError

    def most_specific_compatible_type(self, other: Any) -> Any:
        """Returns the narrowest specification that describes both.

        Raises:
            ValueError: There is none.
        """
        if self != other:
            raise ValueError(f"No {type(self).__name__} describes both {self} and {other}")
        return self


class TensorSpec(TypeSpec):
    """The shape, dtype and name of a tensor.

    Args:
        shape: What `TensorShape` takes.
        dtype: What `tf.as_dtype` takes.
        name: The argument's name in a signature.

    Examples:
        >>> spec = TensorSpec([None, 3], dtypes.int32)
        >>> spec, spec.is_compatible_with(np.zeros((2, 3), np.int32))
        (TensorSpec(shape=(None, 3), dtype=tf.int32, name=None), True)

    TF: `tf.TensorSpec`.
    """

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, shape: Any, dtype: Any = dtypes.float32, name: str | None = None):
        self.shape = TensorShape(shape)
        self.dtype: DType = as_dtype(dtype)
        self.name = name

    @classmethod
    def from_spec(cls, spec: Any, name: str | None = None) -> TensorSpec:
        """Returns the specification of anything with a shape and a dtype."""
        return cls(spec.shape, spec.dtype, name or getattr(spec, "name", None))

    @classmethod
    def from_tensor(cls, tensor: Any, name: str | None = None) -> TensorSpec:
        """Returns the specification that describes `tensor` and its like."""
        return cls(tensor.shape, tensor.dtype, name)

    def is_compatible_with(self, spec_or_tensor: Any) -> bool:
        """Whether shape and dtype fit; text and numbers without a dtype are converted."""
        other = spec_or_tensor
        if not hasattr(other, "shape") or not hasattr(other, "dtype"):
            other = np.asarray(other)
        return as_dtype(other.dtype) == self.dtype and self.shape.is_compatible_with(other.shape)

    def is_subtype_of(self, other: Any) -> bool:
        """Whether `other` describes every tensor that this does."""
        return (
            isinstance(other, TensorSpec)
            and self.dtype == other.dtype
            and self.shape.is_subtype_of(other.shape)
        )

    def most_specific_compatible_type(self, other: TensorSpec) -> TensorSpec:
        """Returns the narrowest specification that describes both.

        Raises:
            ValueError: The dtypes differ.
        """
        if self.dtype != other.dtype:
            raise ValueError(f"No TensorSpec describes both {self} and {other}: the dtypes differ")
        shape = self.shape.most_specific_compatible_shape(other.shape)
        return TensorSpec(shape, self.dtype, self.name if self.name == other.name else None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.name

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype!r}, name={self.name!r})"

    def __reduce__(self) -> Any:
        return type(self), self._key()


class NoneTensorSpec(TypeSpec):
    """The specification of None. TF: `tf.NoneTensorSpec`."""

    most_specific_compatible_shape = UnsupportedMember("None has no shape")

    @classmethod
    def from_value(cls, value: None) -> NoneTensorSpec:
        """Returns the specification of None."""
        return cls()

    def is_subtype_of(self, other: Any) -> bool:
        """Whether `other` describes None, too."""
        return self == other

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        return spec_or_value is None or isinstance(spec_or_value, NoneTensorSpec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoneTensorSpec)

    def __hash__(self) -> int:
        return hash(NoneTensorSpec)

    def __repr__(self) -> str:
        return "NoneTensorSpec()"


def type_spec_from_value(value: Any) -> TypeSpec:
    """Returns the specification that describes `value`.

    Raises:
        TypeError: Nothing describes it.

    TF: `tf.type_spec_from_value`.
    """
    if value is None:
        return NoneTensorSpec()
    if isinstance(value, TypeSpec):
        return value
    spec = getattr(value, "_type_spec", None)  # of a ragged tensor
    if isinstance(spec, TypeSpec):
        return spec
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return TensorSpec(value.shape, value.dtype)
    raise TypeError(f"No TypeSpec describes a {type(value).__name__}. Received: {value!r}")
