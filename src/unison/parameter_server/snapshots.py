"""A server's snapshots: what it needs to come back, in one file each, written every so often.

A snapshot has everything on the server as it is at one instant: an update is in it with all that it
has changed, and with the note that it was applied, or it is not in it at all. It is written aside
and renamed when it is complete: `ps-0.8.snapshot` after `ps-0.7.snapshot`, which stays until there
is a ninth one, as a later one may be found to be damaged. A process that is killed leaves a `.part`
at most, at which nobody looks.

The file begins with a line that has the CRC-32 of all that follows, as eight hexadecimal digits.
Then come a line of JSON, and the bytes of the arrays it describes. Nothing in it is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from unison.errors import DataLossError

logger = logging.getLogger("unison")

_CHECKSUM = b"%08x\n"


class Part(NamedTuple):
    """What belongs together in a snapshot.

    Attributes:
        facts: What JSON can say.
        arrays: By name.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Snapshots:
    """The snapshots of one server.

    Args:
        folder: Where they are.
        name: What their names begin with, which is no other server's.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = name
        #: The latest one that is known to be whole.
        self._latest: int | None = None

    def write(self, parts: Mapping[str, Part]) -> None:
        """Writes a snapshot; the one before stays, and older ones go.

        Raises:
            OSError: It could not be written. Those that are there stay.
        """
        before = self._numbers()
        latest = before[-1] + 1 if before else 1
        aside = self._folder / f"{self._name}.part"
        try:
            _write(aside, parts)
            os.replace(aside, self._path(latest))
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()  # where the disk is full
            raise
        with contextlib.suppress(OSError):  # some file systems know no such thing
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        for number in before:
            if number != self._latest:
                self._path(number).unlink(missing_ok=True)
        self._latest = latest

    def latest(self) -> dict[str, Part] | None:
        """Returns the parts of the latest snapshot that is whole; None if there is none.

        Warnings name those that are damaged.
        """
        for number in reversed(self._numbers()):
            try:
                found = _read(self._path(number))
            except OSError as error:
                logger.warning("A snapshot is left out for the one before it: %s", error)
                continue
            self._latest = number
            return found
        return None

    def _numbers(self) -> list[int]:
        """Returns the numbers of those that are there, in order."""
        pattern = re.compile(re.escape(self._name) + r"\.(\d+)\.snapshot")
        found = map(pattern.fullmatch, os.listdir(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"{self._name}.{number}.snapshot"


def _write(path: pathlib.Path, parts: Mapping[str, Part]) -> None:
    described = {}
    buffers: list[memoryview] = []
    for name, (facts, arrays) in parts.items():
        kinds = [[key, array.dtype.name, array.shape] for key, array in arrays.items()]
        described[name] = {"facts": facts, "arrays": kinds}
        buffers += [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()
        ]
    head = json.dumps(described).encode() + b"\n"
    checksum = zlib.crc32(head)
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    with open(path, "wb") as file:
        file.write(_CHECKSUM % checksum + head)
        for buffer in buffers:
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())


def _read(path: pathlib.Path) -> dict[str, Part]:
    """Returns the parts of a snapshot.

    Raises:
        DataLossError: It is damaged.
        OSError: It cannot be read.
    """
    import jax.numpy as jnp

    with open(path, "rb") as file:
        checksum = file.read(len(_CHECKSUM % 0))
        head = file.readline()
        data = np.frombuffer(file.read(), np.uint8)
    if checksum != _CHECKSUM % zlib.crc32(data.data, zlib.crc32(head)):
        raise DataLossError(message=f"The snapshot {path} is damaged: its checksum is wrong.")
    parts = {}
    start = 0
    for name, described in json.loads(head).items():
        arrays = {}
        for key, dtype_name, shape in described["arrays"]:
            dtype = jnp.dtype(dtype_name)  # NumPy knows no bfloat16
            size = dtype.itemsize * int(np.prod(shape))
            arrays[key] = data[start : start + size].view(dtype).reshape(shape)
            start += size
        parts[name] = Part(described["facts"], arrays)
    return parts
