"""Generates a key pair and a self-signed certificate for this process.

A TLS server needs a certificate, and Python's `ssl` cannot generate one. The certificate only
serves as a channel binding for the proof of the job's secret: its signature is not trusted, and the
private key stays in the memory of this process.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple


class KeyPair(NamedTuple):
    """A private key and its certificate.

    Attributes:
        certificate: The certificate as DER.
        pem: The private key and the certificate as PEM, for `ssl.SSLContext.load_cert_chain`.
    """

    certificate: bytes
    pem: bytes


def new_key_pair(name: str = "unison") -> KeyPair:
    """Returns a new private key (P-256) and a self-signed certificate.

    Args:
        name: The common name of the certificate. It is not verified.

    Examples:
        >>> new_key_pair().pem.decode().splitlines()[0]
        '-----BEGIN PRIVATE KEY-----'
    """
    # Only jobs of several machines import it.
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder(names, names, key.public_key(), x509.random_serial_number())
        # Always valid: it is discarded with the process, and machines' clocks may differ.
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return KeyPair(
        certificate.public_bytes(Encoding.DER), private + certificate.public_bytes(Encoding.PEM)
    )
