"""`cache`: elements are computed in the first pass and kept for the later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.data.column_files import read_columns, write_columns
from unison.data.leaves import NestedDataset, concatenate, dtype_of, shape_of
from unison.data.plan import Plan, Rows, SameElements, Stream
from unison.data.sources import ArrayRows, ListStream
from unison.data.structure import Leaves


class Cache(SameElements):
    """The elements, which are kept once a pass has come to their end.

    Elements of one shape are kept stacked, so that later passes have access by index.

    Args:
        source: The input.
        path: Where files are kept for later processes; None for memory only.
    """

    def __init__(self, source: Plan, path: str | None = None):
        super().__init__(source)
        self._path = path
        columns = None if path is None else read_columns(path)
        self._kept: Rows | Sequence[Leaves] | None = columns and ArrayRows(columns)

    def cardinality(self) -> int:
        return self._input.cardinality() if self._kept is None else len(self._kept)

    def rows(self) -> Rows | None:
        return self._kept if isinstance(self._kept, Rows) else None

    def keep(self, blocks: list[Leaves]) -> None:
        """Keeps the elements of a whole pass, stacked in blocks.

        Raises:
            ValueError: They are to be kept in files, and have different shapes.
        """
        if self._kept is not None:
            return
        kept = _together(blocks)
        if self._path is not None:
            if not isinstance(kept, ArrayRows):
                raise ValueError(
                    "A cache in files takes elements of one shape, and at least one. Pad them, or "
                    f"cache in memory. Received: cache({self._path!r})"
                )
            write_columns(self._path, kept.arrays)
        self._kept = kept

    def _stream(self) -> Stream:
        if self._kept is None:
            return _KeepingStream(self, self._input.stream())
        assert not isinstance(self._kept, Rows)
        return ListStream(self._kept)


def _together(blocks: list[Leaves]) -> Rows | Sequence[Leaves]:
    """Returns all rows of the blocks: by index if they have one shape, else in a list."""
    kinds = {tuple((shape_of(leaf)[1:], dtype_of(leaf)) for leaf in block) for block in blocks}
    if len(kinds) == 1:
        return ArrayRows(concatenate(blocks))
    return [tuple(leaf[row] for leaf in block) for block in blocks for row in range(len(block[0]))]


class _KeepingStream(Stream):
    """A first pass, which gives what it has read to the cache when it comes to the end."""

    def __init__(self, cache: Cache, stream: Stream):
        self._cache = cache
        self._stream = stream
        self._blocks: list[Leaves] = []

    def next(self) -> Leaves | None:
        element = self._stream.next()
        self._note(None if element is None else tuple(map(_as_block, element)))
        return element

    def next_block(self, count: int) -> Leaves | None:
        block = self._stream.next_block(count)
        self._note(block)
        return block

    def _note(self, block: Leaves | None) -> None:
        if block is not None:
            self._blocks.append(block)
        else:
            self._cache.keep(self._blocks)


def _as_block(leaf: Any) -> np.ndarray:
    if isinstance(leaf, NestedDataset):
        raise TypeError("Datasets, such as windows, cannot be cached. Cache after flat_map.")
    if isinstance(leaf, bytes):
        block = np.empty(1, object)
        block[0] = leaf
        return block
    return np.asarray(leaf)[None]
