"""The structure, shapes and dtypes of a dataset's elements, known in advance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from unison.data.leaves import NestedDataset, dtype_of, shape_of
from unison.data.ragged import OtherLeaf, RaggedArray
from unison.data.structure import Leaves, Structure


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of one leaf.

    Attributes:
        shape: The sizes, None for an unknown one; None: even their number is unknown.
        dtype: NumPy's dtype; `object` for text.
        name: A name, without meaning.
    """

    shape: tuple[int | None, ...] | None
    dtype: np.dtype
    name: str | None = None

    @classmethod
    def like(cls, spec: Any) -> Any:
        """Returns the spec of any object with a shape and a dtype: a `tf.TensorSpec`, an array.

        Of one with a `ragged_rank`, as a `tf.RaggedTensorSpec` has, it is a `RaggedSpec`.

        Raises:
            TypeError: `spec` does not have them.
        """
        if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
            raise TypeError(
                "Expected a spec with a shape and a dtype: a tf.TensorSpec, an ArraySpec, a "
                f"jax.ShapeDtypeStruct. Received: {spec!r}"
            )
        dtype = np.dtype(spec.dtype)
        if hasattr(spec, "ragged_rank"):
            return RaggedSpec.like(spec)
        return cls(as_shape(spec.shape), np.dtype(object) if dtype.kind in "SUT" else dtype)

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Returns the spec of a leaf; for others than arrays, a `DatasetSpec` or `RaggedSpec`."""
        if isinstance(leaf, NestedDataset):
            return DatasetSpec(leaf)
        if isinstance(leaf, RaggedArray):
            return RaggedSpec.of(leaf)
        return cls(shape_of(leaf), dtype_of(leaf))

    def batched(self, size: int | None) -> ArraySpec:
        """Returns the spec of `size` stacked leaves."""
        return ArraySpec(None if self.shape is None else (size, *self.shape), self.dtype)

    def unbatched(self) -> ArraySpec:
        """Returns the spec of one row.

        Raises:
            ValueError: It has no rows: the leaf is a scalar.
        """
        if self.shape == ():
            raise ValueError(
                "Elements that are scalars cannot be cut into rows. Batch the dataset first."
            )
        return ArraySpec(None if self.shape is None else self.shape[1:], self.dtype)

    def widened(self, other: Any) -> ArraySpec:
        """Returns the narrowest spec that describes both.

        Raises:
            ValueError: The dtypes differ.
        """
        if not isinstance(other, ArraySpec) or other.dtype != self.dtype:
            raise ValueError(f"Incompatible elements: {self} and {other}")
        if self.shape is None or other.shape is None or len(self.shape) != len(other.shape):
            return ArraySpec(None, self.dtype)
        pairs = zip(self.shape, other.shape, strict=True)
        return ArraySpec(tuple(a if a == b else None for a, b in pairs), self.dtype)

    def with_unknown_sizes(self) -> ArraySpec:
        """Returns the spec with the number of axes, and unknown sizes."""
        return ArraySpec(None if self.shape is None else (None,) * len(self.shape), self.dtype)

    def describes(self, leaf: Any) -> bool:
        """Whether a leaf has the dtype, and the known sizes."""
        if isinstance(leaf, OtherLeaf) or dtype_of(leaf) != self.dtype:
            return False
        shape = shape_of(leaf)
        return self.shape is None or (
            len(shape) == len(self.shape)
            and all(known in (None, size) for known, size in zip(self.shape, shape, strict=True))
        )

    @property
    def is_static(self) -> bool:
        """Whether arrays of this spec have one shape, and contain numbers."""
        return self.shape is not None and None not in self.shape and self.dtype.kind != "O"


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """The shape and dtype of a leaf with ragged axes.

    Attributes:
        shape: The sizes, None for ragged axes and unknown ones.
        dtype: NumPy's dtype; `object` for text.
        ragged_rank: The number of ragged axes; with 0, it is an array of which batches are ragged.
        splits_dtype: The dtype of the splits.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    ragged_rank: int
    splits_dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.int64))

    is_static = False

    @classmethod
    def like(cls, spec: Any) -> RaggedSpec:
        """Returns the spec of a `tf.RaggedTensorSpec`, whose number of axes is known.

        Raises:
            TypeError: It is unknown.
        """
        if isinstance(spec, RaggedSpec):
            return spec
        shape = as_shape(spec.shape)
        if shape is None:
            raise TypeError(f"A ragged element has a known number of axes. Received: {spec!r}")
        return cls(shape, np.dtype(spec.dtype), spec.ragged_rank, np.dtype(spec.row_splits_dtype))

    @classmethod
    def of(cls, leaf: RaggedArray) -> RaggedSpec:
        """Returns the spec of a leaf."""
        return cls(leaf.shape, leaf.dtype, len(leaf.splits), leaf.splits_dtype)

    def batched(self, size: int | None) -> RaggedSpec:
        """Returns the spec of `size` stacked leaves."""
        return dataclasses.replace(
            self, shape=(size, *self.shape), ragged_rank=self.ragged_rank + 1
        )

    def unbatched(self) -> Any:
        """Returns the spec of one row.

        Raises:
            ValueError: It has no rows: the leaf is a scalar.
        """
        if self.ragged_rank == 0:
            return ArraySpec(self.shape, self.dtype).unbatched()
        return dataclasses.replace(self, shape=self.shape[1:], ragged_rank=self.ragged_rank - 1)

    def widened(self, other: Any) -> RaggedSpec:
        """Returns the narrowest spec that describes both.

        Raises:
            ValueError: They differ in more than sizes.
        """
        if not isinstance(other, RaggedSpec) or self._kind() != other._kind():
            raise ValueError(f"Incompatible elements: {self} and {other}")
        pairs = zip(self.shape, other.shape, strict=True)
        return dataclasses.replace(self, shape=tuple(a if a == b else None for a, b in pairs))

    def _kind(self) -> Any:
        return len(self.shape), self.dtype, self.ragged_rank, self.splits_dtype

    def with_unknown_sizes(self) -> RaggedSpec:
        """Returns the spec with unknown sizes."""
        return dataclasses.replace(self, shape=(None,) * len(self.shape))

    def describes(self, leaf: Any) -> bool:
        """Whether a leaf has the dtype, the ragged axes and the known sizes."""
        if not isinstance(leaf, RaggedArray):
            return False
        own = RaggedSpec.of(leaf)
        return own._kind() == self._kind() and all(
            None in (known, size) or known == size
            for known, size in zip(self.shape, own.shape, strict=True)
        )


