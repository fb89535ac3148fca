"""TensorFlow's checkpoints, read and written without TensorFlow.

`PREFIX.index` is a table (`sorted_table`) of names, each with a message `BundleEntryProto` with the
position of a tensor's bytes in `PREFIX.data-00000-of-00001` (or its siblings). The tensor
`_CHECKPOINTABLE_OBJECT_GRAPH` is a message `TrackableObjectGraph`: the graph of objects. Blocks and
tensors have masked CRC-32C checksums, which are verified when they are read.

Sources: `tensorflow/core/protobuf/tensor_bundle.proto`, `trackable_object_graph.proto`,
`tensorflow/core/util/tensor_bundle/tensor_bundle.h`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from unison.data.files.checksums import crc32c, masked
from unison.errors import InvalidArgumentError, UnimplementedError
from unison.runtime.elastic.lifecycle import happened
from unison.storage import atomic, files
from unison.storage.decoding import (
    bytes_of,
    decoding,
    parsed_json,
    shape_of,
    whole_number,
)
from unison.train.archive import (
    SUFFIX,
    ArrayDescription,
    Node,
    check_graph,
    checked_state,
    no_such_array,
)
from unison.train.sorted_table import MAGIC, items_of, table_of
from unison.train.wire_format import Fixed32, cut, fields_of, message_of, read_varint, varint

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
_TEXT = 7

#: The attribute of an object with a state, as JSON, which TensorFlow leaves alone.
_STATE = "STATE_OF_UNISON"

_MOST_SHARDS = 10**5 - 1

#: TensorFlow's numbers of dtypes.
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", _TEXT: "object",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
    29: "int4", 30: "uint4",
}  # fmt: skip

_NUMBERS = {name: number for number, name in _DTYPES.items() if number != _TEXT}

#: Lists of Keras' that are objects in TensorFlow; here, their items are named by index.
_KERAS_LISTS = ("_variables", "_trainable_variables", "_non_trainable_variables", "_operations")
_ITEM = re.compile(rf"({'|'.join(_KERAS_LISTS)})\[(\d+)\]")

#: The name of the number of an optimizer's steps: of 64 bits in TensorFlow.
_ITERATIONS = "_iterations"


def is_tensor_bundle(content_end: bytes) -> bool:
    """Whether a file that ends in these bytes is the index of one of TensorFlow's checkpoints."""
    return content_end.endswith(MAGIC)


