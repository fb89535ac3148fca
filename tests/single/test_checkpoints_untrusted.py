"""Checkpoints that somebody else has made: right checksums, and anything behind them."""

import io
import json
import os
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tensorflow_bundle as bundles
import unison
from peak_memory import peak_memory
from unison.errors import DataLossError, OpError, UnimplementedError
from unison.train import Checkpoint, CheckpointManager, latest_checkpoint, load_checkpoint

VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def path(tmp_path):
    """A checkpoint of one variable of four numbers."""
    return Checkpoint(a=unison.Variable(np.arange(4, dtype=np.int32))).write(tmp_path / "ckpt")


def change(path, to_index=None, to_members=None):
    """Changes the graph, or the members, of a checkpoint; all checksums are right again."""
    with zipfile.ZipFile(f"{path}.index") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    if to_index is not None:
        index = json.loads(members["checkpoint.json"])
        changed = to_index(index)
        members["checkpoint.json"] = json.dumps(index if changed is None else changed)
    if to_members is not None:
        to_members(members)
    with zipfile.ZipFile(f"{path}.index", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def restore(path):
    variable = unison.Variable(np.zeros(4, np.int32))
    Checkpoint(a=variable).read(path).assert_consumed()
    return variable.numpy()


def array_of(index):
    return next(iter(index["arrays"].values()))


# -- the graph -----------------------------------------------------------------------------------

WRONG = {
    "nothing": lambda d: {},
    "a list": lambda d: [d],
    "no nodes": lambda d: d.update(nodes=[]),
    "nodes": lambda d: d.update(nodes={"0": {}}),
    "a node": lambda d: d.update(nodes=[7]),
    "more of a node": lambda d: d["nodes"][0].update(other=1),
    "less of a node": lambda d: d["nodes"][0].pop("state"),
    "child out of range": lambda d: d["nodes"][0]["children"].update(a=99),
    "negative child": lambda d: d["nodes"][0]["children"].update(a=-1),
    "child of text": lambda d: d["nodes"][0]["children"].update(a="1"),
    "child of a list": lambda d: d["nodes"][0]["children"].update(a=[1]),
    "child of infinity": lambda d: d["nodes"][0]["children"].update(a=1e999),
    "list of children": lambda d: d["nodes"][0].update(children=[1]),
    "variable that is missing": lambda d: d["nodes"][1].update(variable="nope"),
    "variable of a list": lambda d: d["nodes"][1].update(variable=["nope"]),
    "state": lambda d: d["nodes"][1].update(state={"bytes": 5}),
    "arrays": lambda d: d.update(arrays=[1]),
    "array": lambda d: d["arrays"].update({f"a/{VALUE}": 7}),
    "shape": lambda d: array_of(d).update(shape=[-4]),
    "large shape": lambda d: array_of(d).update(shape=[2**62, 2**62]),
    "shape of text": lambda d: array_of(d).update(shape="4"),
    "dtype": lambda d: array_of(d).update(dtype="nonsense"),
    "objects": lambda d: array_of(d).update(dtype="|O"),
    "structures": lambda d: array_of(d).update(dtype="i4,i4"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_graph_with_right_checksums_is_corrupt(path, wrong):
    change(path, wrong)
    for read in (restore, load_checkpoint):
        with pytest.raises(DataLossError, match=r"ckpt is corrupt: .*Restore another one"):
            read(path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000], ids=len)
def test_a_graph_that_is_no_json_is_corrupt(path, text):
    change(path, None, lambda members: members.update({"checkpoint.json": text}))
    with pytest.raises(DataLossError, match="ckpt is corrupt: "):
        load_checkpoint(path)


def test_a_graph_in_a_circle_ends(path):
    change(path, lambda d: d["nodes"][0]["children"].update(a=0))
    with pytest.raises(AssertionError, match="no value for 1 objects"):
        restore(path)


def test_a_node_that_nothing_leads_to_has_its_number_in_messages(path):
    change(path, lambda d: d["nodes"][0].update(children={}))
    status = Checkpoint(b=unison.Variable(1.0)).read(path)
    with pytest.raises(AssertionError):
        status.assert_consumed()
    assert status.restoration.report.names_of_unused() == "(node 1)"


class Keeps:
    """Has a state of its own."""

    def __init__(self):
        self.state = (1, "two")

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {"named": ["x; import os", ["a"], [1]]},
        {"named": ["X", ["a b"], [1]]},
        {"named": ["X", ["a"], [1, 2]]},
        {"named": 3},
        {"bytes": 5},
        {"bytes": "no base64"},
        {"leaf": [1]},
        {"leaf": {}},
        {"dict": [1]},
        {"list": 7},
        {"set": [1]},
        {},
        {"list": [], "tuple": []},
    ],
    ids=lambda state: str(state)[:40],
)
def test_a_state_that_nobody_has_encoded_is_corrupt(tmp_path, state):
    path = Checkpoint(kept=Keeps()).write(tmp_path / "ckpt")
    change(path, lambda d: d["nodes"][1].update(state={"value": state}))
    kept = Keeps()
    with pytest.raises(OpError, match=r"ckpt is corrupt|has no array"):
        Checkpoint(kept=kept).read(path)
    assert kept.state == (1, "two")


