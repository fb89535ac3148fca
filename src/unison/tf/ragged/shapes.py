"""The shape that `tf.shape` returns of a ragged tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from unison.tf.ragged.partitions import lengths_of, tensor_of
from unison.tf.ragged.tensor import RaggedTensor


class DynamicRaggedShape:
    """The sizes of a ragged tensor: numbers, and the lengths of rows of ragged axes.

    Args:
        ragged: The ragged tensor.
        dtype: The dtype of the sizes.

    Examples:
        >>> ragged = RaggedTensor.from_row_lengths([3, 1, 4], [1, 2])
        >>> shape = DynamicRaggedShape(ragged, np.int32)
        >>> shape, int(shape[0])
        (<DynamicRaggedShape lengths=[2, (1, 2)] num_row_partitions=1>, 2)

    TF: `tf.experimental.DynamicRaggedShape`.
    """

    def __init__(self, ragged: RaggedTensor, dtype: Any):
        self._ragged = ragged
        #: The dtype of the sizes.
        self.dtype = np.dtype(dtype)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return self._ragged.rank

    @property
    def num_row_partitions(self) -> int:
        """The number of ragged axes."""
        return self._ragged.ragged_rank

    def is_uniform(self, axis: int) -> bool:
        """Whether all rows of an axis have one size by construction."""
        return self._ragged.shape[axis] is not None

    def static_lengths(self) -> list[Any]:
        """Returns the size of every axis: a number, or the lengths of the rows."""
        sizes: list[Any] = list(self._ragged.shape)
        for axis, splits in enumerate(self._ragged.partitions, 1):
            if sizes[axis] is None and isinstance(splits, np.ndarray):
                sizes[axis] = tuple(lengths_of(splits).tolist())
        return sizes

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            sizes = self._ragged.shape.as_list()[index]
            if None in sizes:
                raise ValueError(f"{self}[{index}]: a ragged axis has no size. Use row_lengths().")
            return tensor_of(np.array(sizes, self.dtype))
        size = self._ragged.shape[index]
        if size is None:
            raise ValueError(f"Index {index} is not uniform")
        return tensor_of(np.array(size, self.dtype))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DynamicRaggedShape)
            and self.static_lengths() == other.static_lengths()
        )

    def __hash__(self) -> int:
        return hash(tuple(self.static_lengths()))

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.static_lengths()))
        return (
            f"<DynamicRaggedShape lengths=[{sizes}] num_row_partitions={self.num_row_partitions}>"
        )