class DatasetSpec:
    """The spec of an element that is itself a dataset.

    Args:
        plan: The plan of such a dataset.

    TF: `tf.data.DatasetSpec`.
    """

    is_static = False
    shape = ()

    def __init__(self, plan: Any):
        self._plan = plan

    @property
    def signature(self) -> Signature:
        """The signature of that dataset's elements."""
        return self._plan.signature

    @property
    def element_spec(self) -> Any:
        """The specs of that dataset's elements."""
        return self.signature.element_spec

    def batched(self, size: int | None) -> Any:
        del size
        raise TypeError("Datasets cannot be stacked into a batch: batch each of them (flat_map).")

    def unbatched(self) -> Any:
        raise ValueError("Datasets cannot be cut into rows: use flat_map.")

    def widened(self, other: Any) -> DatasetSpec:
        del other
        return self

    def with_unknown_sizes(self) -> DatasetSpec:
        return self

    def describes(self, leaf: Any) -> bool:
        return isinstance(leaf, NestedDataset)

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec!r})"


@dataclasses.dataclass(frozen=True)
class Signature:
    """The signature of a plan's elements: their structure, and the spec of every leaf.

    Attributes:
        structure: The structure.
        specs: An `ArraySpec`, `RaggedSpec` or `DatasetSpec` for each leaf.
    """

    structure: Structure
    specs: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: Leaves, structure: Structure) -> Signature:
        """Returns the signature of one element."""
        return cls(structure, tuple(map(ArraySpec.of, leaves)))

    @property
    def element_spec(self) -> Any:
        """The specs in the structure."""
        return self.structure.pack(self.specs)

    @property
    def is_static(self) -> bool:
        """Whether all elements have the same shapes, and contain numbers only."""
        return all(spec.is_static for spec in self.specs)

    def map(self, function: Callable[[Any], Any]) -> Signature:
        """Returns the signature with `function` applied to the spec of every leaf."""
        return Signature(self.structure, tuple(map(function, self.specs)))

    def batched(self, size: int | None) -> Signature:
        return self.map(lambda spec: spec.batched(size))

    def unbatched(self) -> Signature:
        """Returns the signature of the rows.

        Raises:
            ValueError: The leaves have no rows, or different numbers of them.
        """
        sizes = {spec.shape[0] for spec in self.specs if spec.shape} - {None}
        if len(sizes) > 1:
            raise ValueError(
                "The components of an element that is cut into rows must have the same number of "
                f"them. Received: {self.element_spec}"
            )
        return self.map(lambda spec: spec.unbatched())

    def widened(self, other: Signature) -> Signature:
        """Returns the narrowest signature that describes both.

        Raises:
            TypeError: The structures or dtypes differ.
        """
        try:
            if self.structure != other.structure:
                raise ValueError("Incompatible structures")
            pairs = zip(self.specs, other.specs, strict=True)
            return Signature(self.structure, tuple(one.widened(two) for one, two in pairs))
        except ValueError as error:
            raise TypeError(
                f"Incompatible elements: {self.element_spec} and {other.element_spec}. Datasets "
                "that are put together must have the same structure and dtypes."
            ) from error

    @property
    def batch_size(self) -> int | None:
        """The size that all leaves have along their first axis, if it is known and the same."""
        sizes = {spec.shape[0] if spec.shape else None for spec in self.specs}
        return sizes.pop() if len(sizes) == 1 else None


def as_shape(shape: Any) -> tuple[int | None, ...] | None:
    """Returns a shape in any spelling as a tuple: of sizes, `TensorShape`s, lists; -1 is None."""
    if shape is None or getattr(shape, "rank", 0) is None:
        return None
    if np.ndim(shape) == 0 and not hasattr(shape, "__iter__"):
        shape = [shape]
    return tuple(None if size is None or int(size) < 0 else int(size) for size in shape)
