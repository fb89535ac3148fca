"""Files by path: opening, patterns, compression, lines, records of one length, TFRecords."""

import gzip
import itertools
import logging
import struct
import threading
import zlib

import fsspec
import numpy as np
import pytest

from unison.data import (
    Dataset,
    FixedLengthRecordDataset,
    TextLineDataset,
    TFRecordDataset,
)
from unison.data.files import TFRecordOptions, TFRecordWriter, matching_files, open_file
from unison.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)

RECORDS = [b"first", b"", b"x" * 3000, b"last one"]


@pytest.fixture
def lines(tmp_path):
    """Three text files."""
    names = [tmp_path / f"{name}.txt" for name in "abc"]
    for number, name in enumerate(names):
        name.write_bytes(b"".join(b"%s%d\n" % (name.stem.encode(), i) for i in range(3 + number)))
    return [str(name) for name in names]


def written(path, records=RECORDS, options=None):
    with TFRecordWriter(path, options) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture
def file(tmp_path):
    """A TFRecord file of four records."""
    return written(str(tmp_path / "records"))


def elements_of(stream):
    return [leaves[0] for leaves in iter(stream.next, None)]


# -- paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["{}/notes", "memory://of-files/notes"])
def test_what_is_written_is_read_by_any_path(path, tmp_path):
    path = path.format(tmp_path)
    with open_file(path, "wb") as file:
        file.write(b"contents")
    with open_file(path) as file:
        assert file.read() == b"contents"


@pytest.mark.parametrize("path", ["{}/nothing", "memory://of-files/nothing"])
def test_a_file_that_is_missing_is_an_error_with_its_path(path, tmp_path):
    path = path.format(tmp_path)
    with pytest.raises(NotFoundError, match=f"{path}; No such file"):
        open_file(path)
    for dataset in (
        TextLineDataset(path),
        TFRecordDataset(path),
        TFRecordDataset([path] * 2, "GZIP"),
    ):
        with pytest.raises(NotFoundError, match=path):
            list(dataset)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(FailedPreconditionError, match="Is a directory"):
        open_file(str(tmp_path))


def test_a_remote_file_is_sought_in_from_both_ends():
    contents = bytes(range(256)) * 20_000  # several of the pieces that are read at once
    with open_file("memory://of-files/large", "wb") as file:
        file.write(contents)
    with open_file("memory://of-files/large") as file:
        assert file.read(10) == contents[:10]
        file.seek(3_000_000)
        assert file.tell() == 3_000_000
        assert file.read(2_000_000) == contents[3_000_000:5_000_000]
        file.seek(-5, 2)
        assert file.read() == contents[-5:]
        file.seek(0)
        assert file.read() == contents


def test_reading_ahead_ends_with_the_file():
    with open_file("memory://of-files/ahead", "wb") as file:
        file.write(bytes(12 << 20))
    file = open_file("memory://of-files/ahead")
    for _ in range(3):
        file.read(1 << 20)
    reading = [thread for thread in threading.enumerate() if thread.name == "unison-data-prefetch"]
    assert reading
    file.close()
    for thread in reading:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("folder", ["{}", "memory://of-patterns"])
def test_patterns_find_files_and_no_folders(folder, tmp_path):
    folder = folder.format(tmp_path)
    for name in ("b.txt", "a.txt", "c.csv", "d.txt/inside"):
        system, path = fsspec.core.url_to_fs(f"{folder}/{name}")
        system.makedirs(system._parent(path), exist_ok=True)
        system.pipe(path, b"")
    found = [f"{folder}/{name}".encode() for name in ("a.txt", "b.txt")]
    assert matching_files(f"{folder}/*.txt") == found
    assert matching_files([f"{folder}/?.csv", f"{folder}/a*"]) == [
        found[0],
        f"{folder}/c.csv".encode(),
    ]
    with pytest.raises(InvalidArgumentError, match=r"No files matched pattern: .*\.png"):
        matching_files(f"{folder}/*.png")


