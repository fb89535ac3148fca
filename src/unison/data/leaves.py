"""The leaves of elements as NumPy's types, single and stacked.

Numbers are arrays or NumPy scalars of their own dtype, also of 64 bits. Text is `bytes`, and
arrays of text are arrays of `bytes` objects. Rows of different lengths are `RaggedArray`s. The
elements of a window are datasets; their leaf is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.data.ragged import OtherLeaf, RaggedArray, joined
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError


class NestedDataset(OtherLeaf):
    """Base of the leaves that are plans of datasets."""


def as_leaf(value: Any) -> Any:
    """Returns `value` as a leaf.

    Args:
        value: Anything that NumPy converts to an array of numbers or text, a dataset, or a ragged
            tensor.

    Raises:
        TypeError: `value` is neither.
        ValueError: `value` is a list whose rows have different lengths.

    Examples:
        >>> as_leaf(["ab", "c"]), as_leaf(2.5)
        (array([b'ab', b'c'], dtype=object), np.float64(2.5))
    """
    if type(value) is np.ndarray and value.ndim and value.dtype.kind in "biufc":
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value
    if isinstance(value, bytes | OtherLeaf):
        return value
    if isinstance(value, str):
        return value.encode()
    plan = getattr(value, "plan", None)
    if isinstance(plan, NestedDataset):
        return plan
    ragged = getattr(value, "ragged_array", None)
    if isinstance(ragged, RaggedArray):
        return ragged
    array = _as_array(value)
    if array.dtype.kind in "OSUT":
        array = _as_text(array, value)
    # For an array without axes, NumPy returns the scalar, or the `bytes`.
    return array if array.ndim else array[()]


def _as_array(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        # NumPy's own arrays of bytes strip trailing zeros.
        return np.array(value, object) if array.dtype.kind == "S" else array
    except ValueError as error:
        raise ValueError(
            f"The rows of a list must have the same length. Received: {value!r}"
        ) from error


def _as_text(array: np.ndarray, value: Any) -> np.ndarray:
    if array.dtype.kind in "SUT":
        array = array.astype(object)
    flat = array.ravel()
    if not all(isinstance(item, bytes) for item in flat):
        text = np.empty(array.size, object)
        text[:] = [_as_bytes(item, value) for item in flat]
        array = text.reshape(array.shape)
    return array


def _as_bytes(item: Any, value: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise TypeError(
        "The leaves of an element are numbers, text, arrays of them, or datasets. Received: "
        f"{value!r} of type {type(value).__name__}"
    )


def is_text(leaf: Any) -> bool:
    """Whether a leaf is text, and not ragged."""
    return isinstance(leaf, bytes) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O")


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of a leaf that is not a dataset."""
    return getattr(leaf, "shape", ())


def dtype_of(leaf: Any) -> np.dtype:
    """Returns the dtype of a leaf that is not a dataset; `object` for text."""
    return np.dtype(object) if isinstance(leaf, bytes) else leaf.dtype


def stack(elements: Sequence[Leaves]) -> Leaves:
    """Returns consecutive elements, at least one, stacked along a new axis 0.

    Raises:
        InvalidArgumentError: A leaf has different shapes or dtypes.
        TypeError: A leaf is a dataset.
    """
    return tuple(
        _stack_leaf([element[index] for element in elements], index)
        for index in range(len(elements[0]))
    )


def _stack_leaf(leaves: list[Any], index: int) -> Any:
    first = leaves[0]
    if isinstance(first, NestedDataset):
        raise TypeError(
            "Datasets, such as windows, cannot be stacked into a batch. Batch each of them: "
            "dataset.flat_map(lambda window: window.batch(size))."
        )
    if isinstance(first, RaggedArray):
        return RaggedArray.stacked(leaves)
    shape, dtype = shape_of(first), dtype_of(first)
    for number, leaf in enumerate(leaves):
        if shape_of(leaf) != shape or dtype_of(leaf) != dtype:
            raise InvalidArgumentError(
                message="Cannot batch elements of different shapes or dtypes in component "
                f"{index}: the first element has shape {list(shape)} and dtype {dtype}, element "
                f"{number} of the batch has shape {list(shape_of(leaf))} and dtype "
                f"{dtype_of(leaf)}. Use padded_batch, or make them equal with map."
            )
    if not shape:
        return np.array(leaves, dtype)
    return np.stack(leaves)


def count_rows(block: Leaves) -> int:
    """Returns the number of elements stacked in `block`."""
    return block[0].shape[0]


def concatenate(blocks: Sequence[Leaves]) -> Leaves:
    """Returns blocks of stacked elements as one block.

    Raises:
        InvalidArgumentError: Their elements have different shapes.
    """
    if len(blocks) == 1:
        return blocks[0]
    try:
        return tuple(_concatenated(leaves) for leaves in zip(*blocks, strict=True))
    except ValueError as error:
        shapes = [[list(leaf.shape[1:]) for leaf in block] for block in blocks]
        raise InvalidArgumentError(
            message="Cannot batch elements of different shapes. Received elements of shapes: "
            f"{shapes}. Use padded_batch, or make them equal with map."
        ) from error


def _concatenated(leaves: Sequence[Any]) -> Any:
    return joined(leaves) if isinstance(leaves[0], RaggedArray) else np.concatenate(leaves)


def gathered(array: Any, indices: np.ndarray) -> Any:
    """Returns a copy of the rows at `indices`, in that order.

    Raises:
        IndexError: An index is out of range.

    Examples:
        >>> table = np.arange(6).reshape(2, 3)
        >>> gathered(table, np.array([1])), gathered(table.T, np.array([2, 0])).tolist()
        (array([[3, 4, 5]]), [[2, 5], [0, 3]])
    """
    if isinstance(array, RaggedArray):
        return array[indices]
    # `take` copies whole rows, in two thirds of the time; but it would first copy all of an
    # array whose rows are not contiguous.
    is_plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    return array.take(indices, axis=0) if is_plain else array[indices]


def read_only(array: Any) -> Any:
    """Returns a read-only view of `array`: a source's data is not changed."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
