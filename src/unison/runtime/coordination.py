"""The key-value store that the processes of `jax.distributed` share."""

from __future__ import annotations

import jax

from unison.runtime import liveness
from unison.runtime.private_jax import coordination_client

#: The coordination service accepts messages of a few megabytes; longer values are split.
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
                "Processes exchange values through JAX's coordination service. Call "
                "jax.distributed.initialize() in each of them first."
            )
        self._client = client
        #: Distinguishes this job of `jax.distributed` from one that the process joins later.
        self.service = id(client)

    def put(self, key: str, value: bytes) -> None:
        """Keeps a value under a key that has none.

        Raises:
            UnavailableError: A process of the job is lost, possibly the one that hosts the values.
        """
        liveness.check()
        pieces = [
            value[start : start + _BYTES_A_PIECE]
            for start in range(_BYTES_A_PIECE, len(value), _BYTES_A_PIECE)
        ]
        for number, piece in enumerate(pieces):
            self._client.key_value_set_bytes(f"{key}.{number}", piece)
        # Written last, so that a reader that finds it also finds all pieces.
        head = len(pieces).to_bytes(4, "big") + value[:_BYTES_A_PIECE]
        self._client.key_value_set_bytes(key, head)

    def get(self, key: str, seconds: float) -> bytes | None:
        """Returns the value of a key; None if there is none within `seconds`.

        Raises:
            UnavailableError: A process of the job is lost, possibly the one that hosts the values.
            jax.errors.JaxRuntimeError: The service cannot be reached.
        """
        liveness.check()
        milliseconds = max(int(seconds * 1000), 1)
        try:
            head = self._client.blocking_key_value_get_bytes(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        keys = [f"{key}.{number}" for number in range(int.from_bytes(head[:4], "big"))]
        get = self._client.blocking_key_value_get_bytes
        return b"".join([head[4:], *(get(name, milliseconds) for name in keys)])

    def remove_all(self, folder: str) -> None:
        """Deletes the values of all keys that begin with `folder` and a slash."""
        liveness.check()
        self._client.key_value_delete(folder + "/")

    def lost(self, worker: int) -> Exception | None:
        """Returns the error to raise for a process that will put nothing more, else None."""
        return liveness.lost(worker)
