"""Checkpoints, ours and TensorFlow's, and the file that says which one is the latest."""

from __future__ import annotations

import functools
import json
import os
import struct

import numpy as np

import tensorflow_bundle as bundles
import unison
from fuzzed.changes import archive_structures, comparable, json_of, link_in, outside_of
from fuzzed.format import Format, is_anything
from fuzzed.mutations import LENGTHS, changed_bytes, changed_value, hostile
from unison import train


class Keeps:
    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


STATE = {"a": (1, "two", [b"three", 4.0]), "b": np.arange(3), "c": None}


def checkpoint_of(fill):
    variables = {
        "a": unison.Variable(np.full((37, 5), fill, np.float32)),
        "b": unison.Variable(np.full(7, int(fill), np.int32)),
    }
    kept = Keeps(STATE if fill else None)
    parts = [unison.Variable(np.float32(fill)), {"c": unison.Variable(np.float32(fill))}]
    return train.Checkpoint(kept=kept, parts=parts, **variables), kept, variables, parts


def write_checkpoint(folder):
    checkpoint_of(3.5)[0].write(folder / "ckpt")


def read_checkpoint(folder):
    checkpoint, kept, variables, parts = checkpoint_of(0.0)
    checkpoint.read(folder / "ckpt").expect_partial()
    reader = train.load_checkpoint(folder / "ckpt")
    for key in reader.get_variable_to_shape_map():
        reader.get_tensor(key)
    values = [variable.numpy() for variable in (*variables.values(), parts[0], parts[1]["c"])]
    return comparable([values, kept.state])


def write_manager(folder):
    manager = train.CheckpointManager(train.Checkpoint(v=unison.Variable(1.0)), folder, 2)
    for _ in range(3):
        manager.save()


def read_manager(folder):
    latest = train.latest_checkpoint(folder)
    manager = train.CheckpointManager(train.Checkpoint(v=unison.Variable(0.0)), folder, 1)
    manager.save()
    manager.save()
    return None if latest is None else os.path.basename(latest)


def names_in_list(folder, chance):
    path = folder / "checkpoint"
    lines = path.read_text().splitlines()
    place = chance.randrange(len(lines))
    value = hostile(chance, outside_of(folder))
    lines[place] = f"{lines[place].partition(':')[0]}: {json.dumps(value)}"
    path.write_text("\n".join(lines))
    return lines[place][:80]


def link_in_list(folder, chance):
    """A checkpoint in the list that is behind a link to the outside."""
    # Not ckpt-1 and ckpt-2, which the reader replaces.
    name = chance.choice(
        ["ckpt-3", "ckpt-9", "sub/ckpt-9", "sub/shard-00000", "sub/secret", "sub/../ckpt-9", "sub"]
    )
    link = folder / (name.partition("/")[0] + ("" if name.startswith("sub") else ".index"))
    link.unlink(missing_ok=True)
    link.symlink_to(chance.choice([outside_of(folder), f"{outside_of(folder)}/secret"]))
    path = folder / "checkpoint"
    path.write_text(f"model_checkpoint_path: {json.dumps(name)}\n{path.read_text()}")
    return name


VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def write_bundle(folder):
    variable = [(1, b"VARIABLE_VALUE"), (3, f"a{VALUE}".encode())]
    nodes = [[(1, [(1, 1), (2, b"a")])], [(2, variable)]]
    tensors = {
        f"a{VALUE}": (np.arange(6, dtype=np.float32).tobytes(), {"shape": [2, 3]}),
        f"b{VALUE}": (np.arange(4, dtype=np.int64).tobytes(), {"dtype": 9, "shape": [4]}),
    }
    bundles.write_bundle(folder, tensors, nodes=nodes)


def read_bundle(folder):
    reader = train.load_checkpoint(folder / "ckpt")
    found = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
    variable = unison.Variable(np.zeros((2, 3), np.float32))
    train.Checkpoint(a=variable).read(folder / "ckpt").expect_partial()
    return comparable([found, variable.numpy()])


def bundle_tensor(folder, chance):
    what = chance.choice(["dtype", "shape", "shard", "offset", "size", "checksum"])
    number = chance.choice([*LENGTHS, 2, 7, 14, 29])
    value = [number] * chance.randint(0, 4) if what == "shape" else number
    value = value % 2**32 if what == "checksum" else value
    content = np.arange(6, dtype=np.float32).tobytes()
    bundles.write_bundle(folder, {f"a{VALUE}": (content, {"shape": [2, 3], what: value})})
    return f"{what}={value}"


