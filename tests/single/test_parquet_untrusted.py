"""Parquet files that are damaged: what their checksums, footers and statistics tell."""

import contextlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from peak_memory import peak_memory
from unison.data import Dataset
from unison.data.sources import parquet
from unison.data.sources.parquet_footer import read_groups
from unison.errors import DataLossError, OpError

ROWS = 300


@pytest.fixture(params=["by index", "in order"])
def read(request, monkeypatch):
    """Both ways in which files are read."""
    if request.param == "in order":
        monkeypatch.setattr(parquet, "BYTES_IN_MEMORY", 0)
    return lambda path: list(Dataset.from_parquet(str(path)).batch(50).as_numpy_iterator())


def table():
    chance = np.random.default_rng(1)
    return pa.table(
        {
            "real": chance.normal(size=ROWS).astype("f4"),
            "whole": chance.integers(0, 9, ROWS),
            "text": [f"t{number * 7 % 50}" for number in range(ROWS)],
        }
    )


def written(path, **options):
    pa.parquet.write_table(table(), path, row_group_size=128, **options)
    return path.read_bytes()


def footer_of(content):
    """Where the footer of a file begins."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def test_each_flipped_bit_of_pages_with_checksums_is_found(tmp_path):
    path = tmp_path / "a.parquet"
    whole = written(path, write_page_checksum=True, compression="none")
    expected = table().to_pylist()
    wrong = []
    for place in range(4, footer_of(whole), 3):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found = list(Dataset.from_parquet(str(path)).as_numpy_iterator())
        except DataLossError:
            continue
        if [(e["real"], e["whole"], e["text"].decode()) for e in found] != [
            (np.float32(e["real"]), e["whole"], e["text"]) for e in expected
        ]:
            wrong.append(place)
    assert wrong == []


def test_a_row_group_that_is_shorter_than_its_footer_says_is_corrupt(tmp_path, read, monkeypatch):
    written(tmp_path / "a.parquet")
    batches = pa.parquet.ParquetFile.iter_batches

    def fewer(self, *args, **options):
        *all_but_last, last = batches(self, *args, **options)
        return iter([*all_but_last, last.slice(1)])

    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", fewer)
    with pytest.raises(DataLossError, match=r"row group 0 has 127 rows, and the footer says 128"):
        read(tmp_path / "a.parquet")


def test_a_row_group_that_is_longer_than_its_footer_says_is_corrupt(tmp_path, read, monkeypatch):
    written(tmp_path / "a.parquet")
    batches = pa.parquet.ParquetFile.iter_batches

    def more(self, *args, **options):
        for batch in batches(self, *args, **options):
            yield batch
            yield batch

    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", more)
    with pytest.raises(DataLossError, match="has more than its 128 rows"):
        read(tmp_path / "a.parquet")


def test_a_column_has_one_name_in_the_whole_footer(tmp_path, read):
    whole = written(tmp_path / "a.parquet", write_page_checksum=True, store_schema=False)
    assert whole[footer_of(whole) :].count(b"whole") == 4  # the schema, and three row groups
    head, tail = whole[: footer_of(whole)], whole[footer_of(whole) :]
    (tmp_path / "a.parquet").write_bytes(head + tail.replace(b"whole", b"other", 1))
    with pytest.raises(
        DataLossError, match=r"the columns .*'other'.* are .*'whole'.* in row group 0"
    ):
        read(tmp_path / "a.parquet")


def test_a_value_that_its_statistics_exclude_is_corrupt_also_without_checksums(tmp_path, read):
    path = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False}
    whole = written(path, **options)
    value = table()["real"][5].as_py()
    place = whole.index(np.float32(value).tobytes())
    changed = bytearray(whole)
    changed[place + 3] ^= 0x40  # the highest bit of the exponent
    path.write_bytes(changed)
    with pytest.raises(DataLossError, match=r"the column 'real' goes from .* and its statistics"):
        read(path)


@pytest.mark.parametrize("kind", ["f4", "f8", "i1", "i8", "u1", "u4", "u8", "f2", "?"])
def test_statistics_of_all_numbers_are_those_of_their_values(tmp_path, read, kind):
    dtype = np.dtype(kind)
    bits = np.random.default_rng(3).integers(0, 256, 64 * dtype.itemsize, np.uint8)
    values = bits.view(dtype) if kind != "?" else bits > 100
    pa.parquet.write_table(pa.table({"a": values}), tmp_path / "a.parquet", row_group_size=9)
    found = np.concatenate([batch["a"] for batch in read(tmp_path / "a.parquet")])
    np.testing.assert_array_equal(found, values)


def test_numbers_that_are_always_the_same_are_not_kept_in_memory(tmp_path):
    path = tmp_path / "a.parquet"
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(50_000_000, np.int32)), pa.array([7]))
    pa.parquet.write_table(pa.table({"a": same}), path, store_schema=False)
    del same
    assert path.stat().st_size < 1_000_000
    with peak_memory() as peak:
        assert next(iter(Dataset.from_parquet(str(path)))) == {"a": 7}
    assert peak.bytes < 100e6


def test_a_type_that_pyarrow_ends_the_process_at_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    whole = written(path)
    begin = footer_of(whole)
    for place in range(begin, begin + 120):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with contextlib.suppress(OpError):
                list(Dataset.from_parquet(str(path)))


@pytest.mark.parametrize(
    "footer",
    [b"", b"\x00", b"\x1c" * 200, b"\x19\xfc" + b"\xff" * 9, b"\xff" * 99, b"\x2c" * 40 + b"\x00"],
    ids=len,
)
def test_bytes_that_are_no_footer_end_in_an_error(footer):
    content = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises((ValueError, LookupError, TypeError)):
        read_groups(io.BytesIO(content))
