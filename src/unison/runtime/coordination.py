"""What the processes of `jax.distributed` tell each other: texts by key, which all of them see."""

from __future__ import annotations

import jax

from unison.runtime.private_jax import coordination_client

#: The coordination service passes messages of a few megabytes; longer values go in pieces.
_BYTES_A_PIECE = 1 << 20


class CoordinationStore:
    """Values in JAX's coordination service.

    Raises:
        RuntimeError: `jax.distributed.initialize` has not been called.
    """

    def __init__(self) -> None:
        client = coordination_client()
        if client is None:
            raise RuntimeError(
                "Processes agree by JAX's coordination service. Call jax.distributed.initialize() "
                "in each of them first."
            )
        self.client = client

    def put(self, key: str, value: bytes) -> None:
        """Keeps a value under a key that has none."""
        pieces = range(0, len(value), _BYTES_A_PIECE)
        for piece, start in enumerate(pieces):
            part = value[start : start + _BYTES_A_PIECE]
            self.client.key_value_set_bytes(f"{key}/piece{piece}", part)
        # Last, so that who sees it finds all pieces.
        self.client.key_value_set_bytes(f"{key}/pieces", str(len(pieces)).encode())

    def get(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key; None if there is none within `seconds`.

        Raises:
            jax.errors.JaxRuntimeError: The service cannot be reached.
        """
        milliseconds = max(int(seconds * 1000), 1)
        try:
            count = self.client.blocking_key_value_get_bytes(f"{key}/pieces", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        keys = [f"{key}/piece{piece}" for piece in range(int(count))]
        return b"".join(self.client.blocking_key_value_get_bytes(k, milliseconds) for k in keys)

    def remove(self, key: str) -> None:
        """Forgets the value of a key."""
        self.client.key_value_delete(key)