@pytest.mark.parametrize(
    ("path", "package"),
    [("gs://bucket/file", "gcsfs"), ("hdfs://host/file", "pyarrow"), ("abfs://box/file", "adlfs")],
)
def test_a_missing_driver_is_an_error_that_names_its_package(path, package, monkeypatch):
    for module in ("gcsfs", "adlfs", "pyarrow", "pyarrow.fs"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    fsspec.register_implementation("gs", "gcsfs.GCSFileSystem", clobber=True)
    protocol = path.partition(":")[0]
    with pytest.raises(
        ImportError, match=f"No driver for {protocol}:// works here. Install {package}"
    ):
        open_file(path)


def test_hadoop_without_java_is_an_error_of_one_line(monkeypatch):
    def looks_for_java(path, **options):
        raise OSError("Unable to load libjvm\ndlopen(/usr/lib/jvm/libjvm.so) failed")

    monkeypatch.setattr(fsspec.core, "url_to_fs", looks_for_java)
    with pytest.raises(ImportError, match=r"Hadoop's libhdfs. \(Unable to load libjvm\)$"):
        open_file("hdfs://host/file")


def test_an_unknown_protocol_is_an_error():
    with pytest.raises(InvalidArgumentError, match="no file system for carrier-pigeon://"):
        open_file("carrier-pigeon://tower/file")


# -- lines ------------------------------------------------------------------------------------


def test_lines_come_without_their_ends(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\r\n\n\rc\r\nlast")
    assert list(TextLineDataset(path)) == [b"a", b"b", b"", b"\rc", b"last"]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_are_read_over_all_their_streams(compression, tmp_path):
    pack = {"GZIP": gzip.compress, "ZLIB": zlib.compress}[compression]
    path = tmp_path / "packed"
    path.write_bytes(pack(b"a\nb") + pack(b"c\nd\n"))
    assert list(TextLineDataset(path, compression)) == [b"a", b"bc", b"d"]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_damage_of_a_compressed_file_is_data_loss(compression, tmp_path):
    pack = {"GZIP": gzip.compress, "ZLIB": zlib.compress}[compression]
    path = tmp_path / "packed"
    path.write_bytes(pack(b"line\n" * 1000)[:-5])
    with pytest.raises(DataLossError, match=f"ends within its {compression} stream, after"):
        list(TextLineDataset(path, compression))
    path.write_bytes(b"not packed at all")
    with pytest.raises(DataLossError, match=f"is not a {compression} file, or is corrupt"):
        list(TextLineDataset(path, compression))


def test_several_files_are_read_in_turn(lines):
    assert b" ".join(TextLineDataset(lines)) == b"a0 a1 a2 b0 b1 b2 b3 c0 c1 c2 c3 c4"
    in_turn = b" ".join(TextLineDataset(lines, num_parallel_reads=2))
    of_interleave = b" ".join(Dataset.from_tensor_slices(lines).interleave(TextLineDataset, 2))
    assert in_turn == of_interleave == b"a0 b0 a1 b1 a2 b2 b3 c0 c1 c2 c3 c4"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 12, 100])
@pytest.mark.parametrize("cycle", [1, 2, 3, 4, 7])
def test_reading_in_turn_gives_the_same_in_blocks(cycle, size, lines):
    dataset = TextLineDataset(lines, buffer_size=5, num_parallel_reads=cycle)
    one_by_one = list(dataset)
    assert sorted(one_by_one) == sorted(TextLineDataset(lines))
    assert [line for batch in dataset.batch(size) for line in batch] == one_by_one


def test_names_come_from_a_dataset_too(lines):
    names = Dataset.from_tensor_slices(lines[::-1])
    assert next(iter(TextLineDataset(names))) == b"c0"
    with pytest.raises(TypeError, match="Expected the names of files, as text"):
        TextLineDataset(Dataset.range(3))
    with pytest.raises(TypeError, match="Expected the names of files, as text"):
        TextLineDataset([1, 2])
    assert list(TextLineDataset([])) == []


@pytest.mark.parametrize("number", [0, -3])
def test_files_are_read_by_a_positive_number_at_a_time(number, lines):
    with pytest.raises(InvalidArgumentError, match=f"num_parallel_reads.*Received: {number}"):
        TextLineDataset(lines, num_parallel_reads=number)


# -- records of one length --------------------------------------------------------------------


@pytest.mark.parametrize("buffer_size", [None, 1, 4, 7])
def test_records_of_one_length_lie_between_header_and_footer(buffer_size, tmp_path):
    path = tmp_path / "records"
    path.write_bytes(b"HHaaabbbcccF")
    dataset = FixedLengthRecordDataset(path, 3, 2, 1, buffer_size)
    assert list(dataset) == [b"aaa", b"bbb", b"ccc"]


