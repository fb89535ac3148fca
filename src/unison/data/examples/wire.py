"""Serialized Examples parsed together: NumPy advances through all of a batch at the same time.

A protocol buffer may be encoded in several ways; this parses the usual one, which is
TensorFlow's and protobuf's own: numbers packed, no unknown fields. If a batch has anything else,
`read_columns` returns None, and protobuf has to parse it.

The format of an Example, `<n>` being a length:

    0a <n> { 0a <n> { 0a <n> key  12 <n> { 0a <n> {0a <n> bytes}*        a list of bytes,
                                         | 12 <n> {0a <n> floats}?       of floats,
                                         | 1a <n> {0a <n> varints}? }    of integers
             } }*
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

#: Bytes of zeros after the last Example, so that reading past its end is harmless.
_MARGIN = 16

#: The maximum number of different features at the same place of a batch's Examples.
_MOST_KEYS = 64

_LENGTH_DELIMITED_1 = 0x0A
_LENGTH_DELIMITED_2 = 0x12


class Kind(enum.IntEnum):
    """The kind of a feature's values; the value is its tag."""

    BYTES = 0x0A
    FLOAT = 0x12
    INT64 = 0x1A


class Column(NamedTuple):
    """One feature of many Examples.

    Attributes:
        counts: The number of values of each Example, int64; -1 if an Example lacks the feature.
        values: The values of all Examples, concatenated: float32, int64, or `bytes` objects.
    """

    counts: np.ndarray
    values: np.ndarray


class _IrregularError(Exception):
    """The bytes are not in the usual encoding, or are not an Example."""


def read_columns(serialized: Sequence[bytes], kinds: Mapping[bytes, Kind]) -> list[Column] | None:
    """Returns features of serialized Examples.

    Args:
        serialized: The Examples; at least one.
        kinds: The requested features' keys, in UTF-8, and kinds.

    Returns:
        A column for each feature; None if this encoding is not supported here.
    """
    try:
        walk = _Walk(serialized)
        places = walk.features([*kinds])
        return [
            walk.column(*place, kind) for place, kind in zip(places, kinds.values(), strict=True)
        ]
    except _IrregularError:
        return None


