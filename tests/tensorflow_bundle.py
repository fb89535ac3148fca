"""Checkpoints of TensorFlow's format with any content, and right checksums."""

import struct

from unison.data.files.checksums import crc32c, masked
from unison.train.sorted_table import MAGIC


def varint(number):
    """A number on the wire."""
    content = b""
    while number > 127:
        content += bytes([number & 127 | 128])
        number >>= 7
    return content + bytes([number])


def message(fields):
    """A message of fields `(number, value)`: numbers, bytes, or messages of such lists."""
    content = b""
    for number, value in fields:
        if isinstance(value, int):
            content += varint(number << 3) + varint(value % 2**64)
        else:
            value = value if isinstance(value, bytes) else message(value)
            content += varint(number << 3 | 2) + varint(len(value)) + value
    return content


class Table:
    """A table, block by block."""

    def __init__(self):
        self.content = b""

    def block(self, content, kind=0):
        """Adds a block with its trailer; returns its handle."""
        handle = varint(len(self.content)) + varint(len(content))
        whole = content + bytes([kind])
        self.content += whole + struct.pack("<I", masked(crc32c()(whole)))
        return handle

    def ended(self, about, index):
        """The whole file, which ends with the handles of its two last blocks."""
        footer = about + index
        return self.content + footer + bytes(40 - len(footer)) + MAGIC


def entry(key, value, shared=0):
    """A key and a value in a block, without what the key shares with the one before."""
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def block_of(entries):
    """A block of entries, with the list of places that ends it."""
    return b"".join(entries) + struct.pack("<II", 0, 1)


def table_of(items):
    """The table of keys and values in one block."""
    table = Table()
    about = table.block(block_of([]))
    handle = table.block(block_of([entry(key, value) for key, value in items]))
    return table.ended(about, table.block(block_of([entry(b"\xff", handle)])))


def tensor(content, dtype=1, shape=(), shard=0, offset=0, size=None, checksum=None):
    """The message that says where a tensor is."""
    sizes = [(2, [(1, number)]) for number in shape]
    checksum = masked(crc32c()(content)) if checksum is None else checksum
    fields = [(1, dtype), (2, sizes), (3, shard), (4, offset)]
    fields.append((5, len(content) if size is None else size))
    return message(fields) + varint(6 << 3 | 5) + struct.pack("<I", checksum)


def text_tensor(texts, offset=0):
    """The bytes of a tensor of texts, and the message that says where it is."""
    lengths = b"".join(varint(len(text)) for text in texts)
    numbers = b"".join(struct.pack("<I", len(text)) for text in texts)
    of_lengths = struct.pack("<I", masked(crc32c()(numbers)))
    content = lengths + of_lengths + b"".join(texts)
    checksum = masked(crc32c()(numbers + of_lengths + b"".join(texts)))
    return content, tensor(content, 7, [], 0, offset, None, checksum)


def write_bundle(folder, tensors, header=((1, 1),), nodes=None):
    """Writes a checkpoint.

    Args:
        folder: Where it gets the name `ckpt`.
        tensors: For every key, its bytes and more arguments of `tensor`.
        header: The fields of the header.
        nodes: The nodes of the graph, as fields; None for no graph.
    """
    data, items = b"", {b"": message(header)}
    for key, (content, arguments) in tensors.items():
        items[key.encode()] = tensor(content, **{"offset": len(data), **arguments})
        data += content
    if nodes is not None:
        content, where = text_tensor([message([(1, node) for node in nodes])], len(data))
        items[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = where
        data += content
    (folder / "ckpt.index").write_bytes(table_of(sorted(items.items())))
    (folder / "ckpt.data-00000-of-00001").write_bytes(data)
    return str(folder / "ckpt")