def bundle_graph(folder, chance):
    number = chance.choice([*LENGTHS, 1])
    text = chance.choice([b"a", b"\xff", b"_variables", b"", f"a{VALUE}".encode(), b"../x"])
    node = chance.choice(
        [
            [(1, [(1, number), (2, text)])],
            [(2, [(1, b"VARIABLE_VALUE"), (3, text)])],
            [(1, number), (2, text)],
            [(chance.randint(1, 20), [(1, text)])],
        ]
    )
    nodes = [node] * chance.choice([0, 1, 3])
    tensors = {f"a{VALUE}": (np.arange(6, dtype=np.float32).tobytes(), {"shape": [2, 3]})}
    bundles.write_bundle(folder, tensors, nodes=nodes)
    return str(nodes)[:80]


def bundle_table(folder, chance):
    table = bundles.Table()
    about = table.block(bundles.block_of([]))
    content, how = changed_bytes(
        bundles.block_of([bundles.entry(b"", bundles.message([(1, 1)]))]), chance
    )
    handle = table.block(content, kind=chance.choice([0, 0, 1, 7]))
    index = table.block(bundles.block_of([bundles.entry(b"\xff", handle)]))
    (folder / "ckpt.index").write_bytes(table.ended(about, index))
    return how


# -- safetensors ---------------------------------------------------------------------------


def write_safetensors(folder):
    variables = {"a": unison.Variable(np.arange(6.0, dtype=np.float32).reshape(2, 3))}
    train.save_safetensors(variables | {"b": unison.Variable(1)}, folder / "m.safetensors", ABOUT)


ABOUT = {"format": "pt"}


def read_safetensors(folder, name="m.safetensors"):
    reader = train.load_checkpoint(folder / name)
    found = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
    variable = unison.Variable(np.zeros((2, 3), np.float32))
    train.Checkpoint(a=variable).read(folder / name).expect_partial()
    return comparable([found, variable.numpy()])


def safetensors_header(folder, chance):
    path = folder / "m.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, how = changed_value(json.loads(content[8 : 8 + length]), chance, outside_of(folder))
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return how


LIST = "m.safetensors.index.json"


def write_several_safetensors(folder):
    write_safetensors(folder)
    files = {"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}
    (folder / LIST).write_text(json.dumps(files))


def read_several_safetensors(folder):
    return read_safetensors(folder, LIST)


# -- in parts, as Orbax's ------------------------------------------------------------------


def write_parts(folder, scheme=""):
    variable = unison.Variable(np.arange(600.0, dtype=np.float32).reshape(20, 30))
    checkpoint = train.Checkpoint(format="orbax", a=variable, kept=Keeps(STATE))
    checkpoint.write(f"{scheme}{folder}/ckpt")


def read_parts(folder, scheme=""):
    variable, kept = unison.Variable(np.zeros((20, 30), np.float32)), Keeps(None)
    path = f"{scheme}{folder}/ckpt"
    train.Checkpoint(a=variable, kept=kept).read(path).expect_partial()
    reader = train.load_checkpoint(path)
    for key in reader.get_variable_to_shape_map():
        reader.get_tensor(key)
    return comparable([variable.numpy(), kept.state])


def parts_json(folder, chance):
    """Changes what a file of JSON in the folder says: Orbax's metadata, OCDBT's, our index."""
    texts = []
    for path in sorted(folder.rglob("*")):
        try:
            texts.append((path, json.loads(path.read_bytes())))
        except (OSError, ValueError):
            continue
    path, value = chance.choice(texts)
    changed, how = changed_value(value, chance, outside_of(folder))
    path.write_text(json.dumps(changed))
    return f"{path.name} {how}"


FORMATS = {
    "safetensors": Format(  # no checksums
        write_safetensors, read_safetensors, [safetensors_header], (ValueError,), is_anything
    ),
    "safetensors-list": Format(
        write_several_safetensors,
        read_several_safetensors,
        [json_of(LIST)],
        (ValueError,),
        is_anything,
    ),
    "checkpoint-parts": Format(
        write_parts, read_parts, [parts_json, link_in("ckpt")], (ValueError,)
    ),
    "checkpoint-parts-remote": Format(
        functools.partial(write_parts, scheme="file://"),
        functools.partial(read_parts, scheme="file://"),
        archive_structures("ckpt/unison.index"),
        (ValueError,),
    ),
    "checkpoint": Format(  # ValueError: a variable has another shape
        write_checkpoint, read_checkpoint, archive_structures("ckpt.index"), (ValueError,)
    ),
    "checkpoint-list": Format(
        write_manager,
        read_manager,
        [names_in_list, link_in_list],
        (ValueError,),
        is_anything,
    ),
    "checkpoint-tensorflow": Format(
        write_bundle, read_bundle, [bundle_tensor, bundle_graph, bundle_table]
    ),
}
