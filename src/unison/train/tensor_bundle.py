"""TensorFlow's checkpoints, read without TensorFlow.

`PREFIX.index` is a table of LevelDB's format: blocks of sorted keys, each with a message
`BundleEntryProto` that says where in `PREFIX.data-00000-of-00001` (and its kin) a tensor's bytes
are. The tensor `_CHECKPOINTABLE_OBJECT_GRAPH` is a message `TrackableObjectGraph`: the graph of
objects. Blocks and tensors carry masked CRC-32C checksums, which reading compares.

Sources: `tensorflow/core/protobuf/tensor_bundle.proto`, `trackable_object_graph.proto`,
`tensorflow/core/util/tensor_bundle/tensor_bundle.h`; LevelDB's `doc/table_format.md`; Snappy's
`format_description.txt`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from unison.data.files.checksums import crc32c, masked
from unison.errors import DataLossError, NotFoundError, OpError, UnimplementedError
from unison.storage import files
from unison.train.archive import ArrayDescription, Node

#: How a table ends: its magic number.
_MAGIC = bytes.fromhex("57fb808b247547db")
_FOOTER = 48

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
_TEXT = 7

#: TensorFlow's numbers of dtypes.
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", _TEXT: "object",
    8: "complex64", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128",
    19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
    29: "int4", 30: "uint4",
}  # fmt: skip

#: Lists of Keras' that are objects to TensorFlow; we name their items by their places.
_KERAS_LISTS = ("_variables", "_trainable_variables", "_non_trainable_variables")


def is_tensor_bundle(content_end: bytes) -> bool:
    """Whether a file with this end is the index of one of TensorFlow's checkpoints."""
    return content_end.endswith(_MAGIC)


class _Entry(NamedTuple):
    """Where a tensor is."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int | None
    is_sliced: bool


class TensorBundle:
    """A checkpoint that TensorFlow has written; the same to its readers as an `Archive`.

    Args:
        prefix: The checkpoint's path, without `.index`.
        index: What is in that file.

    Attributes:
        nodes: The objects; the first one is the root. Of a checkpoint of names, as TensorFlow 1
            wrote them, there is a root only.
        arrays: The description of every array, by key.

    Raises:
        DataLossError: It is damaged.
        ImportError: The package that computes its checksums is not installed.
        UnimplementedError: A tensor is of a kind that NumPy does not have.
    """

    def __init__(self, prefix: str, index: bytes):
        self.prefix = prefix
        crc32c()  # or the error that says what to install
        try:
            entries = dict(_table(index))
            header = _fields(entries.pop(b""))
            self._num_shards = header.get(1, [1])[0]
            self._entries = {key.decode(): _entry(value) for key, value in entries.items()}
            self.nodes = [Node()]
            if _GRAPH in self._entries:
                (graph,) = self._texts(_GRAPH, self._entries.pop(_GRAPH))
                self.nodes = _nodes(graph)
            self.arrays = {
                key: ArrayDescription(entry.shape, jnp.dtype(_DTYPES[entry.dtype]))
                for key, entry in self._entries.items()
            }
            _check_whole(self._entries, prefix)
        except OpError:
            raise
        except Exception as error:  # whatever damaged bytes make of themselves
            raise self._damaged(error) from error

    def read(self, key: str) -> np.ndarray:
        """Returns an array; see `Archive.read`."""
        if key not in self._entries:
            raise NotFoundError(
                message=f"Checkpoint {self.prefix} has no array {key!r}. It has: "
                f"{', '.join(sorted(self._entries))}"
            )
        entry = self._entries[key]
        try:
            if entry.dtype == _TEXT:
                texts = np.empty(len(found := self._texts(key, entry)), object)
                texts[:] = found
                return texts.reshape(entry.shape)
            content = self._content(key, entry)
            if entry.checksum != masked(crc32c()(content)):
                raise ValueError(f"array {key!r} has another checksum")
            return np.frombuffer(content, self.arrays[key].dtype).reshape(entry.shape).copy()
        except OpError:
            raise
        except Exception as error:  # whatever damaged bytes make of themselves
            raise self._damaged(error) from error

    def verify(self) -> None:
        """Reads everything and compares the checksums; see `Archive.verify`."""
        for key in self._entries:
            self.read(key)

    def _content(self, key: str, entry: _Entry) -> bytes:
        name = f"{self.prefix}.data-{entry.shard:05d}-of-{self._num_shards:05d}"
        with files.open_to_read(name) as file:
            file.seek(entry.offset)
            content = file.read(entry.size)
        if len(content) != entry.size:
            raise ValueError(f"{name} ends before array {key!r}")
        return content

    def _texts(self, key: str, entry: _Entry) -> list[bytes]:
        """Returns the strings of a tensor: their lengths, a checksum of these, and their bytes."""
        content = self._content(key, entry)
        lengths, position = [], 0
        for _ in range(int(np.prod(entry.shape, dtype=np.int64))):
            length, position = _varint(content, position)
            lengths.append(length)
        # The lengths count for the checksums as numbers of 4 bytes, or of 8 where they are large.
        as_numbers = b"".join(
            struct.pack("<I" if length <= 0xFFFFFFFF else "<Q", length) for length in lengths
        )
        of_lengths = content[position : position + 4]
        texts, start = [], position + 4
        for length in lengths:
            texts.append(content[start : start + length])
            start += length
        checksum = crc32c()(as_numbers + of_lengths + b"".join(texts))
        if start != len(content) or masked(checksum) != entry.checksum:
            raise ValueError(f"array {key!r} has another checksum")
        return texts

    def _damaged(self, error: Exception) -> DataLossError:
        return DataLossError(message=f"Checkpoint {self.prefix} of TensorFlow is damaged: {error}")


def _check_whole(entries: dict[str, _Entry], prefix: str) -> None:
    sliced = [key for key, entry in entries.items() if entry.is_sliced]
    if sliced:
        raise UnimplementedError(
            message=f"Checkpoint {prefix} of TensorFlow holds variables in slices, by a "
            f"partitioner: {sliced[:3]}. Save them whole."
        )


def _entry(message: bytes) -> _Entry:
    fields = _fields(message)
    sizes = _fields(fields[2][0]).get(2, []) if 2 in fields else []
    return _Entry(
        dtype=fields.get(1, [0])[0],
        shape=tuple(_fields(size).get(1, [0])[0] for size in sizes),
        shard=fields.get(3, [0])[0],
        offset=fields.get(4, [0])[0],
        size=fields.get(5, [0])[0],
        checksum=fields.get(6, [None])[0],
        is_sliced=7 in fields,
    )


def _nodes(graph: bytes) -> list[Node]:
    """Returns the objects of a message `TrackableObjectGraph`."""
    nodes = []
    for message in _fields(graph).get(1, []):
        fields = _fields(message)
        node = Node()
        for child in map(_fields, fields.get(1, [])):
            node.children[child[2][0].decode()] = child.get(1, [0])[0]
        for attribute in map(_fields, fields.get(2, [])):
            if attribute[1][0].decode() == _VALUE:
                node.variable = attribute[3][0].decode()
        nodes.append(node)
    for node in nodes:
        for name in _KERAS_LISTS:
            if name in node.children:
                items = nodes[node.children[name]].children
                node.children |= {f"{name}[{place}]": item for place, item in items.items()}
    return nodes


# -- tables --------------------------------------------------------------------------------------


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table."""
    footer = content[-_FOOTER:]
    about, position = _handle(footer, 0)
    index, _ = _handle(footer, position)
    _block(content, *about)  # which says nothing, but may be damaged
    for _, handle in _pairs(_block(content, *index)):
        place, _ = _handle(handle, 0)
        yield from _pairs(_block(content, *place))


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return (offset, size), position


