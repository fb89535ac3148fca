"""Keys: random numbers of an element, the same wherever and whenever it is computed.

The key of element i in pass p over a dataset with seed s is the i-th output of SplitMix64 (Steele,
Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) from a state that s and
p determine. All elements of a pass have different keys. The numbers never change between releases:
training can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unison.data.leaves import count_rows
from unison.data.passes import Passes
from unison.data.plan import Plan, Rows, Stream, Transformation
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Leaves, Structure, tuple_of

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_KEY = ArraySpec((2,), np.dtype(np.uint32))

#: The number of keys that are computed at a time if elements are taken one by one.
_KEYS_AT_ONCE = 256


def element_keys(seed: int, number: int, indices: np.ndarray) -> np.ndarray:
    """Returns the keys of elements.

    Args:
        seed: Any integer; bits beyond 64 are ignored.
        number: The number of the pass.
        indices: The elements' numbers, int64 of shape [n].

    Returns:
        uint32 of shape [n, 2].

    Examples:
        >>> element_keys(1, 0, np.arange(2))
        array([[1858625311, 2236070924],
               [1828076284, 3256502026]], dtype=uint32)
    """
    # Arrays, because NumPy's scalars warn of the overflow that is intended here.
    state = _mixed(np.array([seed % 2**64], np.uint64) + _GAMMA)
    state = _mixed(state + np.array([number], np.uint64) * _GAMMA)
    mixed = _mixed(state + (indices.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    # The high half first, on every machine.
    return mixed.astype(">u8").view(">u4").reshape(-1, 2).astype(np.uint32)


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Keyed(Transformation):
    """The elements, each followed by its key as one more argument.

    Args:
        source: The input.
        seed: Determines the keys.
    """

    identity = ("_seed",)
    lasting = ("_passes",)

    def __init__(self, source: Plan, seed: int):
        super().__init__(source)
        self._seed = seed
        self._passes = Passes()

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return Signature(_with_key(inputs[0].structure), (*inputs[0].specs, _KEY))

    @property
    def structure(self) -> Structure:
        return _with_key(self._input.structure)

    def rows(self) -> Rows | None:
        rows = self._input.rows()
        return None if rows is None else _KeyedRows(rows, _Keys(self._seed, self._passes))

    def _stream(self) -> Stream:
        return _KeyedStream(self._input.stream(), _Keys(self._seed, self._passes))


def _with_key(structure: Structure) -> Structure:
    if structure.kind is tuple:
        return tuple_of(*structure.children, LEAF)
    return tuple_of(structure, LEAF)


class _Keys:
    """The keys of one pass, from the first one."""

    def __init__(self, seed: int, passes: Passes):
        self._seed = seed
        self._passes = passes
        self._number = passes.state()
        self._latest: tuple[int, np.ndarray] = (-1, np.empty(0))

    def of(self, indices: np.ndarray) -> np.ndarray:
        self._passes.resume(self._number)
        return element_keys(self._seed, self._number, indices)

    def of_one(self, index: int) -> np.ndarray:
        first = index - index % _KEYS_AT_ONCE
        latest = self._latest
        if latest[0] != first:
            latest = first, self.of(np.arange(first, first + _KEYS_AT_ONCE))
            self._latest = latest
        return latest[1][index - first]


class _KeyedRows(Rows):
    def __init__(self, rows: Rows, keys: _Keys):
        self._rows = rows
        self._keys = keys

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Leaves:
        return (*self._rows.take(indices), self._keys.of(indices))

    def slice(self, start: int, stop: int) -> Leaves:
        return (*self._rows.slice(start, stop), self._keys.of(np.arange(start, stop)))

    def element(self, index: int) -> Leaves:
        return (*self._rows.element(index), self._keys.of_one(index))


class _KeyedStream(Stream):
    moving = ("_stream", "_position")

    def __init__(self, stream: Stream, keys: _Keys):
        self._stream = stream
        self._keys = keys
        self._position = 0

    def next(self) -> Leaves | None:
        element = self._stream.next()
        if element is None:
            return None
        self._position += 1
        return (*element, self._keys.of_one(self._position - 1))

    def next_block(self, count: int) -> Leaves | None:
        block = self._stream.next_block(count)
        if block is None:
            return None
        start = self._position
        self._position += count_rows(block)
        return (*block, self._keys.of(np.arange(start, self._position)))

    def skip(self, count: int) -> int:
        skipped = self._stream.skip(count)
        self._position += skipped
        return skipped