# -- the archive ---------------------------------------------------------------------------------


def write_deflated(path, name, mebibytes):
    member = zipfile.ZipInfo(name)
    member.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(f"{path}.index", "a") as archive, archive.open(member, "w") as file:
        for _ in range(mebibytes):
            file.write(b" " * (1 << 20))


def test_a_compressed_member_is_not_inflated(path):
    os.remove(f"{path}.index")
    write_deflated(path, "checkpoint.json", 200)
    with peak_memory() as peak, pytest.raises(DataLossError, match="is compressed"):
        load_checkpoint(path)
    assert peak.bytes < 50e6


@pytest.mark.parametrize("shape", [(1 << 31,), (1 << 40, 1 << 40), (-1,)])
def test_an_array_takes_no_more_memory_than_the_file_has(path, shape):
    header = io.BytesIO()
    about = {"descr": "<i4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    change(path, None, lambda m: m.update({f"a/{VALUE}.npy": header.getvalue() + bytes(16)}))
    with peak_memory() as peak, pytest.raises(DataLossError, match="is corrupt"):
        restore(path)
    assert peak.bytes < 50e6


@pytest.mark.parametrize(
    "content",
    [b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00" + bytes(80), b"\x93NUMPY\x01\x00\xff\xff{"],
)
def test_what_is_no_array_is_corrupt(path, content):
    change(path, None, lambda m: m.update({f"a/{VALUE}.npy": content}))
    with pytest.raises(DataLossError, match="is corrupt"):
        restore(path)


def test_members_that_overlap_are_corrupt(tmp_path):
    path = Checkpoint(a=unison.Variable(np.zeros(250_000, np.int32))).write(tmp_path / "ckpt")
    whole = Path(f"{path}.index").read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    (start,) = struct.unpack_from("<I", whole, end + 16)
    directory, copies = whole[start:end], 1000  # a gigabyte to read, of a megabyte
    counts = struct.pack("<HHI", 2 * copies, 2 * copies, len(directory) * copies)
    changed = whole[:start] + directory * copies + whole[end : end + 8] + counts + whole[end + 16 :]
    Path(f"{path}.index").write_bytes(changed)
    with pytest.raises(DataLossError, match="more bytes together than the file"):
        load_checkpoint(path)


# -- which one is the latest ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../elsewhere/ckpt-1", "{elsewhere}/ckpt-1", "a/../../x"])
def test_a_checkpoint_outside_of_the_folder_is_not_taken(tmp_path, name, caplog):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    Checkpoint(a=unison.Variable(1.0)).write(tmp_path / "elsewhere" / "ckpt-1")
    given = name.format(elsewhere=tmp_path / "elsewhere")
    (tmp_path / "here" / "checkpoint").write_text(f"model_checkpoint_path: {json.dumps(given)}\n")
    assert latest_checkpoint(tmp_path / "here") is None
    assert "not in its folder" in caplog.text


def test_an_absolute_path_in_the_folder_is_taken(tmp_path):
    path = Checkpoint(a=unison.Variable(1.0)).write(tmp_path / "ckpt-1")
    (tmp_path / "checkpoint").write_text(f"model_checkpoint_path: {json.dumps(path)}\n")
    assert latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("name", ["../elsewhere/ckpt-1", "{elsewhere}/ckpt-1", "link/ckpt-1"])
def test_a_manager_deletes_nothing_outside_of_its_folder(tmp_path, name):
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    (here / "link").symlink_to(elsewhere)
    checkpoint = Checkpoint(a=unison.Variable(1.0))
    checkpoint.write(elsewhere / "ckpt-1")
    CheckpointManager(checkpoint, here, max_to_keep=1).save()
    state = here / "checkpoint"
    told = json.dumps(name.format(elsewhere=elsewhere))
    state.write_text(f"all_model_checkpoint_paths: {told}\n" + state.read_text())
    manager = CheckpointManager(checkpoint, here, max_to_keep=1)
    for _ in range(3):
        manager.save()
    assert os.listdir(elsewhere) == ["ckpt-1.index"]


@pytest.mark.parametrize(
    "line",
    [
        "model_checkpoint_path: 7",
        'model_checkpoint_path: "\\ud800"',
        'model_checkpoint_path: "a\\u0000b"',
        'last_preserved_timestamp: "x"',
        "last_preserved_timestamp: 1e999",
        "all_model_checkpoint_timestamps: " + "9" * 5000,
        b"\xff\xfe",
    ],
    ids=lambda line: str(line)[:44],
)
def test_a_list_of_checkpoints_of_wrong_values_is_ignored(tmp_path, line):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "\\ud800"\n' + line)
    assert latest_checkpoint(tmp_path) is None


# -- TensorFlow's --------------------------------------------------------------------------------

NUMBERS = np.arange(4, dtype=np.float32).tobytes()


def bundle(folder, header=((1, 1),), nodes=None, **arguments):
    tensors = {f"a/{VALUE}": (NUMBERS, {"shape": [4], **arguments})}
    return bundles.write_bundle(folder, tensors, header, nodes)


def read_all(path):
    reader = load_checkpoint(path)
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


def test_the_writer_of_these_tests_writes_what_is_read(tmp_path):
    nodes = [
        [(1, [(1, 1), (2, b"a")])],
        [(2, [(1, b"VARIABLE_VALUE"), (3, f"a/{VALUE}".encode())])],
    ]
    path = bundle(tmp_path, nodes=nodes)
    assert read_all(path)[f"a/{VALUE}"].tolist() == [0, 1, 2, 3]
    variable = unison.Variable(np.zeros(4, np.float32))
    Checkpoint(a=variable).read(path).assert_consumed()
    assert variable.numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": [5]},
        {"shape": [2**62, 2**62]},
        {"shape": [-1]},
        {"size": 2**62},
        {"size": 15},
        {"offset": 2**62},
        {"offset": 2**64 - 1},
        {"shard": 7},
        {"shard": 2**40},
        {"dtype": 99},
        {"dtype": 7},
        {"dtype": 7, "shape": [2**40]},
        {"checksum": 1},
    ],
    ids=str,
)
def test_a_tensor_that_is_not_there_is_corrupt(tmp_path, arguments):
    with peak_memory() as peak, pytest.raises(OpError, match=r"is corrupt|No such file"):
        read_all(bundle(tmp_path, **arguments))
    assert peak.bytes < 50e6


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [[(1, [(1, 99), (2, b"a")])]],
        [[(1, [(1, 1)])]],
        [[(1, 7)]],
        [[(2, [(1, b"VARIABLE_VALUE"), (3, b"nope")])]],
        [[(1, [(1, 99), (2, b"_variables")])]],
        [[(1, [(1, 1), (2, b"\xff")])]],
    ],
    ids=str,
)
def test_a_wrong_graph_of_tensorflow_is_corrupt(tmp_path, nodes):
    with pytest.raises(DataLossError, match="of TensorFlow is corrupt"):
        read_all(bundle(tmp_path, nodes=nodes))