def test_what_is_no_multiple_of_the_length_is_an_error(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(b"HHaaabbF")
    with pytest.raises(InvalidArgumentError, match="has 5 bytes, which is not a multiple"):
        list(FixedLengthRecordDataset(path, 3, 2, 1))
    with pytest.raises(InvalidArgumentError, match="Received: 0, 0 and 0"):
        FixedLengthRecordDataset(path, 0)


# -- TFRecords --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, "GZIP", "ZLIB", TFRecordOptions("GZIP", 9)])
@pytest.mark.parametrize("buffer_size", [None, 1, 64])
def test_records_are_read_as_they_were_written(options, buffer_size, tmp_path):
    path = written(str(tmp_path / "records"), options=options)
    compression = options.compression_type if isinstance(options, TFRecordOptions) else options
    assert list(TFRecordDataset(path, compression, buffer_size)) == RECORDS


def test_records_go_through_memory_and_in_batches():
    path = written("memory://of-files/records")
    assert [list(batch) for batch in TFRecordDataset(path).batch(3)] == [RECORDS[:3], RECORDS[3:]]


def test_a_writer_flushes_and_closes(tmp_path):
    path = str(tmp_path / "records")
    for options in (None, "GZIP"):
        writer = TFRecordWriter(path, options)
        writer.write(b"one")
        writer.flush()
        assert next(iter(TFRecordDataset(path, options, buffer_size=1))) == b"one"
        writer.close()
        writer.close()
        with pytest.raises(FailedPreconditionError, match=f"writer of {path} is closed"):
            writer.write(b"two")
    with pytest.raises(TypeError, match=r"record as bytes\. Received: 'text'"):
        TFRecordWriter(path).write("text")
    with pytest.raises(InvalidArgumentError, match="Received: 'LZ4'"):
        TFRecordWriter(path, "LZ4")


def offsets(records=RECORDS):
    """Where the records of a file begin, and the file's end."""
    return [0, *itertools.accumulate(len(record) + 16 for record in records)]


def damaged(path, position):
    contents = bytearray(open_file(path).read())
    contents[position] ^= 0x40
    with open_file(path, "wb") as file:
        file.write(contents)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("place", "what"),
    [
        (0, "the checksum of its length is wrong"),
        (7, "the checksum of its length is wrong"),
        (8, "the checksum of its length is wrong"),
        (11, "the checksum of its length is wrong"),
        (12, "the checksum of its data is wrong"),
        (-1, "the checksum of its data is wrong"),
        (-4, "the checksum of its data is wrong"),
        (-5, "the checksum of its data is wrong"),
    ],
)
def test_a_damaged_byte_is_found_wherever_it_is(number, place, what, file):
    begin, end = offsets()[number : number + 2]
    if not RECORDS[number] and place == -5:
        what = "the checksum of its length is wrong"  # an empty record has no data
    damaged(file, begin + place if place >= 0 else end + place)
    iterator = iter(TFRecordDataset(file))
    assert list(itertools.islice(iterator, number)) == RECORDS[:number]
    with pytest.raises(DataLossError) as caught:
        next(iterator)
    expected = f"Corrupt record in {file}: record {number}, at byte {begin}: {what}"
    assert expected in caught.value.message

    kept = RECORDS[:number] + RECORDS[number + 1 :]
    for buffer_size in (None, 20):
        skipping = TFRecordDataset(file, buffer_size=buffer_size, on_corrupt="skip")
        assert list(skipping) == kept
        assert skipping.num_skipped == 1


@pytest.mark.parametrize("left", [1, 11, 12, 15, 20])
def test_a_file_that_is_cut_off_is_found(left, file):
    begin = offsets()[3]
    contents = open_file(file).read()
    with open_file(file, "wb") as cut:
        cut.write(contents[: begin + left])
    with pytest.raises(DataLossError, match=f"record 3, at byte {begin}: the file ends within it"):
        list(TFRecordDataset(file))
    skipping = TFRecordDataset(file, on_corrupt="skip")
    assert list(skipping) == RECORDS[:3]
    assert skipping.num_skipped == 1


def test_a_length_that_is_absurd_does_not_take_memory(file):
    from unison.data.files.checksums import masked_of_length

    with open_file(file, "ab") as grown:
        grown.write(struct.pack("<QI", 1 << 60, masked_of_length(1 << 60)))
    with pytest.raises(DataLossError, match="expected 1152921504606846992 bytes, found 12"):
        list(TFRecordDataset(file))


