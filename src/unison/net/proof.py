"""The proof of a shared secret, in both directions, without sending it.

Challenge and response with keyed hashes (HMAC-SHA256, RFC 2104). The client sends a nonce, and the
server another one. Then the client, and only after it the server, sends a keyed hash of the
transcript, which consists of:

- the role of the sender, against reflection: a proof cannot be sent back to its sender;
- both nonces, against replay;
- the *channel*, i.e. the protocol that the connection is for: a proof is not valid for another one;
- the *binding*: the hash of the server's certificate if the connection is encrypted (RFC 5929,
  `tls-server-end-point`, as in SCRAM-SHA-256-PLUS). A man in the middle has another certificate, so
  a proof that he passes on is not valid;
- the client's description of the connection (`about`).

This module does no I/O: see `unison.net.handshake`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from unison.errors import UnauthenticatedError

#: The start of a hello. A TLS record starts with 0x16, so one byte tells them apart.
_MAGIC = b"unison-1"
_REFUSED = b"refused:"

_CHANNEL_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32

#: The longest description of a connection.
MOST_ABOUT_BYTES = 64

_HELLO = struct.Struct(f"{len(_MAGIC)}s{_CHANNEL_BYTES}s{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"{len(_MAGIC)}s{_NONCE_BYTES}s")

HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
#: An answer consists of the length of `about` (one byte), `about`, and the proof.
ANSWER_HEAD_BYTES = 1
PROOF_BYTES = _PROOF_BYTES

#: The binding of a connection that is not encrypted.
NOT_ENCRYPTED = bytes(32)

#: Reasons for which a server refuses a client.
TLS_REQUIRED = b"TLS required"
WRONG_KEY = b"wrong key"
WRONG_CHANNEL = b"wrong channel"


class RefusedError(ConnectionError):
    """The peer has refused the connection, or does not follow the protocol.

    Attributes:
        reason: One of the reasons above; empty if the peer has not sent one.
    """

    def __init__(self, text: str, reason: bytes = b""):
        super().__init__(text)
        self.reason = reason


class ClientProof:
    """The client's side.

    Args:
        secret: The shared secret.
        channel: The channel; up to 16 bytes.
        about: A description of the connection for the server; up to 64 bytes.
        binding: The hash of the server's certificate.

    Examples:
        >>> client = ClientProof(b"k" * 32, b"test", about=b"view 3")
        >>> server = ServerProof(b"k" * 32)
        >>> answer = client.answer(server.challenge(client.hello))
        >>> client.check(server.verify(answer))
        >>> server.channel, server.about
        (b'test', b'view 3')
    """

    def __init__(
        self, secret: bytes, channel: bytes, about: bytes = b"", binding: bytes = NOT_ENCRYPTED
    ):
        if not 0 < len(channel) <= _CHANNEL_BYTES or len(about) > MOST_ABOUT_BYTES:
            raise ValueError(
                f"Expected a channel of 1 to {_CHANNEL_BYTES} bytes and at most {MOST_ABOUT_BYTES} "
                f"bytes about it. Received: {channel!r} and {about!r}."
            )
        self._secret = secret
        self._about = about
        self._binding = binding
        self._channel = channel
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._transcript = b""
        #: The first message.
        self.hello = _HELLO.pack(_MAGIC, channel, self._nonce)

    def answer(self, challenge: bytes) -> bytes:
        """Returns the answer to the server's challenge.

        Raises:
            RefusedError: It is not a challenge, but a refusal or another protocol.
        """
        _check_not_refused(challenge)
        magic, theirs = _CHALLENGE.unpack(challenge)
        if magic != _MAGIC:
            raise RefusedError("the peer does not speak Unison's protocol")
        self._transcript = _transcript(
            self._channel, self._nonce, theirs, self._binding, self._about
        )
        proof = _proof(self._secret, b"client", self._transcript)
        return bytes([len(self._about)]) + self._about + proof

    def check(self, proof: bytes) -> None:
        """Checks the server's proof.

        Raises:
            RefusedError: The server has refused this client.
            UnauthenticatedError: The server does not know the secret, or there is a man in the
                middle.
        """
        _check_not_refused(proof)
        if not hmac.compare_digest(proof, _proof(self._secret, b"server", self._transcript)):
            raise UnauthenticatedError(message="The peer does not know the key.")


class ServerProof:
    """The server's side.

    Args:
        secret: The shared secret.
        binding: The hash of this server's certificate.

    Attributes:
        channel: The client's channel, after `challenge`.
        about: The client's description of the connection, after `verify`.
    """

    def __init__(self, secret: bytes, binding: bytes = NOT_ENCRYPTED):
        self._secret = secret
        self._binding = binding
        self._own = secrets.token_bytes(_NONCE_BYTES)
        self._theirs = b""
        self.channel = self.about = b""

    def challenge(self, hello: bytes) -> bytes:
        """Returns the challenge for a client that has sent `hello`.

        Raises:
            RefusedError: It is not a hello.
        """
        magic, channel, self._theirs = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise RefusedError("the peer does not speak Unison's protocol")
        self.channel = channel.rstrip(b"\0")
        return _CHALLENGE.pack(_MAGIC, self._own)

    def verify(self, answer: bytes) -> bytes | None:
        """Returns this server's proof, or None if the client's answer is wrong.

        Args:
            answer: The length of `about` (one byte), `about`, and the client's proof.
        """
        about, proof = answer[ANSWER_HEAD_BYTES:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        transcript = _transcript(self.channel, self._theirs, self._own, self._binding, about)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", transcript)):
            return None
        self.about = about
        return _proof(self._secret, b"server", transcript)


def refusal(reason: bytes, size: int) -> bytes:
    """Returns a refusal, which replaces a message of `size` bytes."""
    return (_REFUSED + reason).ljust(size, b"\0")


def sign(secret: bytes, payload: bytes) -> bytes:
    """Returns a payload with its signature in front."""
    return hmac.digest(secret, b"signed " + payload, "sha256") + payload


def verified(secret: bytes, signed: bytes) -> bytes:
    """Returns the payload of signed bytes.

    Raises:
        UnauthenticatedError: They were changed, or signed with another secret.
    """
    signature, payload = signed[:_PROOF_BYTES], signed[_PROOF_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, b"signed " + payload, "sha256")):
        raise UnauthenticatedError(message="Signature mismatch: signed with another key.")
    return payload


def derived_name(secret: bytes, words: str) -> str:
    """Returns a name that cannot be guessed without the secret."""
    return hmac.digest(secret, b"name " + words.encode(), "sha256").hex()[:32]


def new_nonce() -> str:
    """Returns a number for one use, which need not be secret, in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def derived_key(secret: bytes, nonce: str) -> str:
    """Returns a key that processes with the same secret compute, and nobody else can.

    So it is not sent: the nonce is, and says nothing about it.

    Args:
        secret: The shared secret.
        nonce: A new one, from one of the processes, for each key.

    Examples:
        >>> nonce = new_nonce()
        >>> derived_key(b"k" * 32, nonce) == derived_key(b"k" * 32, nonce)
        True
        >>> len(bytes.fromhex(derived_key(b"k" * 32, nonce)))
        32
    """
    return hmac.digest(secret, b"key " + nonce.encode(), "sha256").hex()


def is_equal(given: str, expected: str) -> bool:
    """Compares two texts in constant time."""
    return hmac.compare_digest(
        hashlib.sha256(given.encode(errors="replace")).digest(),
        hashlib.sha256(expected.encode()).digest(),
    )


def _transcript(
    channel: bytes, client: bytes, server: bytes, binding: bytes, about: bytes
) -> bytes:
    # All parts but the last have a fixed length, so the encoding is unambiguous.
    return channel.ljust(_CHANNEL_BYTES, b"\0") + client + server + binding + about


def _proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + b" " + role + transcript, "sha256")


def _check_not_refused(received: bytes) -> None:
    if received.startswith(_REFUSED):
        reason = received.removeprefix(_REFUSED).rstrip(b"\0")
        raise RefusedError(f"refused by the peer: {reason.decode(errors='replace')}", reason)
