"""Saved datasets that somebody else has made: right checksums, and anything behind them."""

import json
import os
import tempfile
import zlib

import numpy as np
import pytest

from peak_memory import peak_memory
from unison.data import Dataset
from unison.errors import DataLossError, OpError


@pytest.fixture
def folder(tmp_path):
    """The folder of a dataset, beside one of somebody's thesis."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "thesis").write_text("years")
    Dataset.range(5).save(tmp_path / "data")
    return tmp_path / "data"


def change_index(folder, change):
    """Changes what the index says, and gives it the right checksum."""
    path = folder / "dataset.json"
    described = json.loads(path.read_bytes().partition(b"\n")[2])
    changed = change(described)
    body = json.dumps(described if changed is None else changed).encode()
    path.write_bytes(b"%08x\n" % zlib.crc32(body) + body)


def leaf_of(described):
    return described["shards"][0]["blocks"][0]["leaves"][0]


# -- paths ---------------------------------------------------------------------------------------

OUTSIDE = ["../victim", "..", ".", "", "run-../../victim", "run-0123456789ab/../../victim"]


@pytest.mark.parametrize("run", [*OUTSIDE, "{victim}", None, 7, ["run"]], ids=str)
def test_saving_over_a_folder_deletes_nothing_that_no_dataset_has_written(folder, run):
    victim = folder.parent / "victim"
    run = run.format(victim=victim) if isinstance(run, str) else run
    change_index(folder, lambda described: described.update(run=run))
    with pytest.raises(DataLossError, match=r"dataset.json is corrupt.*Remove|name that matches"):
        Dataset.range(3).save(folder)
    assert os.listdir(victim) == ["thesis"]


def test_a_link_in_place_of_a_run_is_deleted_and_not_followed(folder):
    (run,) = folder.glob("run-*[!k]")
    run.rename(folder.parent / "moved")
    run.symlink_to(folder.parent / "victim")
    Dataset.range(3).save(folder)
    assert [int(x) for x in Dataset.load(folder)] == [0, 1, 2]
    assert os.listdir(folder.parent / "victim") == ["thesis"]


def test_cleaning_up_after_killed_writers_leaves_what_has_another_name(folder):
    (folder / "run-precious").mkdir()
    (folder / "run-precious.lock").touch()
    Dataset.range(3).save(folder)
    assert (folder / "run-precious").exists()


@pytest.mark.parametrize("name", ["dataset.json", "run-0123456789ab.lock"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "dataset.json":
        with pytest.raises(OpError):
            Dataset.load(folder)
    else:
        (folder / "run-0123456789ab").mkdir()
        Dataset.range(3).save(folder)


@pytest.mark.parametrize("key", ["run", "folder"])
@pytest.mark.parametrize("name", [*OUTSIDE, "{victim}"])
def test_nothing_outside_of_the_folder_is_read(tmp_path, key, name):
    Dataset.from_tensor_slices(np.zeros(32, np.uint8)).save(tmp_path / "data")
    secret = tmp_path / "victim" / "shard-00000" / "leaf0.values"
    secret.parent.mkdir(parents=True)
    secret.write_bytes(b"TOP SECRET bytes 0123456789abcde")

    def lead_outside(described):
        leaf_of(described)["parts"]["values"][2] = zlib.crc32(secret.read_bytes())
        given = name.format(victim=secret.parents[key == "run"])
        (described if key == "run" else described["shards"][0])[key] = given

    change_index(tmp_path / "data", lead_outside)
    with pytest.raises(DataLossError, match="expected a name that matches"):
        Dataset.load(tmp_path / "data")


def test_a_link_to_the_outside_is_not_read(folder):
    (values,) = folder.glob("run-*/shard-00000/leaf0.values")
    outside = folder.parent / "victim" / "values"
    values.rename(outside)
    values.symlink_to(outside)
    with pytest.raises(DataLossError, match="leads out of the folder"):
        Dataset.load(folder)


# -- contents ------------------------------------------------------------------------------------

WRONG = {
    "nothing": lambda d: {},
    "list": lambda d: [d],
    "deep": lambda d: d.update(structure=json.loads('{"tuple":[' * 400 + '"leaf"' + "]}" * 400)),
    "format": lambda d: d.update(format=["unison.data 1"]),
    "compression": lambda d: d.update(compression=[]),
    "structure": lambda d: d.update(structure={"tuple": 3}),
    "structure of more leaves": lambda d: d.update(structure={"tuple": ["leaf"] * 2}),
    "keys": lambda d: d.update(structure={"dict": ["leaf"], "keys": [[]], "order": [[]]}),
    "keys twice": lambda d: d.update(
        structure={"dict": ["leaf"] * 2, "keys": [1, 1], "order": [1, 1]}
    ),
    "fields": lambda d: d.update(
        structure={"named_tuple": "a; b", "fields": ["x"], "children": ["leaf"]}
    ),
    "spec": lambda d: d["specs"][0].update(shape=["x"]),
    "spec dtype": lambda d: d["specs"][0].update(dtype="V8"),
    "dtype": lambda d: d["shards"][0].update(dtypes=["O,O"]),
    "objects": lambda d: d["shards"][0].update(dtypes=["object"]),
    "rows": lambda d: d["shards"][0]["blocks"][0].update(rows=6),
    "negative rows": lambda d: d["shards"][0]["blocks"][0].update(rows=-5),
    "many rows": lambda d: d["shards"][0]["blocks"][0].update(rows=2**62),
    "infinite rows": lambda d: d["shards"][0]["blocks"][0].update(rows=1e999),
    "leaves": lambda d: d["shards"][0]["blocks"][0].update(leaves=[]),
    "shape": lambda d: leaf_of(d).update(shape=[-1, -1]),
    "large shape": lambda d: leaf_of(d).update(shape=[2**62, 4]),
    "large empty shape": lambda d: leaf_of(d).update(shape=[2**40, 2**40, 0]),
    "parts": lambda d: leaf_of(d).update(parts={}),
    "other parts": lambda d: leaf_of(d)["parts"].update({"../../x": [0, 0, 0]}),
    "stored": lambda d: leaf_of(d)["parts"].update(values=[2**62, 40, 0]),
    "size": lambda d: leaf_of(d)["parts"].update(values=[40, 2**62, 0]),
    "checksum": lambda d: leaf_of(d)["parts"].update(values=[40, 40, -1]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_index_of_right_checksum_and_wrong_content_is_corrupt(folder, wrong):
    change_index(folder, wrong)
    with pytest.raises(DataLossError, match=r"dataset.json is corrupt: .*write it again"):
        Dataset.load(folder)


def with_lengths(tmp_path, name, numbers):
    """A dataset of ragged text, of which one part holds other numbers, with a right checksum."""
    ragged = [np.array(["ab", "c"], object), np.array(["def"], object)]
    Dataset.from_generator(lambda: iter(ragged)).save(tmp_path)
    (path,) = tmp_path.glob(f"run-*/shard-00000/leaf0.{name}")
    content = np.array(numbers, np.int64).tobytes()
    assert path.stat().st_size == len(content)
    path.write_bytes(content)
    change_index(
        tmp_path,
        lambda d: leaf_of(d)["parts"].update({name: [len(content)] * 2 + [zlib.crc32(content)]}),
    )


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("lengths", [2, 1, -3]),
        ("lengths", [2**62, 2**62, 2**63 - 1]),
        ("lengths", [2, 1, 4]),
        ("lengths", [7, -4, 3]),
        ("sizes", [2, 2]),
        ("sizes", [-1, 4]),
        ("sizes", [2**62, -(2**62) + 3]),
    ],
)
def test_lengths_that_do_not_add_up_are_corrupt(tmp_path, name, numbers):
    with_lengths(tmp_path, name, numbers)
    with pytest.raises(DataLossError, match="leaf0 is corrupt"):
        list(Dataset.load(tmp_path))


def test_compressed_elements_that_are_more_than_they_should_be_take_no_memory(tmp_path):
    Dataset.range(8).save(tmp_path, compression="GZIP")
    (path,) = tmp_path.glob("run-*/shard-00000/leaf0.values")
    deflater = zlib.compressobj()
    bomb = b"".join(deflater.compress(bytes(1 << 20)) for _ in range(300)) + deflater.flush()
    path.write_bytes(bomb)
    change_index(
        tmp_path,
        lambda d: leaf_of(d)["parts"].update(values=[len(bomb), 64, zlib.crc32(bomb)]),
    )
    wrong = r"expected 64 bytes in .* deflated ones"
    with peak_memory() as peak, pytest.raises(DataLossError, match=wrong):
        list(Dataset.load(tmp_path))
    assert peak.bytes < 50e6


@pytest.mark.parametrize("compression", ["GZIP", "SNAPPY"])
def test_a_size_that_no_compression_reaches_is_corrupt(tmp_path, compression):
    Dataset.range(8).save(tmp_path, compression=compression)

    def claim(described):
        described["shards"][0]["blocks"][0]["rows"] = 2**40
        leaf_of(described)["parts"]["values"][1] = 2**43

    change_index(tmp_path, claim)
    with pytest.raises(DataLossError, match="bytes cannot hold 8796093022208"):
        Dataset.load(tmp_path)


# -- what earlier releases wrote -----------------------------------------------------------------


def test_an_index_of_release_0_1_is_read(folder):
    # Without the line's end behind the JSON, and with the sizes of a shape of nothing.
    change_index(folder, lambda described: None)
    assert not (folder / "dataset.json").read_bytes().endswith(b"\n")
    assert [int(x) for x in Dataset.load(folder)] == list(range(5))


def test_a_folder_elsewhere_is_written_over(folder):
    with tempfile.TemporaryDirectory() as other:
        Dataset.range(5).save(other)
        Dataset.range(3).save(other)
        assert [int(x) for x in Dataset.load(other)] == [0, 1, 2]
        assert len(os.listdir(other)) == 2