def test_data_that_looks_like_a_header_is_not_taken_for_one(tmp_path):
    numbers = [struct.pack("<Q", number) for number in (3, 1 << 40, 0, 5)]
    path = written(str(tmp_path / "numbers"), [*numbers, b"text"])
    damaged(path, 0)
    dataset = TFRecordDataset(path, on_corrupt="skip")
    assert list(dataset) == [*numbers[1:], b"text"]
    assert dataset.num_skipped == 1


def test_damage_that_is_skipped_is_counted_and_logged_once(file, tmp_path, caplog):
    other = written(str(tmp_path / "other"))
    for path in (file, other):
        for begin in offsets()[:2]:
            damaged(path, begin)
    dataset = TFRecordDataset([file, other], on_corrupt="skip", num_parallel_reads=2)
    with caplog.at_level(logging.WARNING, "unison"):
        assert sorted(dataset) == sorted(RECORDS[2:] * 2)
        assert dataset.num_skipped == 2  # two records side by side are one place
        list(dataset)
    assert dataset.num_skipped == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Corrupt records are skipped and counted. The first one:" in caplog.text
    with pytest.raises(ValueError, match="Received: 'ignore'"):
        TFRecordDataset(file, on_corrupt="ignore")


def test_after_an_error_the_next_file_is_read(file, tmp_path):
    damaged(file, 12)
    other = written(str(tmp_path / "other"))
    for parallel in (None, 2):
        dataset = TFRecordDataset([file, other], num_parallel_reads=parallel)
        assert list(dataset.ignore_errors()) == RECORDS
    assert list(TFRecordDataset([str(tmp_path / "no"), other]).ignore_errors()) == RECORDS


# -- state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("cycle", [None, 2, 5])
@pytest.mark.parametrize("buffer_size", [20, 1000])
def test_reading_goes_on_exactly_where_it_was(compression, cycle, buffer_size, tmp_path):
    names = [
        written(str(tmp_path / str(n)), [b"%d-%d" % (n, i) for i in range(n + 3)], compression)
        for n in range(3)
    ]

    def plan():
        return TFRecordDataset(names, compression, buffer_size, cycle).plan

    everything = elements_of(plan().stream())
    assert len(everything) == 12
    for taken in range(len(everything) + 1):
        stream = plan().stream()
        assert [stream.next()[0] for _ in range(taken)] == everything[:taken]
        state = stream.state()
        stream.next()  # reading on does not change what was kept
        restored = plan().stream()
        restored.restore(state)
        assert elements_of(restored) == everything[taken:]


def test_a_restored_stream_seeks_and_does_not_read_what_is_before(tmp_path):
    path = written(str(tmp_path / "records"), [b"%05d" % i for i in range(40_000)])
    stream = TFRecordDataset(path, buffer_size=2100).plan.stream()
    stream.skip(9_000)
    state = stream.state()
    damaged(path, 30)  # what comes before is not looked at
    restored = TFRecordDataset(path, buffer_size=2100).plan.stream()
    restored.restore(state)
    assert restored.next() == (b"09000",)
    damaged(path, 39_500 * 21 + 13)
    with pytest.raises(DataLossError, match=rf"byte \d+ on\), at byte {39_500 * 21}"):
        elements_of(restored)


@pytest.mark.parametrize("cycle", [1, 3])
def test_lines_and_records_of_one_length_go_on_exactly_where_they_were(cycle, lines):
    def text():
        return TextLineDataset(lines, None, 4, cycle).plan

    def fixed():
        return FixedLengthRecordDataset(lines, 3, buffer_size=4, num_parallel_reads=cycle).plan

    for plan in (text, fixed):
        everything = elements_of(plan().stream())
        for taken in range(len(everything) + 1):
            stream = plan().stream()
            stream.skip(taken)
            restored = plan().stream()
            restored.restore(stream.state())
            assert elements_of(restored) == everything[taken:]


def test_skipping_passes_over_elements_and_files(lines):
    stream = TextLineDataset(lines).plan.stream()
    stream.skip(5)
    assert stream.next() == (b"b2",)
    stream.skip(100)
    assert stream.next() is None


def test_bytes_keep_the_zeros_at_their_ends():
    texts = [b"a\x00", b"\x00\x00", b""]
    assert list(Dataset.from_tensor_slices(texts)) == texts


def test_blocks_are_columns_of_bytes(file):
    (block,) = TFRecordDataset(file).plan.stream().next_block(3)
    assert block.dtype == np.dtype(object)
    assert block.tolist() == RECORDS[:3]
