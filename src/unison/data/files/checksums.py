"""The checksums of TensorFlow's files: CRC-32C, "masked" as TensorFlow stores them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

#: The constant that is added to a checksum, after a rotation, when it is stored.
MASK_DELTA = 0xA282EAD8


@functools.cache
def crc32c() -> Callable[[Any], int]:
    """Returns the function that computes the CRC-32C of bytes.

    Raises:
        ImportError: The package for this is not installed.
    """
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError(
            "TFRecord files and TensorFlow's checkpoints have checksums, which google-crc32c "
            "computes. It is not installed: pip install 'unison[records]'"
        ) from error
    return google_crc32c.value


def masked(crc: int) -> int:
    """Returns a checksum in its stored form: a CRC of bytes that contain CRCs would detect less."""
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & 0xFFFFFFFF


@functools.lru_cache(1 << 16)
def masked_of_length(length: int) -> int:
    """Returns the stored checksum of a record's length."""
    return masked(crc32c()(length.to_bytes(8, "little")))


def headers_in(data: bytes) -> np.ndarray:
    """Returns the positions in `data` of numbers of 8 bytes that are followed by their checksum."""
    if len(data) < 12:
        return np.empty(0, np.int64)
    numbers = np.frombuffer(data, np.uint8)
    count = len(data) - 11
    # A CRC is linear: the CRC of 8 bytes is the sum of each byte's contribution.
    sums = np.full(count, crc32c()(bytes(8)), np.uint32)
    for place, table in enumerate(_tables()):
        sums ^= table[numbers[place : place + count]]
    stored = np.zeros(count, np.uint32)
    for place in range(4):
        stored |= numbers[8 + place : 8 + place + count].astype(np.uint32) << np.uint32(8 * place)
    expected = ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(MASK_DELTA)
    return np.flatnonzero(expected == stored)


@functools.cache
def _tables() -> list[np.ndarray]:
    """Returns for each of 8 positions the contribution of each value of a byte to the CRC."""
    none = crc32c()(bytes(8))
    values = [
        [crc32c()(bytes(place) + bytes([value]) + bytes(7 - place)) ^ none for value in range(256)]
        for place in range(8)
    ]
    return [np.array(table, np.uint32) for table in values]
