"""What a checkpoint holds as bytes, for another worker."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from unison.train.archive import SUFFIX
from unison.train.checkpoint import Checkpoint

#: In memory, where there is such a place.
_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def packed(checkpoint: Checkpoint) -> bytes:
    """Returns what the objects of a checkpoint hold, for `unpack` on another worker."""
    with _path() as path, open(checkpoint.write(path) + SUFFIX, "rb") as file:
        return file.read()


def unpack(checkpoint: Checkpoint, held: bytes) -> None:
    """Gives the objects of a checkpoint what those of another worker's like it hold."""
    with _path() as path:
        with open(path + SUFFIX, "wb") as file:
            file.write(held)
        checkpoint.read(path).expect_partial()


@contextlib.contextmanager
def _path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="unison-", dir=_FOLDER) as folder:
        yield os.path.join(folder, "state")
