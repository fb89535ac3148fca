"""Generates a key pair and a self-signed certificate for this process.

A TLS server needs a certificate, and Python's `ssl` cannot generate one. This module has what that
takes: arithmetic on an elliptic curve (P-256), one signature (ECDSA), and the encoding (X.509 as
DER). TLS itself is OpenSSL's, with ephemeral keys for each connection (ECDHE). The certificate only
serves as a channel binding for the proof of the job's secret: its signature is not trusted, and the
private key stays in the memory of this process.

Python's integer arithmetic is not constant-time. That is acceptable here: the secret numbers are
used once, in one process, before it accepts connections, and are discarded with the process.

Sources: SEC 1 and SEC 2 (the curve and the private key's encoding), FIPS 186-5 (ECDSA), RFC 5280
(the certificate), RFC 5480 (the public key).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import NamedTuple

# The curve y^2 = x^3 - 3x + b over the integers modulo p has a point G of order n (SEC 2, 2.4.2).
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_BYTES = 32

# Object identifiers as DER.
_EC_PUBLIC_KEY = bytes.fromhex("06072a8648ce3d0201")
_P_256 = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_WITH_SHA256 = bytes.fromhex("06082a8648ce3d040302")
_COMMON_NAME = bytes.fromhex("0603550403")

# Tags of DER.
_INTEGER, _BIT_STRING, _OCTET_STRING, _UTF8_STRING = 0x02, 0x03, 0x04, 0x0C
_UTC_TIME, _GENERALIZED_TIME, _SEQUENCE, _SET = 0x17, 0x18, 0x30, 0x31

_Point = tuple[int, int] | None


class KeyPair(NamedTuple):
    """A private key and its certificate.

    Attributes:
        certificate: The certificate as DER.
        pem: The private key and the certificate as PEM, for `ssl.SSLContext.load_cert_chain`.
    """

    certificate: bytes
    pem: bytes


def new_key_pair(name: str = "unison") -> KeyPair:
    """Returns a new private key and a self-signed certificate.

    Args:
        name: The common name of the certificate. It is not verified.

    Examples:
        >>> new_key_pair().pem.decode().splitlines()[0]
        '-----BEGIN EC PRIVATE KEY-----'
    """
    private = 1 + secrets.randbelow(_N - 1)
    point = _multiplied(private, _G)
    assert point is not None
    public = b"\x04" + point[0].to_bytes(_BYTES, "big") + point[1].to_bytes(_BYTES, "big")
    certificate = _certificate(name, private, public)
    key = _der(
        _SEQUENCE,
        _number(1),
        _der(_OCTET_STRING, private.to_bytes(_BYTES, "big")),
        _der(0xA0, _P_256),
        _der(0xA1, _bits(public)),
    )
    return KeyPair(certificate, _pem("EC PRIVATE KEY", key) + _pem("CERTIFICATE", certificate))


def _certificate(name: str, private: int, public: bytes) -> bytes:
    names = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _text(name))))
    algorithm = _der(_SEQUENCE, _ECDSA_WITH_SHA256)
    # Always valid: it is discarded with the process, and machines' clocks may differ.
    dates = _der(
        _SEQUENCE, _der(_UTC_TIME, b"700101000000Z"), _der(_GENERALIZED_TIME, b"99991231235959Z")
    )
    key = _der(_SEQUENCE, _der(_SEQUENCE, _EC_PUBLIC_KEY, _P_256), _bits(public))
    version, serial = _der(0xA0, _number(2)), _number(1 + secrets.randbits(127))
    signed = _der(_SEQUENCE, version, serial, algorithm, names, dates, names, key)
    return _der(_SEQUENCE, signed, algorithm, _bits(_signature(private, signed)))


def _signature(private: int, message: bytes) -> bytes:
    """Returns the ECDSA signature of a message's SHA-256 hash."""
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    while True:
        nonce = 1 + secrets.randbelow(_N - 1)
        point = _multiplied(nonce, _G)
        assert point is not None
        r = point[0] % _N
        s = pow(nonce, -1, _N) * (digest + r * private) % _N
        if r and s:
            return _der(_SEQUENCE, _number(r), _number(s))


def _multiplied(factor: int, point: _Point) -> _Point:
    """Returns a multiple of a point of the curve; None is the point at infinity."""
    result: _Point = None
    while factor:
        if factor & 1:
            result = _sum(result, point)
        point = _sum(point, point)
        factor >>= 1
    return result


def _sum(one: _Point, other: _Point) -> _Point:
    if one is None or other is None:
        return other if one is None else one
    (x1, y1), (x2, y2) = one, other
    if x1 == x2 and (y1 + y2) % _P == 0:
        return None
    if one == other:
        slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, _P) % _P
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _P) % _P
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _number(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(content: bytes) -> bytes:
    return _der(_BIT_STRING, b"\0", content)


def _text(value: str) -> bytes:
    return _der(_UTF8_STRING, value.encode())


def _pem(label: str, content: bytes) -> bytes:
    lines = base64.encodebytes(content).replace(b"\n", b"")
    wrapped = b"\n".join(lines[start : start + 64] for start in range(0, len(lines), 64))
    return b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (
        label.encode(),
        wrapped,
        label.encode(),
    )
