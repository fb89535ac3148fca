"""Files of records: TFRecords, lines, records of one length, ArrayRecords."""

from __future__ import annotations

import gzip
import struct
import zlib

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from fuzzed.format import Format, is_anything
from fuzzed.mutations import LENGTHS, changed_bytes
from unison.data import (
    Dataset,
    FixedLengthRecordDataset,
    TextLineDataset,
    TFRecordDataset,
    TFRecordWriter,
)
from unison.data.files.checksums import crc32c, masked, masked_of_length
from unison.data.files.compression import ZLIB_FORMATS

CHANCE = np.random.RandomState(1)
RECORDS = [CHANCE.bytes(int(CHANCE.randint(0, 300))) for _ in range(60)]


def writes_records(compression):
    def write(folder):
        with TFRecordWriter(folder / "records", compression) as writer:
            for record in RECORDS:
                writer.write(record)

    return write


def reads_records(compression, **options):
    def read(folder):
        dataset = TFRecordDataset(folder / "records", compression_type=compression, **options)
        return list(dataset.as_numpy_iterator())

    return read


def are_records(found, right):
    """Whether all are records that were written: a file that ends between two of them is whole."""
    return {*found} <= {*right}


def records_length(compression):
    def length(folder, chance):
        number = chance.choice([*LENGTHS, 10**6, 5])
        checksum = masked_of_length(number) if chance.random() < 0.9 else 0
        record = RECORDS[3]
        good = struct.pack("<QI", len(record), masked_of_length(len(record))) + record
        good += struct.pack("<I", masked(crc32c()(record)))
        content = good + struct.pack("<QI", number, checksum) + good * chance.choice([0, 1, 50])
        if compression:
            packer = zlib.compressobj(wbits=ZLIB_FORMATS[compression])
            content = packer.compress(content) + packer.flush()
        (folder / "records").write_bytes(content)
        return f"length {number}"

    return length


def records_packed(compression):
    """Changes what a compressed file holds."""

    def packed(folder, chance):
        content = zlib.decompress((folder / "records").read_bytes(), ZLIB_FORMATS[compression])
        content, how = changed_bytes(content, chance)
        packer = zlib.compressobj(wbits=ZLIB_FORMATS[compression])
        (folder / "records").write_bytes(packer.compress(content) + packer.flush())
        return how

    return packed


LINES = b"".join(b"line %d, %s\r\n" % (number, b"x" * (number % 50)) for number in range(200))


def write_lines(folder):
    (folder / "lines").write_bytes(LINES)
    (folder / "lines.gz").write_bytes(gzip.compress(LINES, mtime=0))


def read_lines(folder):
    plain = list(TextLineDataset(str(folder / "lines")).as_numpy_iterator())
    return plain, list(TextLineDataset(str(folder / "lines.gz"), "GZIP").as_numpy_iterator())


def are_lines(found, right):
    """Of the compressed file: those that were written; the other one may hold anything."""
    return {*found[1]} <= {*right[1]} | {b""} or b"".join(found[1]) in b"".join(right[1]) * 400


def write_fixed(folder):
    (folder / "records").write_bytes(CHANCE.bytes(8 + 12 * 50))


def read_fixed(folder):
    dataset = FixedLengthRecordDataset(str(folder / "records"), 12, header_bytes=8)
    return list(dataset.as_numpy_iterator())


def write_array_records(folder):
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:4")
    for record in RECORDS:
        writer.write(record)
    writer.close()


def read_array_records(folder):
    dataset = Dataset.from_array_record(str(folder / "a.array_record"))
    return list(dataset.take(500).as_numpy_iterator())


FORMATS = {
    "tfrecord": Format(
        writes_records(""), reads_records(""), [records_length("")], is_right=are_records
    ),
    "tfrecord-skip": Format(
        writes_records(""),
        reads_records("", on_corrupt="skip"),
        [records_length("")],
        is_right=are_records,
    ),
    **{
        f"tfrecord-{kind.lower()}": Format(
            writes_records(kind),
            reads_records(kind),
            [records_length(kind), records_packed(kind)],
            is_right=are_records,
        )
        for kind in ("GZIP", "ZLIB")
    },
    "lines": Format(write_lines, read_lines, is_right=are_lines),
    "fixed-length": Format(write_fixed, read_fixed, is_right=is_anything),
    "array-record": Format(write_array_records, read_array_records, is_right=are_records),
}
