"""A server's snapshots: what it needs to come back, in one file, written every so often.

The file is a line of JSON with a checksum of what follows, and the arrays as NumPy writes them
(without pickling). It becomes visible when it is complete; a damaged one is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import zlib
from typing import Any

import numpy as np

from unison.errors import DataLossError


def write(path: pathlib.Path, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes a snapshot in place of the one at `path`."""
    body = io.BytesIO()
    names = list(arrays)
    described = []
    for name in names:
        array = np.ascontiguousarray(arrays[name])
        described.append([name, array.dtype.name, np.shape(arrays[name])])
        body.write(array.reshape(-1).view(np.uint8).data)
    data = body.getbuffer()
    head = {"facts": facts, "arrays": described, "checksum": zlib.crc32(data)}
    written = path.with_name(path.name + ".part")
    with open(written, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the facts and arrays of a snapshot.

    Raises:
        DataLossError: It is damaged.
    """
    import jax.numpy as jnp

    with open(path, "rb") as file:
        try:
            head = json.loads(file.readline())
        except ValueError as error:
            raise DataLossError(message=f"The snapshot {path} is damaged: {error}") from error
        data = np.frombuffer(file.read(), np.uint8)
    if zlib.crc32(data.data) != head["checksum"]:
        raise DataLossError(message=f"The snapshot {path} is damaged: its checksum is wrong.")
    arrays = {}
    start = 0
    for name, dtype_name, shape in head["arrays"]:
        dtype = jnp.dtype(dtype_name)
        size = dtype.itemsize * int(np.prod(shape))
        arrays[name] = data[start : start + size].view(dtype).reshape(shape)
        start += size
    return head["facts"], arrays
