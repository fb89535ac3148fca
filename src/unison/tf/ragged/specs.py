"""`tf.RaggedTensorSpec`: the properties of a ragged tensor known in advance."""

from __future__ import annotations

from typing import Any

from unison.tf import dtypes
from unison.tf.dispatch import Ragged, implementations, made
from unison.tf.dtypes import DType, as_dtype
from unison.tf.ragged.tensor import RaggedTensor
from unison.tf.tensor_spec import TensorShape, TensorSpec, TypeSpec
from unison.tf.tensors import Tensor


class RaggedTensorSpec(TypeSpec, Ragged):
    """The shape, dtype and number of ragged axes of a ragged tensor.

    Args:
        shape: What `TensorShape` takes; the sizes of ragged axes are None.
        dtype: What `tf.as_dtype` takes.
        ragged_rank: The number of ragged axes; default: all but the first. With 0, it describes
            a tensor, which batches of a dataset make ragged.
        row_splits_dtype: The dtype of the splits.
        flat_values_spec: Must be None: values are tensors.

    Raises:
        ValueError: There are not as many axes.

    Examples:
        >>> spec = RaggedTensorSpec([None, None], dtypes.int32)
        >>> spec
        RaggedTensorSpec(TensorShape([None, None]), tf.int32, 1, tf.int64)
        >>> spec.is_compatible_with(RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]))
        True

    TF: `tf.RaggedTensorSpec`.
    """

    def __init__(
        self,
        shape: Any = None,
        dtype: Any = dtypes.float32,
        ragged_rank: int | None = None,
        row_splits_dtype: Any = dtypes.int64,
        flat_values_spec: Any = None,
    ):
        if flat_values_spec is not None:
            raise ValueError("The values of a RaggedTensor are tensors: flat_values_spec is None.")
        self._shape = TensorShape(shape)
        self._dtype = as_dtype(dtype)
        self._row_splits_dtype = as_dtype(row_splits_dtype)
        rank = self._shape.rank
        if ragged_rank is None:
            if rank is None:
                raise ValueError("Must specify ragged_rank or a shape with a known rank.")
            ragged_rank = rank - 1
        if not isinstance(ragged_rank, int):
            raise TypeError(f"Argument `ragged_rank` must be an int. Received {ragged_rank}.")
        if rank is not None and ragged_rank >= rank:
            raise ValueError(
                f"Argument `ragged_rank` ({ragged_rank}) must be less than rank ({rank})."
            )
        self._ragged_rank = ragged_rank
        if not made:
            made.append(True)

    @property
    def shape(self) -> TensorShape:
        """The sizes, None for unknown ones and for ragged axes."""
        return self._shape

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return self._dtype

    @property
    def ragged_rank(self) -> int:
        """The number of ragged axes."""
        return self._ragged_rank

    @property
    def row_splits_dtype(self) -> DType:
        """The dtype of the splits."""
        return self._row_splits_dtype

    @property
    def flat_values_spec(self) -> None:
        """None: values are tensors."""
        return None

    @property
    def value_type(self) -> Any:
        """The class of what it describes."""
        return RaggedTensor if self._ragged_rank > 0 else Tensor

    @classmethod
    def from_value(cls, value: RaggedTensor) -> RaggedTensorSpec:
        """Returns the specification of a ragged tensor."""
        return cls(value.shape, value.dtype, value.ragged_rank, value.partitions[0].dtype)

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Whether a value, or all that another specification describes, is described by this."""
        other = spec_or_value
        if self._ragged_rank == 0 and not isinstance(other, RaggedTensor | RaggedTensorSpec):
            return TensorSpec(self._shape, self._dtype).is_compatible_with(other)
        if isinstance(other, RaggedTensor):
            other = RaggedTensorSpec.from_value(other)
        return (
            isinstance(other, RaggedTensorSpec)
            and self._key()[1:] == other._key()[1:]
            and self._shape.is_compatible_with(other._shape)
        )

    def is_subtype_of(self, other: Any) -> bool:
        """Whether `other` describes every ragged tensor that this does."""
        return (
            isinstance(other, RaggedTensorSpec)
            and self._key()[1:] == other._key()[1:]
            and self._shape.is_subtype_of(other._shape)
        )

    def most_specific_compatible_type(self, other: RaggedTensorSpec) -> RaggedTensorSpec:
        """Returns the narrowest specification that describes both.

        Raises:
            ValueError: They differ in more than sizes.
        """
        if self._key()[1:] != other._key()[1:]:
            raise ValueError(f"No RaggedTensorSpec describes both {self} and {other}")
        shape = self._shape.most_specific_compatible_shape(other._shape)
        return RaggedTensorSpec(shape, *self._key()[1:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedTensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self._shape, self._dtype, self._ragged_rank, self._row_splits_dtype

    def __repr__(self) -> str:
        return (
            f"RaggedTensorSpec({self._shape!r}, {self._dtype!r}, {self._ragged_rank}, "
            f"{self._row_splits_dtype!r})"
        )

    def __reduce__(self) -> Any:
        return type(self), self._key()


implementations["spec"] = RaggedTensorSpec.from_value
