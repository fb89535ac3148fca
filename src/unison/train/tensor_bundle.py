"""TensorFlow's checkpoints, read without TensorFlow.

`PREFIX.index` is a table (`sorted_table`) of names, each with a message `BundleEntryProto` with the
position of a tensor's bytes in `PREFIX.data-00000-of-00001` (or its siblings). The tensor
`_CHECKPOINTABLE_OBJECT_GRAPH` is a message `TrackableObjectGraph`: the graph of objects. Blocks and
tensors have masked CRC-32C checksums, which are verified when they are read.

Sources: `tensorflow/core/protobuf/tensor_bundle.proto`, `trackable_object_graph.proto`,
`tensorflow/core/util/tensor_bundle/tensor_bundle.h`.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from unison.data.files.checksums import crc32c, masked
from unison.errors import NotFoundError, UnimplementedError
from unison.storage import files
from unison.storage.decoding import bytes_of, decoding, shape_of, whole_number
from unison.train.archive import ArrayDescription, Node, check_graph
from unison.train.sorted_table import MAGIC, items_of
from unison.train.wire_format import cut, fields_of, read_varint

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
_TEXT = 7

_MOST_SHARDS = 10**5 - 1

#: TensorFlow's numbers of dtypes.
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", _TEXT: "object",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
    29: "int4", 30: "uint4",
}  # fmt: skip

#: Lists of Keras' that are objects in TensorFlow; here, their items are named by index.
_KERAS_LISTS = ("_variables", "_trainable_variables", "_non_trainable_variables")


def is_tensor_bundle(content_end: bytes) -> bool:
    """Whether a file that ends in these bytes is the index of one of TensorFlow's checkpoints."""
    return content_end.endswith(MAGIC)


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
                self.nodes = _nodes(graph)
            self.arrays = {
                key: ArrayDescription(entry.shape, jnp.dtype(_DTYPES[entry.dtype]))
                for key, entry in self._entries.items()
            }
            check_graph(self.nodes, self.arrays)

    def read(self, key: str) -> np.ndarray:
        """Returns an array; see `Archive.read`."""
        if key not in self._entries:
            raise NotFoundError(
                message=f"Checkpoint {self.prefix} has no array {key!r}. It has: "
                f"{', '.join(sorted(self._entries))}"
            )
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
        name = f"{self.prefix}.data-{entry.shard:05d}-of-{self._num_shards:05d}"
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
        # In the checksum, lengths are numbers of 4 bytes, or of 8 if they are large.
        as_numbers = b"".join(
            struct.pack("<I" if length <= 0xFFFFFFFF else "<Q", length) for length in lengths
        )
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


def _nodes(graph: bytes) -> list[Node]:
    """Returns the objects of a message `TrackableObjectGraph`."""
    nodes = []
    for message in fields_of(graph).get(1, []):
        fields = fields_of(message)
        node = Node()
        for child in map(fields_of, fields.get(1, [])):
            node.children[child[2][0].decode()] = child.get(1, [0])[0]
        for attribute in map(fields_of, fields.get(2, [])):
            if attribute[1][0].decode() == _VALUE:
                node.variable = attribute[3][0].decode()
        nodes.append(node)
    check_graph(nodes, {node.variable for node in nodes if node.variable is not None})
    for node in nodes:
        for name in _KERAS_LISTS:
            if name in node.children:
                items = nodes[node.children[name]].children
                node.children |= {f"{name}[{place}]": item for place, item in items.items()}
    return nodes
