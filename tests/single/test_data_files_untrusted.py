"""Record files that somebody else has made: right checksums, and lengths that nothing has."""

import gzip
import struct
import time
import zlib

import numpy as np
import pytest

from peak_memory import peak_memory
from unison.data import Dataset, TextLineDataset, TFRecordDataset
from unison.data.files import compression as compressions
from unison.data.files.checksums import crc32c, masked, masked_of_length
from unison.errors import DataLossError

MEBIBYTE = 1 << 20
PACKERS = {"GZIP": lambda: zlib.compressobj(wbits=31), "ZLIB": zlib.compressobj}


def header(length):
    return struct.pack("<QI", length, masked_of_length(length))


def record(data):
    return header(len(data)) + data + struct.pack("<I", masked(crc32c()(data)))


def packed(kind, *pieces):
    """Pieces, of which a number stands for so many mebibytes of zeros, compressed."""
    packer = PACKERS[kind]()
    content = b""
    for piece in pieces:
        zeros = piece if isinstance(piece, int) else 0
        for each in [bytes(MEBIBYTE)] * zeros or [piece]:
            content += packer.compress(each)
    return content + packer.flush()


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("length", [1 << 45, 140 * MEBIBYTE, 2**64 - 1])
def test_a_record_takes_no_memory_that_its_file_hardly_has(tmp_path, kind, length):
    path = tmp_path / "records"
    path.write_bytes(packed(kind, record(b"good"), header(length), 150))
    found = []
    with peak_memory() as peak, pytest.raises(DataLossError, match="decompression bomb"):
        found.extend(TFRecordDataset(path, compression_type=kind))
    assert found == [b"good"]
    assert peak.bytes < 100e6


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_a_record_that_is_longer_than_its_file_is_not_looked_for(tmp_path, on_corrupt):
    path = tmp_path / "records"
    path.write_bytes(record(b"one") + header(1 << 45) + bytes(100 * MEBIBYTE))
    dataset = TFRecordDataset(path, on_corrupt=on_corrupt)
    if on_corrupt == "raise":
        with peak_memory() as peak, pytest.raises(DataLossError, match="the file ends within it"):
            list(dataset)
        assert peak.bytes < 50e6
    else:
        assert list(dataset) == [b"one"]


def test_what_follows_a_length_that_nothing_has_is_found(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(record(b"one") + header(1 << 45) + record(b"two") + record(b"three"))
    dataset = TFRecordDataset(path, on_corrupt="skip")
    assert list(dataset) == [b"one", b"two", b"three"]
    assert dataset.num_skipped == 1


def test_a_large_record_of_a_compressed_file_is_read(tmp_path):
    large = np.random.default_rng(0).integers(0, 16, 40 * MEBIBYTE, np.uint8).tobytes()
    path = tmp_path / "records"
    path.write_bytes(gzip.compress(record(large), compresslevel=1))
    assert list(TFRecordDataset(path, compression_type="GZIP")) == [large]


@pytest.mark.parametrize("kind", PACKERS)
def test_a_line_takes_no_memory_that_its_file_hardly_has(tmp_path, kind):
    path = tmp_path / "lines"
    path.write_bytes(packed(kind, b"first\n", 150))
    with peak_memory() as peak, pytest.raises(DataLossError, match="decompression bomb"):
        list(TextLineDataset(path, kind))
    assert peak.bytes < 100e6


def test_a_quotation_that_never_ends_takes_no_memory_that_its_file_hardly_has(tmp_path):
    from unison.data.files.csv_records import CsvRecords
    from unison.data.files.records import names_of_files

    path = tmp_path / "table.csv"
    line = b"x" * 1000 + b"\n"
    path.write_bytes(packed("GZIP", b'1,"', *[line * 1000] * 150))
    with peak_memory() as peak, pytest.raises(DataLossError, match="decompression bomb"):
        list(Dataset(CsvRecords(names_of_files(path), compression="GZIP")))
    assert peak.bytes < 100e6


@pytest.mark.parametrize("kind", PACKERS)
def test_lines_of_a_compressed_file_are_those_of_the_plain_one(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(compressions, "_INFLATED_AT_ONCE", 7)
    content = b"a\nb\r\n\n\rc\r\n" + b"long" * 5000 + b"\nlast"
    plain, other = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(content)
    other.write_bytes(packed(kind, content))
    assert list(TextLineDataset(other, kind)) == list(TextLineDataset(plain))
    for size in (1, 2, 3, 100):
        expected = list(TextLineDataset(plain, buffer_size=size))
        assert list(TextLineDataset(other, kind, buffer_size=size)) == expected


def test_a_file_that_ends_with_its_last_byte_inflated_is_whole(tmp_path, monkeypatch):
    # The inflater has read all, and has still to give what did not fit.
    monkeypatch.setattr(compressions, "_INFLATED_AT_ONCE", 10)
    path = tmp_path / "lines"
    path.write_bytes(packed("GZIP", b"x" * 100_000))
    assert list(TextLineDataset(path, "GZIP")) == [b"x" * 100_000]


def test_empty_streams_end(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(gzip.compress(b"") * 20_000)
    begin = time.process_time()
    assert list(TextLineDataset(path, "GZIP")) == []
    assert time.process_time() - begin < 5.0