def write_tensor_bundle(
    prefix: str, nodes: Sequence[Node], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes a checkpoint that TensorFlow restores; it replaces an existing one.

    The graph has the names of `parts_as_tensorflow_names`.

    Raises:
        ImportError: The package for its checksums is not installed.
        InvalidArgumentError: TensorFlow has no such dtype.
    """
    crc32c()  # or the error that names the missing package
    wide = {
        nodes[node.children[_ITERATIONS]].variable for node in nodes if _ITERATIONS in node.children
    }
    last = _data_files(prefix)
    # While there is another checkpoint, its index and its data stay as they are.
    num_shards = next(n for n in itertools.count(1) if _data_file(prefix, 0, n) not in last)
    entries = {}
    with atomic.replacing(_data_file(prefix, 0, num_shards)) as file:
        offset = 0
        for key, array in arrays.items():
            if key in wide and not array.shape and array.dtype.kind == "i":
                array = array.astype(np.int64)
            number = _number_of(array.dtype, key)
            content = array.tobytes()
            checksum = masked(crc32c()(content))
            entries[key] = place_of_tensor(number, array.shape, offset, len(content), checksum)
            offset += file.write(content)
        graph, states = _graph_of(nodes)
        for key, text in {**states, _GRAPH: graph}.items():
            content, checksum = bytes_of_texts([text])
            entries[key] = place_of_tensor(_TEXT, (), offset, len(content), checksum)
            offset += file.write(content)
    header = message_of([(1, num_shards), (3, [(1, 1)])])  # version 1 of the producer
    items = {b"": header, **{key.encode(): entry for key, entry in entries.items()}}
    with atomic.replacing(prefix + SUFFIX) as file:
        file.write(table_of(sorted(items.items())))
        happened("checkpoint")
    for name in last:
        files.remove(name)


def remove_data_files(prefix: str) -> None:
    """Deletes the files beside the index of one of TensorFlow's checkpoints."""
    for name in _data_files(prefix):
        files.remove(name)


def _data_file(prefix: str, shard: int, num_shards: int) -> str:
    return f"{prefix}.data-{shard:05d}-of-{num_shards:05d}"


def _data_files(prefix: str) -> set[str]:
    """Returns the paths of the files beside an index."""
    folder, name = os.path.split(prefix)
    pattern = re.compile(re.escape(name) + r"\.data-\d{5}-of-\d{5}")
    found = filter(pattern.fullmatch, files.names_in(folder))
    return {f"{prefix}{each.removeprefix(name)}" for each in found}


def _number_of(dtype: np.dtype, key: str) -> int:
    """Returns TensorFlow's number of a dtype."""
    if dtype.name in _NUMBERS:
        return _NUMBERS[dtype.name]
    raise InvalidArgumentError(
        message=f"TensorFlow's checkpoints hold no array of dtype {dtype}. Received: {key}. Use "
        'Checkpoint(format="archive", ...).'
    )


def place_of_tensor(
    dtype: int, shape: Sequence[int], offset: int, size: int, checksum: int, shard: int = 0
) -> bytes:
    """Returns the message `BundleEntryProto` with the position of a tensor."""
    sizes = [(2, [(1, number)]) for number in shape]
    place = [(1, dtype), (2, sizes), (3, shard), (4, offset), (5, size), (6, Fixed32(checksum))]
    return message_of(place)


def bytes_of_texts(texts: Sequence[bytes]) -> tuple[bytes, int]:
    """Returns the bytes of a tensor of strings, and their checksum; see `_texts`."""
    lengths = b"".join(varint(len(text)) for text in texts)
    numbers = b"".join(_length_in_checksum(len(text)) for text in texts)
    of_lengths = struct.pack("<I", masked(crc32c()(numbers)))
    checksum = masked(crc32c()(numbers + of_lengths + b"".join(texts)))
    return lengths + of_lengths + b"".join(texts), checksum


def _length_in_checksum(length: int) -> bytes:
    """Returns a length as a number of 4 bytes, or of 8 if it is large."""
    return struct.pack("<I" if length <= 0xFFFFFFFF else "<Q", length)


def _graph_of(nodes: Sequence[Node]) -> tuple[bytes, dict[str, bytes]]:
    """Returns the message `TrackableObjectGraph`, and the states of objects, by key."""
    children = [dict(node.children) for node in nodes]
    lists: dict[tuple[int, str], int] = {}
    for owner, node in enumerate(nodes):
        for name, child in node.children.items():
            found = _ITEM.fullmatch(name)
            if found is None:
                continue
            of_list, item = found.groups()
            if (owner, of_list) not in lists:
                lists[owner, of_list] = children[owner][of_list] = len(children)
                children.append({})
            children[lists[owner, of_list]][item] = child
            del children[owner][name]
    states = {}
    messages = []
    for number, own in enumerate(children):
        fields: list[tuple[int, Any]] = [
            (1, [(1, child), (2, name.encode())]) for name, child in own.items()
        ]
        node = nodes[number] if number < len(nodes) else Node()
        if node.variable is not None:
            key = node.variable.encode()
            fields.append((2, [(1, _VALUE.encode()), (3, key)]))
        if node.state is not None:
            states[f"{_STATE}/{number}"] = json.dumps(node.state).encode()
            fields.append((2, [(1, _STATE.encode()), (3, f"{_STATE}/{number}".encode())]))
        if node.has_value:
            fields.append((5, [(1, 1)]))
        messages.append((1, fields))
    return message_of(messages), states


class _Entry(NamedTuple):
    """The position of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int | None
    is_sliced: bool


class TensorBundle:
    """A checkpoint that TensorFlow has written; it has the interface of `Archive`.

    Args:
        prefix: The checkpoint's path, without `.index`.
        index: The content of that file.

    Attributes:
        nodes: The objects; the first one is the root. A checkpoint of names, as written by
            TensorFlow 1, only has a root.
        arrays: The description of every array, by key.

    Raises:
        DataLossError: It is corrupt.
        ImportError: The package for its checksums is not installed.
        UnimplementedError: A tensor has a dtype that NumPy does not have.
    """

    def __init__(self, prefix: str, index: bytes):
        self.prefix = prefix
        crc32c()  # or the error that names the missing package
        with self._decoding():
            entries = dict(items_of(index))
            header = fields_of(entries.pop(b""))
            self._num_shards = whole_number(header.get(1, [1])[0], least=1, most=_MOST_SHARDS)
            self._entries = {key.decode(): _entry(value) for key, value in entries.items()}
            _check_read_here(header, self._entries, prefix)
            self.nodes = [Node()]
            if _GRAPH in self._entries:
                (graph,) = self._texts(_GRAPH, self._entries.pop(_GRAPH))
                self.nodes = _nodes(graph, self._state)
            self.arrays = {
                key: ArrayDescription(entry.shape, jnp.dtype(_DTYPES[entry.dtype]))
                for key, entry in self._entries.items()
            }
            check_graph(self.nodes, self.arrays)

    def _state(self, key: str) -> Any:
        """Returns the state of an object that Unison has written."""
        (text,) = self._texts(key, self._entries.pop(key))
        return checked_state(parsed_json(text))

    def read(self, key: str) -> np.ndarray:
        """Returns an array; see `Archive.read`."""
        if key not in self._entries:
            raise no_such_array(self.prefix, key, self._entries)
        entry = self._entries[key]
        with self._decoding():
            if entry.dtype == _TEXT:
                texts = np.empty(len(found := self._texts(key, entry)), object)
                texts[:] = found
                return texts.reshape(entry.shape)
            dtype = self.arrays[key].dtype
            if entry.size != bytes_of(entry.shape, dtype):
                raise ValueError(f"array {key!r} of shape {entry.shape} has {entry.size} bytes")
            content = self._content(key, entry)
            if entry.checksum != masked(crc32c()(content)):
                raise ValueError(f"checksum mismatch in array {key!r}")
            return np.frombuffer(content, dtype).reshape(entry.shape).copy()

    def verify(self) -> None:
        """Reads everything and verifies the checksums; see `Archive.verify`."""
        for key in self._entries:
            self.read(key)

    def _content(self, key: str, entry: _Entry) -> bytes:
        name = _data_file(self.prefix, entry.shard, self._num_shards)
        with files.open_to_read(name) as file:
            if entry.offset + entry.size > file.seek(0, os.SEEK_END):
                raise ValueError(f"{name} ends before array {key!r}")
            file.seek(entry.offset)
            return file.read(entry.size)

    def _texts(self, key: str, entry: _Entry) -> list[bytes]:
        """Returns the strings of a tensor: their lengths, a checksum of these, and their bytes."""
        content = self._content(key, entry)
        lengths, position = [], 0
        count = math.prod(entry.shape)
        if count > len(content):
            raise ValueError(f"array {key!r} of shape {entry.shape} has {entry.size} bytes")
        for _ in range(count):
            length, position = read_varint(content, position)
            lengths.append(length)
        as_numbers = b"".join(map(_length_in_checksum, lengths))
        of_lengths = content[position : position + 4]
        texts, start = [], position + 4
        for length in lengths:
            texts.append(cut(content, start, length))
            start += length
        checksum = crc32c()(as_numbers + of_lengths + b"".join(texts))
        if start != len(content) or masked(checksum) != entry.checksum:
            raise ValueError(f"checksum mismatch in array {key!r}")
        return texts

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        return decoding(f"Checkpoint {self.prefix} of TensorFlow", "Restore another one.")


def _check_read_here(header: dict[int, list[Any]], entries: dict[str, _Entry], prefix: str) -> None:
    """Checks that a checkpoint's format is supported. Raises: UnimplementedError."""
    if header.get(2, [0])[0] != 0:
        raise UnimplementedError(
            message=f"Checkpoint {prefix} of TensorFlow was written on a big-endian machine. Save "
            "it again on a little-endian one."
        )
    sliced = [key for key, entry in entries.items() if entry.is_sliced]
    if sliced:
        raise UnimplementedError(
            message=f"Checkpoint {prefix} of TensorFlow holds variables in slices, by a "
            f"partitioner: {sliced[:3]}. Save them whole."
        )


def _entry(message: bytes) -> _Entry:
    fields = fields_of(message)
    sizes = fields_of(fields[2][0]).get(2, []) if 2 in fields else []
    return _Entry(
        dtype=fields.get(1, [0])[0],
        shape=shape_of([fields_of(size).get(1, [0])[0] for size in sizes]),
        shard=whole_number(fields.get(3, [0])[0], most=_MOST_SHARDS),
        offset=whole_number(fields.get(4, [0])[0]),
        size=whole_number(fields.get(5, [0])[0]),
        checksum=fields.get(6, [None])[0],
        is_sliced=7 in fields,
    )


def _nodes(graph: bytes, state: Callable[[str], Any]) -> list[Node]:
    """Returns the objects of a message `TrackableObjectGraph`.

    Args:
        graph: The message.
        state: Returns the state with a key.
    """
    nodes = []
    for message in fields_of(graph).get(1, []):
        fields = fields_of(message)
        node = Node()
        for child in map(fields_of, fields.get(1, [])):
            node.children[child[2][0].decode()] = child.get(1, [0])[0]
        for attribute in map(fields_of, fields.get(2, [])):
            name, key = attribute[1][0].decode(), attribute[3][0].decode()
            if name == _VALUE:
                node.variable = key
            elif name == _STATE:
                node.state = state(key)
        nodes.append(node)
    check_graph(nodes, {node.variable for node in nodes if node.variable is not None})
    for node in nodes:
        for name in _KERAS_LISTS:
            if name in node.children:
                items = nodes[node.children[name]].children
                node.children |= {f"{name}[{place}]": item for place, item in items.items()}
    return nodes
