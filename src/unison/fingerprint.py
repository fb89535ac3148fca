"""FarmHash's 64-bit fingerprint, with which TensorFlow hashes strings into buckets.

Source: Google's FarmHash (`farmhashna::Hash64`, `Fingerprint64`), of which this is a port;
`tf.strings.to_hash_bucket_fast` is the fingerprint modulo the number of buckets.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F


def fingerprint64(text: bytes) -> int:
    """Returns the fingerprint of `text`, an unsigned 64-bit number.

    Examples:
        >>> fingerprint64(b"Hello"), fingerprint64(b"TensorFlow") % 3
        (15404698994557526151, 2)

    TF: `tf.fingerprint`, `tf.strings.to_hash_bucket_fast`.
    """
    size = len(text)
    if size <= 16:
        return _hash_up_to_16(text)
    if size <= 32:
        return _hash_up_to_32(text)
    if size <= 64:
        return _hash_up_to_64(text)
    return _hash_long(text)


def concatenated_fingerprints(first: int, second: int) -> int:
    """Returns the fingerprint of two things, given theirs.

    TF: `tsl::FingerprintCat64`, by which `tf.sparse.cross_hashed` hashes.
    """
    factor = 0xC6A4A7935BD1E995
    result = first ^ factor ^ ((_mix((second * factor) & _MASK) * factor) & _MASK)
    return _mix((_mix((result * factor) & _MASK) * factor) & _MASK)


def _fetch64(text: bytes, at: int) -> int:
    return int.from_bytes(text[at : at + 8], "little")


def _fetch32(text: bytes, at: int) -> int:
    return int.from_bytes(text[at : at + 4], "little")


def _rotate(value: int, by: int) -> int:
    return ((value >> by) | (value << (64 - by))) & _MASK


def _mix(value: int) -> int:
    return value ^ (value >> 47)


def _hash_16_bytes(u: int, v: int, factor: int) -> int:
    a = _mix(((u ^ v) * factor) & _MASK)
    return (_mix(((v ^ a) * factor) & _MASK) * factor) & _MASK


def _hash_up_to_16(text: bytes) -> int:
    size = len(text)
    factor = _K2 + size * 2
    if size >= 8:
        a = (_fetch64(text, 0) + _K2) & _MASK
        b = _fetch64(text, size - 8)
        c = (_rotate(b, 37) * factor + a) & _MASK
        d = ((_rotate(a, 25) + b) * factor) & _MASK
        return _hash_16_bytes(c, d, factor)
    if size >= 4:
        return _hash_16_bytes(size + (_fetch32(text, 0) << 3), _fetch32(text, size - 4), factor)
    if size > 0:
        y = text[0] + (text[size >> 1] << 8)
        z = size + (text[size - 1] << 2)
        return (_mix((y * _K2 ^ z * _K0) & _MASK) * _K2) & _MASK
    return _K2


def _hash_up_to_32(text: bytes) -> int:
    size = len(text)
    factor = _K2 + size * 2
    a = (_fetch64(text, 0) * _K1) & _MASK
    b = _fetch64(text, 8)
    c = (_fetch64(text, size - 8) * factor) & _MASK
    d = (_fetch64(text, size - 16) * _K2) & _MASK
    u = (_rotate((a + b) & _MASK, 43) + _rotate(c, 30) + d) & _MASK
    v = (a + _rotate((b + _K2) & _MASK, 18) + c) & _MASK
    return _hash_16_bytes(u, v, factor)


def _hash_up_to_64(text: bytes) -> int:
    size = len(text)
    factor = _K2 + size * 2
    a = (_fetch64(text, 0) * _K2) & _MASK
    b = _fetch64(text, 8)
    c = (_fetch64(text, size - 8) * factor) & _MASK
    d = (_fetch64(text, size - 16) * _K2) & _MASK
    y = (_rotate((a + b) & _MASK, 43) + _rotate(c, 30) + d) & _MASK
    z = _hash_16_bytes(y, (a + _rotate((b + _K2) & _MASK, 18) + c) & _MASK, factor)
    e = (_fetch64(text, 16) * factor) & _MASK
    f = _fetch64(text, 24)
    g = ((y + _fetch64(text, size - 32)) * factor) & _MASK
    h = ((z + _fetch64(text, size - 24)) * factor) & _MASK
    u = (_rotate((e + f) & _MASK, 43) + _rotate(g, 30) + h) & _MASK
    v = (e + _rotate((f + a) & _MASK, 18) + g) & _MASK
    return _hash_16_bytes(u, v, factor)


def _weak_hash_32_bytes(text: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_fetch64(text, at + offset) for offset in (0, 8, 16, 24))
    a = (a + w) & _MASK
    b = _rotate((b + a + z) & _MASK, 21)
    c = a
    a = (a + x + y) & _MASK
    b = (b + _rotate(a, 44)) & _MASK
    return (a + z) & _MASK, (b + c) & _MASK


def _hash_long(text: bytes) -> int:
    size = len(text)
    x = 81
    y = (81 * _K1 + 113) & _MASK
    z = (_mix((y * _K2 + 113) & _MASK) * _K2) & _MASK
    v = (0, 0)
    w = (0, 0)
    x = (x * _K2 + _fetch64(text, 0)) & _MASK
    end = ((size - 1) // 64) * 64
    last = end + ((size - 1) & 63) - 63
    for at in range(0, end, 64):
        x = (_rotate((x + y + v[0] + _fetch64(text, at + 8)) & _MASK, 37) * _K1) & _MASK
        y = (_rotate((y + v[1] + _fetch64(text, at + 48)) & _MASK, 42) * _K1) & _MASK
        x ^= w[1]
        y = (y + v[0] + _fetch64(text, at + 40)) & _MASK
        z = (_rotate((z + w[0]) & _MASK, 33) * _K1) & _MASK
        v = _weak_hash_32_bytes(text, at, (v[1] * _K1) & _MASK, (x + w[0]) & _MASK)
        w = _weak_hash_32_bytes(
            text, at + 32, (z + w[1]) & _MASK, (y + _fetch64(text, at + 16)) & _MASK
        )
        z, x = x, z
    factor = (_K1 + ((z & 0xFF) << 1)) & _MASK
    w = ((w[0] + ((size - 1) & 63)) & _MASK, w[1])
    v = ((v[0] + w[0]) & _MASK, v[1])
    w = ((w[0] + v[0]) & _MASK, w[1])
    x = (_rotate((x + y + v[0] + _fetch64(text, last + 8)) & _MASK, 37) * factor) & _MASK
    y = (_rotate((y + v[1] + _fetch64(text, last + 48)) & _MASK, 42) * factor) & _MASK
    x ^= (w[1] * 9) & _MASK
    y = (y + v[0] * 9 + _fetch64(text, last + 40)) & _MASK
    z = (_rotate((z + w[0]) & _MASK, 33) * factor) & _MASK
    v = _weak_hash_32_bytes(text, last, (v[1] * factor) & _MASK, (x + w[0]) & _MASK)
    w = _weak_hash_32_bytes(
        text, last + 32, (z + w[1]) & _MASK, (y + _fetch64(text, last + 16)) & _MASK
    )
    z, x = x, z
    return _hash_16_bytes(
        (_hash_16_bytes(v[0], w[0], factor) + _mix(y) * _K0 + z) & _MASK,
        (_hash_16_bytes(v[1], w[1], factor) + x) & _MASK,
        factor,
    )
