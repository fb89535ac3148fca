"""The description of a table of `column_files`, which is checked before it is used.

Sizes must agree: the number of values with rows and shapes, the number of bytes with values. So a
file cannot make a reader allocate memory that it does not fill, or cut arrays at wrong places.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from unison.storage.decoding import (
    MOST_ITEMS,
    bytes_of,
    dtype_named,
    plain_dict,
    plain_list,
    shape_of,
    whole_number,
)
from unison.storage.inflating import most_inflated

#: The dtype of lengths and sizes.
LENGTH = np.dtype(np.int64)

#: Numbers and times.
_KINDS = "biufcmM"
_TEXT = np.dtype(object)

#: The most bytes that Snappy decompresses one byte to: copies of 64 bytes in 3.
_MOST_OF_SNAPPY = 22

_MOST_CRC = 2**32 - 1


class Part(NamedTuple):
    """One of the parts of a leaf in a block.

    Attributes:
        stored: The number of its bytes in the file.
        size: The number of its bytes in memory.
        checksum: The CRC-32 of its bytes in the file.
    """

    stored: int
    size: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class LeafBlock:
    """One leaf of the elements of a block.

    Attributes:
        shape: The shape of each array; None if they differ.
        parts: The parts, by name.
    """

    shape: tuple[int, ...] | None
    parts: dict[str, Part]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block: consecutive elements.

    Attributes:
        rows: The number of elements.
        leaves: Their leaves.
    """

    rows: int
    leaves: list[LeafBlock]


@dataclasses.dataclass(frozen=True)
class TableIndex:
    """A table: its dtypes and its blocks.

    Attributes:
        dtypes: The dtype of each leaf; `object` for text.
        blocks: The blocks, in order.
    """

    dtypes: list[np.dtype]
    blocks: list[Block]

    @classmethod
    def of(cls, described: Any, compression: str | None) -> TableIndex:
        """Returns the table that `TableWriter.finish` has described.

        Args:
            described: The decoded JSON.
            compression: See `codec_of`.

        Raises:
            ValueError, KeyError: No writer has written this.
        """
        dtypes = [dtype_of_leaf(name) for name in plain_list(plain_dict(described)["dtypes"])]
        blocks = [_block_of(each, dtypes, compression) for each in plain_list(described["blocks"])]
        whole_number(sum(block.rows for block in blocks))
        return cls(dtypes, blocks)


def dtype_of_leaf(name: Any) -> np.dtype:
    """Returns the dtype of a leaf, by the name that a writer gives it. Raises: ValueError."""
    return _TEXT if name == "object" else dtype_named(name, _KINDS)


def _block_of(described: Any, dtypes: list[np.dtype], compression: str | None) -> Block:
    rows = whole_number(plain_dict(described)["rows"], least=1)
    leaves = plain_list(described["leaves"], len(dtypes))
    pairs = zip(leaves, dtypes, strict=True)
    return Block(rows, [_leaf_of(leaf, rows, dtype, compression) for leaf, dtype in pairs])


def _leaf_of(described: Any, rows: int, dtype: np.dtype, compression: str | None) -> LeafBlock:
    sizes = plain_dict(described)["shape"]
    shape = None if sizes is None else shape_of(sizes)
    given = plain_dict(described["parts"])
    names = {"values"}
    if dtype == _TEXT:
        names.add("lengths")
    if shape is None:
        names.add("sizes")
    if given.keys() != names:
        raise ValueError(f"expected the parts {sorted(names)}, received {sorted(given)}")
    parts = {name: _part_of(part, compression) for name, part in given.items()}
    values = parts["lengths" if dtype == _TEXT else "values"]
    item = LENGTH if dtype == _TEXT else dtype
    if shape is not None and values.size != bytes_of((rows, *shape), item):
        raise ValueError(f"expected {rows} arrays of shape {shape}, received {values.size} bytes")
    if values.size % item.itemsize:
        raise ValueError(f"expected items of {item}, received {values.size} bytes")
    if shape is None and parts["sizes"].size % (rows * LENGTH.itemsize):
        raise ValueError(f"expected {rows} shapes, received {parts['sizes'].size} bytes")
    return LeafBlock(shape, parts)


def _part_of(described: Any, compression: str | None) -> Part:
    stored, size, checksum = plain_list(described, 3)
    part = Part(whole_number(stored), whole_number(size), whole_number(checksum, most=_MOST_CRC))
    most = {None: part.stored, "GZIP": most_inflated(part.stored)}.get(
        compression, _MOST_OF_SNAPPY * part.stored + 64
    )
    if part.size > most or (compression is None and part.size != part.stored):
        raise ValueError(f"{part.stored} bytes cannot hold {part.size}")
    return part


def checked_sizes(sizes: np.ndarray, items: int) -> np.ndarray:
    """Returns the sizes of contiguous arrays, if they add up.

    Args:
        sizes: The sizes of each array, of shape `(rows, axes)`.
        items: The total number of items of the arrays.

    Raises:
        ValueError: They do not add up.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        real = sizes.astype(np.float64)  # whose products do not overflow
        total = real.prod(axis=1).sum()
        largest = np.where(real == 0, 1, real).prod(axis=1).max(initial=0)
    is_possible = (sizes >= 0).all() and largest <= MOST_ITEMS
    if not is_possible or not math.isclose(total, items, abs_tol=0.5, rel_tol=0):
        raise ValueError(f"expected the sizes of {items} items, received those of {total:g}")
    return sizes


def checked_lengths(lengths: np.ndarray, num_bytes: int) -> np.ndarray:
    """Returns the lengths of contiguous texts, if they add up.

    Raises:
        ValueError: They do not add up.
    """
    total = lengths.astype(np.float64).sum()
    if (lengths < 0).any() or not math.isclose(total, num_bytes, abs_tol=0.5, rel_tol=0):
        raise ValueError(f"expected lengths of {num_bytes} bytes, received those of {total:g}")
    return lengths