def _block(content: bytes, offset: int, size: int) -> bytes:
    block, kind = content[offset : offset + size], content[offset + size]
    (checksum,) = struct.unpack_from("<I", content, offset + size + 1)
    if masked(crc32c()(content[offset : offset + size + 1])) != checksum:
        raise ValueError("a block of its index has another checksum")
    if kind not in (0, 1):
        raise ValueError(f"a block of its index is compressed in the unknown way {kind}")
    return _uncompressed(block) if kind else block


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields what is in a block, each key of which begins as the one before."""
    (restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (restarts + 1)
    key, position = b"", 0
    while position < end:
        shared, position = _varint(block, position)
        own, position = _varint(block, position)
        length, position = _varint(block, position)
        key = key[:shared] + block[position : position + own]
        position += own
        yield key, block[position : position + length]
        position += length


def _uncompressed(block: bytes) -> bytes:
    """Returns what Snappy has compressed: pieces as they are, and copies of what was before."""
    size, position = _varint(block, 0)
    out = bytearray()
    while position < len(block):
        tag = block[position]
        kind, length = tag & 3, (tag >> 2) + 1
        position += 1
        if kind == 0:
            if length > 60:
                count = length - 60
                length = int.from_bytes(block[position : position + count], "little") + 1
                position += count
            out += block[position : position + length]
            position += length
            continue
        count = (1, 2, 4)[kind - 1]
        offset = int.from_bytes(block[position : position + count], "little")
        position += count
        if kind == 1:
            length, offset = ((tag >> 2) & 7) + 4, offset | (tag >> 5) << 8
        if not 0 < offset <= len(out):
            raise ValueError("a compressed block of its index refers to what is not there")
        for _ in range(length):  # a copy may overlap with what it makes
            out.append(out[-offset])
    if len(out) != size:
        raise ValueError("a compressed block of its index has another size")
    return bytes(out)


# -- protocol buffers ----------------------------------------------------------------------------


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Returns the values of a message's fields, by number: integers, and bytes."""
    fields: dict[int, list[Any]] = {}
    value: Any
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(message, position)
        elif kind == 2:
            length, position = _varint(message, position)
            value = message[position : position + length]
            position += length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value = int.from_bytes(message[position : position + length], "little")
            position += length
        else:
            raise ValueError(f"a message has a field of the unknown kind {kind}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
