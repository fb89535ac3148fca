"""A server's snapshots: its state in a file, written periodically, from which it can be restored.

A snapshot is a consistent copy of the server's state: it contains an update with all its changes,
and with the record that it was applied, or not at all. It is published atomically:
`ps-0.8.snapshot` after `ps-0.7.snapshot`, which is kept until there is a ninth one, in case the
later one is corrupt.

The file has the form of `unison.storage.checksummed`: its header describes the arrays whose bytes
follow. Nothing in it is unpickled.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from unison.errors import InvalidArgumentError
from unison.storage import atomic, checksummed
from unison.storage.decoding import (
    bytes_of,
    decoding,
    dtype_named,
    plain_dict,
    plain_list,
    plain_text,
    shape_of,
)

logger = logging.getLogger("unison")


class Part(NamedTuple):
    """A part of a snapshot.

    Attributes:
        facts: Values that JSON can represent.
        arrays: The arrays, by name.
    """

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Snapshots:
    """The snapshots of one server.

    Args:
        folder: Their folder.
        name: The prefix of their names, unique to this server.
    """

    def __init__(self, folder: pathlib.Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = name
        #: The number of the latest one that is known to be intact.
        self._latest: int | None = None

    def write(self, parts: Mapping[str, Part]) -> None:
        """Writes a snapshot; keeps the previous one, and deletes older ones.

        Raises:
            OSError: It could not be written. The existing ones are kept.
        """
        before = self._numbers()
        latest = before[-1] + 1 if before else 1
        with atomic.aside(str(self._path(latest))) as new:
            with new.opened() as file:
                checksummed.write(file, _pieces(parts))
            new.publish()
        for number in before:
            if number != self._latest:
                self._path(number).unlink(missing_ok=True)
        self._latest = latest

    def latest(
        self, take: Callable[[dict[str, Part]], None] = lambda parts: None
    ) -> dict[str, Part] | None:
        """Returns the parts of the latest intact snapshot; None if there is none.

        Corrupt ones are skipped with a warning.

        Args:
            take: Called with the parts. If it raises an error, the snapshot counts as corrupt.
        """
        for number in reversed(self._numbers()):
            path = str(self._path(number))
            try:
                found = _read(path)
                with decoding(path):
                    take(found)
            except (OSError, InvalidArgumentError) as error:
                logger.warning("Skipping a snapshot for the one before it: %s", error)
                continue
            self._latest = number
            return found
        return None

    def _numbers(self) -> list[int]:
        """Returns the numbers of the existing snapshots, in order."""
        pattern = re.compile(re.escape(self._name) + r"\.(\d+)\.snapshot")
        found = map(pattern.fullmatch, os.listdir(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"{self._name}.{number}.snapshot"


def _pieces(parts: Mapping[str, Part]) -> list[Any]:
    """Returns the header, and the bytes of the arrays."""
    described = {}
    buffers: list[Any] = []
    for name, (facts, arrays) in parts.items():
        kinds = [[key, array.dtype.name, array.shape] for key, array in arrays.items()]
        described[name] = {"facts": facts, "arrays": kinds}
        buffers += [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()
        ]
    return [checksummed.header_line(described), *buffers]


def _read(path: str) -> dict[str, Part]:
    """Returns the parts of a snapshot.

    Raises:
        DataLossError: It is corrupt.
        OSError: It cannot be read.
    """
    header, content = checksummed.read_headed(path)
    with decoding(path):
        data = np.frombuffer(content, np.uint8)
        parts = {}
        start = 0
        for name, described in plain_dict(header).items():
            arrays = {}
            for entry in plain_list(described["arrays"]):
                key, dtype_name, sizes = plain_list(entry, 3)
                dtype, shape = dtype_named(dtype_name), shape_of(sizes)
                end = start + bytes_of(shape, dtype)
                if end > data.size:
                    raise ValueError(f"it ends within array {key!r}")
                arrays[plain_text(key)] = data[start:end].view(dtype).reshape(shape)
                start = end
            parts[name] = Part(plain_dict(described["facts"]), arrays)
        if start != data.size:
            raise ValueError(f"{data.size - start} bytes follow its arrays")
        return parts