class _Walk:
    """A cursor that advances through all Examples of a batch together."""

    def __init__(self, serialized: Sequence[bytes]):
        lengths = np.fromiter(map(len, serialized), np.int64, len(serialized))
        self._bytes = b"".join((*serialized, bytes(_MARGIN)))
        self._data = np.frombuffer(self._bytes, np.uint8)
        self._ends = np.cumsum(lengths)
        self._begins = self._ends - lengths

    def features(self, keys: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the beginnings and ends of the values of features; -1 if there are none."""
        count = len(self._ends)
        places = {key: (np.full(count, -1), np.full(count, -1)) for key in keys}
        position, end = self._field(self._begins, _LENGTH_DELIMITED_1, self._ends)
        _require(end == self._ends)
        rows = np.arange(count)
        while True:
            is_inside = position < end
            if not is_inside.all():
                rows, position, end = rows[is_inside], position[is_inside], end[is_inside]
            if not rows.size:
                return list(places.values())
            entry, next_entry = self._field(position, _LENGTH_DELIMITED_1, end)
            key, key_end = self._field(entry, _LENGTH_DELIMITED_1, next_entry)
            value, value_end = self._field(key_end, _LENGTH_DELIMITED_2, next_entry)
            _require(value_end == next_entry)
            for which, text in self._distinct(key, key_end):
                if text in places:
                    begins, ends = places[text]
                    begins[rows[which]], ends[rows[which]] = value[which], value_end[which]
            position = next_entry

    def column(self, begins: np.ndarray, ends: np.ndarray, kind: Kind) -> Column:
        """Returns the values of a feature between these positions."""
        counts = np.full(len(begins), -1)
        # A feature with a name and nothing else counts as missing.
        rows = np.flatnonzero(begins < ends)
        position, end = self._field(begins[rows], kind, ends[rows])
        _require(end == ends[rows])
        if kind is Kind.BYTES:
            counts[rows], values = self._texts(position, end)
        else:
            packed = np.flatnonzero(position < end)
            counts[rows] = 0
            payload, payload_end = self._field(position[packed], _LENGTH_DELIMITED_1, end[packed])
            _require(payload_end == end[packed])
            read = self._floats if kind is Kind.FLOAT else self._integers
            counts[rows[packed]], values = read(payload, payload_end)
        return Column(counts, values)

    def _texts(self, position: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of strings between these positions, and the strings."""
        counts = np.zeros(len(position), np.int64)
        found = []
        rows = np.arange(len(position))
        while rows.size:
            is_inside = position < end
            if not is_inside.all():
                rows, position, end = rows[is_inside], position[is_inside], end[is_inside]
                continue
            begin, position = self._field(position, _LENGTH_DELIMITED_1, end)
            counts[rows] += 1
            found.append((rows, begin, position))
        if not found:
            return counts, np.empty(0, object)
        rows, begins, ends = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if len(found) > 1:
            order = np.argsort(rows, kind="stable")
            begins, ends = begins[order], ends[order]
        data = self._bytes
        values = np.empty(len(begins), object)
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        values[:] = [data[begin:end] for begin, end in pairs]
        return counts, values

    def _floats(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = ends - begins
        _require(sizes % 4 == 0)
        return sizes // 4, self._gathered(begins, sizes).view("<f4")

    def _integers(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = ends - begins
        data = self._gathered(begins, sizes)
        if not data.size:
            return sizes, np.empty(0, np.int64)
        is_last = data < 0x80
        stops = np.cumsum(sizes)
        _require(is_last[stops - 1])
        until = np.concatenate([[0], np.cumsum(is_last)[stops - 1]])
        lasts = np.flatnonzero(is_last)
        if lasts.size == data.size:
            return np.diff(until), data.astype(np.int64)
        firsts = np.concatenate([[0], lasts[:-1] + 1])
        lengths = lasts - firsts + 1
        _require(lengths <= 10)
        places = np.arange(len(data)) - np.repeat(firsts, lengths)
        parts = (data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
        return np.diff(until), np.bitwise_or.reduceat(parts, firsts).view(np.int64)

    def _gathered(self, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the bytes between these positions, concatenated."""
        if not sizes.size:
            return np.empty(0, np.uint8)
        if (sizes == sizes[0]).all():
            return self._data[begins[:, None] + np.arange(sizes[0])].ravel()
        stops = np.cumsum(sizes)
        return self._data[np.arange(stops[-1]) + np.repeat(begins - stops + sizes, sizes)]

    def _field(
        self, position: np.ndarray, tag: int, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the beginnings and ends of fields with a tag at these positions, within `end`."""
        _require(self._data[position] == tag)
        length, begin = self._varint(position + 1)
        stop = begin + length
        _require(stop <= end)
        return begin, stop

    def _varint(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lengths at these positions, and the positions after them."""
        byte = self._data[position]
        value = (byte & 0x7F).astype(np.int64)
        position = position + 1
        goes_on = byte >= 0x80
        shift = 7
        while goes_on.any():
            # A longer varint would be a length that exceeds the memory.
            _require(np.bool_(shift < 35))
            byte = np.where(goes_on, self._data[position], 0)
            value |= (byte & 0x7F).astype(np.int64) << shift
            position = position + goes_on
            goes_on = byte >= 0x80
            shift += 7
        return value, position

    def _distinct(self, begins: np.ndarray, ends: np.ndarray) -> list[tuple[np.ndarray, bytes]]:
        """Returns the different texts at these positions, each with its rows."""
        found: list[tuple[np.ndarray, bytes]] = []
        rows = np.arange(len(begins))
        while rows.size:
            _require(np.bool_(len(found) < _MOST_KEYS))
            begin, end = int(begins[rows[0]]), int(ends[rows[0]])
            text = self._bytes[begin:end]
            is_same = ends[rows] - begins[rows] == end - begin
            same = rows[is_same]
            places = begins[same][:, None] + np.arange(end - begin)
            has_text = (self._data[places] == np.frombuffer(text, np.uint8)).all(1)
            found.append((same[has_text], text))
            if has_text.all() and is_same.all():
                break
            is_same[is_same] = has_text
            rows = rows[~is_same]
        return found


def _require(holds: np.ndarray | np.bool_) -> None:
    if not holds.all():
        raise _IrregularError