def test_a_checkpoint_of_another_order_of_bytes_is_not_read(tmp_path):
    with pytest.raises(UnimplementedError, match="big-endian"):
        read_all(bundle(tmp_path, header=[(1, 1), (2, 1)]))


def write_table(folder, fill):
    table = bundles.Table()
    about = table.block(bundles.block_of([]))
    (folder / "ckpt.index").write_bytes(table.ended(about, fill(table)))
    return str(folder / "ckpt")


LONG_KEY = b"k" * 300_000


def keys_that_grow_by_nothing(table):
    entries = [bundles.entry(LONG_KEY, b"")] + [bundles.entry(b"", b"", 300_000)] * 90_000
    return table.block(bundles.block_of(entries))


def keys_that_share_much(table):
    entries = [bundles.entry(LONG_KEY, b"")]
    entries += [
        bundles.entry(b"%c" % (number % 140 + 108), b"", 300_000 + number // 140)
        for number in range(9999)
    ]
    handle = table.block(bundles.block_of(entries))
    return table.block(bundles.block_of([bundles.entry(b"\xff", handle)]))


def the_same_block_again_and_again(table):
    handle = table.block(bundles.block_of([bundles.entry(LONG_KEY, b"")]))
    entries = [bundles.entry(b"%09d" % number, handle) for number in range(20_000)]
    return table.block(bundles.block_of(entries))


HOSTILE = {
    "a number of a megabyte": lambda t: t.block(b"\xff" * 1_000_000 + b"\x01" + bytes(12)),
    "keys that grow by nothing": keys_that_grow_by_nothing,
    "keys that share much": keys_that_share_much,
    "the same block again and again": the_same_block_again_and_again,
    "a list of keys that is longer than the block": lambda t: t.block(b"\xff\xff\xff\xff"),
    "Snappy's gigabytes": lambda t: t.block(bundles.varint(2**40) + b"\x00a" * 9, kind=1),
    "Snappy's copies": lambda t: t.block(
        bundles.varint(2**22) + b"\x00a" + b"\xfe\x01\x00" * 2**16 + b"\xfe\x01", kind=1
    ),
}


@pytest.mark.parametrize("fill", HOSTILE.values(), ids=HOSTILE)
def test_a_table_that_costs_more_than_it_has_ends_soon(tmp_path, fill):
    path = write_table(tmp_path, fill)
    begin = time.process_time()
    with peak_memory() as peak, pytest.raises(DataLossError, match="is corrupt"):
        load_checkpoint(path)
    assert peak.bytes < 100e6
    assert time.process_time() - begin < 5.0
