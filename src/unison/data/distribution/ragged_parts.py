"""The replicas' parts of a ragged batch, padded so that few different programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unison.data.ragged import RaggedArray


def bucketed(parts: Sequence[RaggedArray]) -> list[RaggedArray]:
    """Returns the replicas' parts of a batch, with as many values each.

    Values are padded with zeros, and splits inside the outermost ones with empty rows, to the next
    power of two of the largest part, so that few different programs are compiled. The outermost
    splits tell what is real.
    """
    sizes = _sizes_of(parts)
    return [_padded_to(part, sizes) for part in parts]


def _sizes_of(parts: Sequence[RaggedArray]) -> list[int]:
    depth = len(parts[0].splits)
    return [
        _next_power_of_two(max(int(part.splits[level][-1]) for part in parts))
        for level in range(depth)
    ]


def _next_power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _padded_to(part: RaggedArray, sizes: Sequence[int]) -> RaggedArray:
    first, *inner = part.splits
    splits = [
        np.concatenate([own, np.full(size + 1 - len(own), own[-1], own.dtype)])
        for own, size in zip(inner, sizes, strict=False)
    ]
    missing = (sizes[-1] - len(part.flat), *part.flat.shape[1:])
    flat = np.concatenate([part.flat, np.zeros(missing, part.flat.dtype)])
    return RaggedArray(flat, (first, *splits))
