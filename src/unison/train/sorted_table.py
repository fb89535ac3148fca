"""Tables in LevelDB's format: blocks of sorted keys and values, as in TensorFlow's index files.

No block is read twice, no key is shorter than its common prefix with the previous one, and nothing
is inflated beyond the format's maximum: a corrupt table raises an error as soon as it is read.

Sources: LevelDB's `doc/table_format.md`; Snappy's `format_description.txt`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import starmap

from unison.data.files.checksums import crc32c, masked
from unison.train.wire_format import cut, read_varint, varint

#: The magic number at the end of a table.
MAGIC = bytes.fromhex("57fb808b247547db")
_FOOTER = 48

#: A block's type and checksum, after its data.
_TRAILER = 5

#: The minimum limit for the total bytes of the keys of a table, and the limit per byte of the
#: table: only the part of a key that differs from the previous one is in the file.
_KEY_BYTES = 1 << 25
_KEY_BYTES_A_BYTE = 16

#: The most bytes that Snappy decompresses one byte to: copies of 64 bytes in 3.
_MOST_OF_SNAPPY = 22


#: The bytes of keys and values after which a block ends.
_BLOCK = 4096


def table_of(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the table of keys, in order, and their values.

    Examples:
        >>> list(items_of(table_of([(b"a", b"1"), (b"b", b"2")])))
        [(b'a', b'1'), (b'b', b'2')]
    """
    writer = TableWriter()
    block: list[tuple[bytes, bytes]] = []
    handles = []
    for item in items:
        block.append(item)
        if sum(len(key) + len(value) for key, value in block) > _BLOCK:
            handles.append((block[-1][0], writer.add(block_of(starmap(entry_of, block)))))
            block = []
    if block or not handles:
        last = block[-1][0] if block else b""
        handles.append((last, writer.add(block_of(starmap(entry_of, block)))))
    about = writer.add(block_of([]))
    return writer.finished(about, writer.add(block_of(starmap(entry_of, handles))))


class TableWriter:
    """A table that is written block by block."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, block: bytes, kind: int = 0) -> bytes:
        """Adds a block with its trailer; returns its handle."""
        handle = varint(len(self._content)) + varint(len(block))
        whole = block + bytes([kind])
        self._content += whole + struct.pack("<I", masked(crc32c()(whole)))
        return handle

    def finished(self, about: bytes, index: bytes) -> bytes:
        """Returns the table, which ends with the handles of its last two blocks."""
        handles = about + index
        return bytes(self._content) + handles.ljust(_FOOTER - len(MAGIC), b"\0") + MAGIC


def entry_of(key: bytes, value: bytes, shared: int = 0) -> bytes:
    """Returns a key and its value in a block.

    Args:
        key: The key, without what it shares with the one before.
        value: The value.
        shared: The number of bytes that it shares.
    """
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def block_of(entries: Iterable[bytes]) -> bytes:
    """Returns a block of entries, in the order of their keys."""
    return b"".join(entries) + struct.pack("<II", 0, 1)


def items_of(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, in the order of the keys.

    Raises:
        ValueError: It is corrupt.
    """
    blocks = _Blocks(content)
    footer = content[-_FOOTER:]
    about, position = _handle(footer, 0)
    index, _ = _handle(footer, position)
    blocks.read(*about)  # which is not needed, but may be corrupt
    last = None
    key_bytes = 0
    for _, handle in _pairs(blocks.read(*index)):
        place, _ = _handle(handle, 0)
        for key, value in _pairs(blocks.read(*place)):
            if last is not None and key <= last:
                raise ValueError("its keys are not in order")
            last = key
            key_bytes += len(key)
            if key_bytes > max(_KEY_BYTES, _KEY_BYTES_A_BYTE * len(content)):
                raise ValueError("its keys are longer than those of any checkpoint")
            yield key, value


class _Blocks:
    """The blocks of a table."""

    def __init__(self, content: bytes):
        self._content = content
        self._left = len(content)

    def read(self, offset: int, size: int) -> bytes:
        """Returns a decompressed block."""
        whole = cut(self._content, offset, size + _TRAILER)
        self._left -= len(whole)
        if self._left < 0:
            raise ValueError("its blocks overlap")
        block, kind = whole[:size], whole[size]
        (checksum,) = struct.unpack_from("<I", whole, size + 1)
        if masked(crc32c()(whole[: size + 1])) != checksum:
            raise ValueError("checksum mismatch in a block of its index")
        if kind not in (0, 1):
            raise ValueError(f"a block of its index is compressed in the unknown way {kind}")
        return uncompressed(block) if kind else block


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = read_varint(content, position)
    size, position = read_varint(content, position)
    return (offset, size), position


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block; each key has a common prefix with the previous one."""
    (restarts,) = struct.unpack("<I", block[-4:])
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise ValueError("a block of its index is shorter than its list of keys")
    block = block[:end]
    key, position = b"", 0
    while position < end:
        shared, position = read_varint(block, position)
        own, position = read_varint(block, position)
        length, position = read_varint(block, position)
        key = cut(key, 0, shared) + cut(block, position, own)
        position += own
        yield key, cut(block, position, length)
        position += length


def uncompressed(block: bytes) -> bytes:
    """Returns decompressed Snappy data: literals, and copies of earlier bytes.

    Raises:
        ValueError: It is corrupt.
    """
    size, position = read_varint(block, 0)
    if size > _MOST_OF_SNAPPY * len(block) + 64:
        raise ValueError(f"{len(block)} compressed bytes cannot hold {size}")
    out = bytearray()
    while position < len(block) and len(out) <= size:
        tag = block[position]
        kind, length = tag & 3, (tag >> 2) + 1
        position += 1
        if kind == 0:
            if length > 60:
                count = length - 60
                length = int.from_bytes(cut(block, position, count), "little") + 1
                position += count
            out += cut(block, position, length)
            position += length
            continue
        count = (1, 2, 4)[kind - 1]
        offset = int.from_bytes(cut(block, position, count), "little")
        position += count
        if kind == 1:
            length, offset = ((tag >> 2) & 7) + 4, offset | (tag >> 5) << 8
        if not 0 < offset <= len(out):
            raise ValueError("a compressed block of its index refers to what is not there")
        # A copy may overlap with its result: then it repeats the last `offset` bytes.
        piece = bytes(out[-offset:][:length])
        out += (piece * (length // len(piece) + 1))[:length]
    if len(out) != size or position < len(block):
        raise ValueError("a compressed block of its index has another size")
    return bytes(out)
