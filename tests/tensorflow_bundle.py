"""Checkpoints of TensorFlow's format with any content, and right checksums."""

from unison.data.files.checksums import crc32c, masked
from unison.train.sorted_table import TableWriter, block_of, table_of  # noqa: F401
from unison.train.sorted_table import entry_of as entry  # noqa: F401
from unison.train.tensor_bundle import bytes_of_texts, place_of_tensor
from unison.train.wire_format import message_of as message
from unison.train.wire_format import varint  # noqa: F401


class Table(TableWriter):
    """A table, block by block."""

    block = TableWriter.add
    ended = TableWriter.finished


def tensor(content, dtype=1, shape=(), shard=0, offset=0, size=None, checksum=None):
    """The message that says where a tensor is."""
    checksum = masked(crc32c()(content)) if checksum is None else checksum
    size = len(content) if size is None else size
    return place_of_tensor(dtype, shape, offset, size, checksum, shard)


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
        content, checksum = bytes_of_texts([message([(1, node) for node in nodes])])
        where = tensor(content, 7, [], 0, len(data), None, checksum)
        items[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = where
        data += content
    (folder / "ckpt.index").write_bytes(table_of(sorted(items.items())))
    (folder / "ckpt.data-00000-of-00001").write_bytes(data)
    return str(folder / "ckpt")
