"""The file format of checkpoints: arrays, and the graph of the objects to which they belong.

`PREFIX.index` is a ZIP archive in the format of `numpy.savez`: an uncompressed `.npy` member for
each array, named by the array's path in the graph, and `checkpoint.json`. Every member has a
CRC-32, which is verified when it is read. Nothing in it is pickled, and `numpy.load` opens it.

State that several hosts have in parts is saved in Orbax's format (`sharded_archive`), in whose
folder such an archive holds the graph and the checksums. Why not everything: Orbax (0.12) returns
arrays whose bits were flipped on the disk without an error, and a folder of many files cannot
appear atomically in an object store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import zipfile
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from unison.errors import InvalidArgumentError, NotFoundError
from unison.runtime.elastic.lifecycle import happened
from unison.storage import atomic, files
from unison.storage.decoding import (
    decoding,
    dtype_named,
    is_jaxs_own,
    name_of_dtype,
    parsed_json,
    plain_dict,
    plain_list,
    plain_text,
    shape_of,
    whole_number,
)
from unison.storage.npy import KINDS, opened_zip, read_member

#: The suffix of a checkpoint's file after its prefix, as in TensorFlow.
SUFFIX = ".index"

#: The number of bytes that are written at a time: small enough to stay in the cache for the
#: checksum.
_PIECE = 1 << 20

#: The most of a file's arrays that a message lists, and the most characters of a name in it.
_MOST_LISTED, _MOST_CHARACTERS = 50, 200

_GRAPH = "checkpoint.json"
_FORMAT = "unison checkpoint"
_VERSION = 1


@dataclasses.dataclass
class Node:
    """An object of a checkpoint.

    Attributes:
        children: The indices of the nodes that it references, by name.
        variable: The key of the array with its value, if it is a variable.
        state: The encoded result of its `get_state` (see `structures`); None if it has none.
    """

    children: dict[str, int] = dataclasses.field(default_factory=dict)
    variable: str | None = None
    state: Any = None

    @property
    def has_value(self) -> bool:
        return self.variable is not None or self.state is not None


_FIELDS = {field.name for field in dataclasses.fields(Node)}


def write_archive(prefix: str, nodes: Sequence[Node], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a checkpoint atomically; it replaces an existing one."""
    with atomic.replacing(prefix + SUFFIX) as file:
        write_archive_to(file, nodes, arrays)
        happened("checkpoint")


