"""`Dataset.random`: an endless source of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unison.data.passes import Passes
from unison.data.plan import INFINITE, Plan, Stream
from unison.data.randomness import random_generator
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Leaves

_LIMIT = 2**32

#: So many numbers are in memory while others are skipped.
_SKIPPED_AT_ONCE = 2**16


class Random(Plan):
    """Integers from 0 up to 2**32, without end.

    Args:
        seed: Determines the numbers.
        rerandomizes: Whether every pass has different numbers.
    """

    identity = ("_seed", "_rerandomizes")
    lasting = ("_passes",)

    def __init__(self, seed: int, rerandomizes: bool):
        self._seed = seed
        self._rerandomizes = rerandomizes
        self._passes = Passes()

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        del inputs
        return Signature(LEAF, (ArraySpec((), np.dtype(np.int64)),))

    def cardinality(self) -> int:
        return INFINITE

    def _stream(self) -> Stream:
        epoch = self._passes.begin() if self._rerandomizes else 0
        return _RandomStream(random_generator(self._seed, epoch))


class _RandomStream(Stream):
    moving = ("_generator",)

    def __init__(self, generator: np.random.Generator):
        self._generator = generator

    def next(self) -> Leaves:
        return (self._generator.integers(_LIMIT),)

    def next_block(self, count: int) -> Leaves:
        return (self._generator.integers(_LIMIT, size=count),)

    def skip(self, count: int) -> int:
        for begin in range(0, count, _SKIPPED_AT_ONCE):
            self.next_block(min(_SKIPPED_AT_ONCE, count - begin))
        return count