def write_archive_to(
    file: IO[bytes],
    nodes: Sequence[Node],
    arrays: Mapping[str, np.ndarray],
    further: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint into an open file.

    Args:
        file: The file.
        nodes: The objects.
        arrays: The arrays, by key.
        further: Further entries of the index, for JSON.
    """
    index: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "nodes": [dataclasses.asdict(node) for node in nodes],
        "arrays": {
            key: {"shape": list(array.shape), "dtype": name_of_dtype(array.dtype)}
            for key, array in arrays.items()
        },
        **(further or {}),
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(_GRAPH), json.dumps(index))
        for key, array in arrays.items():
            member = zipfile.ZipInfo(_member(key))
            with archive.open(member, "w", force_zip64=True) as stream:
                _write_array(stream, _storable(array))


def _write_array(stream: IO[bytes], array: np.ndarray) -> None:
    """Writes an array as `numpy.lib.format.write_array` does, but without its additional copy."""
    array = np.asarray(array, order="C")
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(stream, header)
    if array.size:
        of_bytes = array.reshape(-1).view(np.uint8)
        for start in range(0, of_bytes.size, _PIECE):
            stream.write(of_bytes[start : start + _PIECE].data)


class ArrayDescription(NamedTuple):
    """The properties of an array that are known before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Archive:
    """A checkpoint that is open for reading; it can be read while this object exists.

    Args:
        prefix: The checkpoint's path, without `.index`.
        file: The open file, if it is not at that path: the prefix is then its name in messages.

    Attributes:
        nodes: The objects; the first one is the root.
        arrays: The description of every array, by key.

    Raises:
        NotFoundError: The checkpoint does not exist.
        DataLossError: It is corrupt.
        InvalidArgumentError: Another release wrote it, in another format.
    """

    def __init__(self, prefix: str, file: IO[bytes] | None = None):
        self.prefix = prefix
        try:
            file = file or files.open_to_read(prefix + SUFFIX)
        except NotFoundError as error:
            raise NotFoundError(message=_what_is_there_instead(prefix)) from error
        try:
            with self._decoding():
                self._archive = opened_zip(file)
                index = plain_dict(parsed_json(self._archive.read(_GRAPH)))
                self._check_format(index)
                self.arrays = {
                    key: description_of(array) for key, array in plain_dict(index["arrays"]).items()
                }
                self.arrays |= self._arrays_elsewhere(index)
                self.nodes = [node_of(node) for node in plain_list(index["nodes"])]
                check_graph(self.nodes, self.arrays)
        except BaseException:
            file.close()
            raise

    def _check_format(self, index: Mapping[str, Any]) -> None:
        if (index["format"], index["version"]) != (_FORMAT, _VERSION):
            raise InvalidArgumentError(
                message=f"{self.prefix}{SUFFIX} is a {index['format']!r:.100} of version "
                f"{index['version']!r:.100}; this release reads {_FORMAT!r}, version {_VERSION}."
            )

    def _arrays_elsewhere(self, index: Mapping[str, Any]) -> dict[str, ArrayDescription]:
        """Returns the description of arrays that are not in this file; see `write_archive_to`."""
        if "elsewhere" in index:
            raise ValueError("its arrays are in other files")
        return {}

    def read(self, key: str) -> np.ndarray:
        """Returns an array.

        Raises:
            NotFoundError: The checkpoint has no array of that name.
            DataLossError: It is corrupt.
        """
        if key not in self.arrays:
            raise no_such_array(self.prefix, key, self.arrays)
        shape, dtype = self.arrays[key]
        with self._decoding():
            array = read_member(self._archive, _member(key))
            array = array if array.dtype == dtype else array.view(dtype)
            if array.shape != shape:
                raise ValueError(f"array {key!r} has shape {array.shape}, and {shape} in its index")
            return array

    def verify(self) -> None:
        """Reads everything and verifies the checksums.

        Raises:
            DataLossError: A part is corrupt or missing.
        """
        missing = {_member(key) for key in self._own_keys()} - set(self._archive.namelist())
        with self._decoding():
            if missing:
                raise ValueError(f"{min(missing)} is missing")
            wrong = self._archive.testzip()
            if wrong is not None:
                raise ValueError(f"checksum mismatch in {wrong}")

    def _own_keys(self) -> Iterable[str]:
        """Returns the keys of the arrays that are in this file."""
        return self.arrays

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        return decoding(
            f"Checkpoint {self.prefix}",
            "Restore another one; latest_checkpoint skips those that are.",
        )


def no_such_array(prefix: str, key: str, keys: Iterable[str]) -> NotFoundError:
    """Returns the error for a key that a checkpoint does not have.

    A file names the key, or thousands of others: the message is short whatever they are.
    """
    names = sorted(keys)
    listed = ", ".join(map(_shortened, names[:_MOST_LISTED]))
    others = len(names) - _MOST_LISTED
    return NotFoundError(
        message=f"Checkpoint {prefix} has no array {_shortened(key)!r}. It has: {listed}"
        + (f", and {others} others" if others > 0 else "")
    )


def _shortened(key: str) -> str:
    return key if len(key) <= _MOST_CHARACTERS else f"{key[:_MOST_CHARACTERS]}..."


def node_at(nodes: list[Node], path: Iterable[str]) -> Node:
    """Returns the node at a path from the first one; nodes that are not there are added."""
    node = nodes[0]
    for name in path:
        if name not in node.children:
            node.children[name] = len(nodes)
            nodes.append(Node())
        node = nodes[node.children[name]]
    return node


def description_of(described: Any) -> ArrayDescription:
    """Returns the description of an array that was read from JSON, whose parts are checked."""
    given = plain_dict(described)
    return ArrayDescription(shape_of(given["shape"]), dtype_named(given["dtype"], KINDS))


def node_of(described: Any) -> Node:
    """Returns a node that was read from JSON, whose parts are checked."""
    given = plain_dict(described)
    if given.keys() != _FIELDS:
        raise ValueError(f"expected a node with {sorted(_FIELDS)}, received {sorted(given)}")
    if given["state"] is not None:
        checked_state(given["state"])
    if given["variable"] is not None:
        plain_text(given["variable"])
    plain_dict(given["children"])
    return Node(**given)


def checked_state(state: Any) -> dict[str, Any]:
    """Returns a decoded state of an object, if it has a value. Raises: ValueError."""
    if "value" not in plain_dict(state):
        raise ValueError("a state has no value")
    return plain_dict(state)


def check_graph(nodes: Sequence[Node], keys: Container[str]) -> None:
    """Checks that all that nodes reference exists.

    Args:
        nodes: The nodes; at least the root.
        keys: The keys of the arrays.

    Raises:
        ValueError: A child or an array is missing.
    """
    if not nodes:
        raise ValueError("it has no root")
    for node in nodes:
        for child in node.children.values():
            whole_number(child, most=len(nodes) - 1)
        if node.variable is not None and node.variable not in keys:
            raise ValueError(f"the array {node.variable[:80]!r} is missing")


def _what_is_there_instead(prefix: str) -> str:
    message = f"There is no checkpoint {prefix} (no file {prefix}{SUFFIX})."
    folder, name = os.path.split(prefix)
    if prefix.endswith(SUFFIX) and files.exists(prefix):
        return f"{message} Name it without {SUFFIX}: {prefix.removesuffix(SUFFIX)}"
    if files.names_in(prefix):
        return f"{message} {prefix} is a folder: pass latest_checkpoint({prefix!r})."
    pattern = re.compile(re.escape(name) + r"-\d+" + re.escape(SUFFIX))
    numbered = sorted(found for found in files.names_in(folder) if pattern.fullmatch(found))
    if numbered:
        found = os.path.join(folder, numbered[-1].removesuffix(SUFFIX))
        return f"{message} `save` adds a number to the prefix. Did you mean {found}?"
    return message


def _member(key: str) -> str:
    return f"{key}.npy"


def _storable(array: np.ndarray) -> np.ndarray:
    if array.dtype.hasobject:
        raise TypeError(
            f"Checkpoints hold numbers and text, and nothing pickled. Received: an array of {array}"
        )
    return array.view(f"u{array.dtype.itemsize}") if is_jaxs_own(array.dtype) else array
