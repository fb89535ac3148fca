"""Tables, messages, arrays and images: CSV, Parquet, `tf.train.Example`, `.npz`, PNG, ..."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

import unison.tf as tf
from fuzzed.changes import archive_array, archive_member, comparable
from fuzzed.format import Format, is_anything
from fuzzed.mutations import LENGTHS, changed_bytes, changed_value
from unison.cli.demo_data import load_images
from unison.cli.errors import CommandError
from unison.data import Dataset
from unison.data.examples import (
    ExampleParser,
    FixedLenFeature,
    FixedLenSequenceFeature,
    VarLenFeature,
    columns,
    message,
    parse_sequence_example,
)
from unison.errors import OpError

CHANCE = np.random.RandomState(2)

# -- CSV -----------------------------------------------------------------------------------------

TABLE = b"n,x,t\n" + b"".join(b'%d,%f,"text ""%d"""\n' % (n, n / 7, n) for n in range(60))


def write_csv(folder):
    (folder / "table.csv").write_bytes(TABLE)
    (folder / "table.csv.gz").write_bytes(gzip.compress(TABLE, mtime=0))


def read_csv(folder):
    kinds = [tf.int32, tf.float32, tf.string]
    plain = tf.data.experimental.CsvDataset(str(folder / "table.csv"), kinds, header=True)
    packed = tf.data.experimental.CsvDataset(
        str(folder / "table.csv.gz"), kinds, "GZIP", header=True
    )
    return comparable([list(plain.as_numpy_iterator()), list(packed.as_numpy_iterator())])


# -- Parquet -------------------------------------------------------------------------------------


def writes_parquet(**options):
    def write(folder):
        table = pa.table(
            {
                "real": np.random.RandomState(1).randn(300).astype(np.float32),
                "whole": np.random.RandomState(2).randint(0, 9, 300),
                "text": [f"t{number * 7 % 50}" for number in range(300)],
                "list": [list(range(number % 4)) for number in range(300)],
            }
        )
        pa.parquet.write_table(table, folder / "a.parquet", row_group_size=128, **options)

    return write


def read_parquet(folder):
    dataset = Dataset.from_parquet(str(folder / "a.parquet"))
    return comparable(list(dataset.take(1000).as_numpy_iterator()))


# -- messages ------------------------------------------------------------------------------------

FEATURES = {
    "label": FixedLenFeature([], np.int64),
    "image": FixedLenFeature([4], np.float32),
    "words": VarLenFeature(bytes),
    "rows": FixedLenSequenceFeature([2], np.int64, allow_missing=True),
}


def example(number):
    made = message("Example")()
    feature = made.features.feature
    feature["label"].int64_list.value.append(number - 3)
    feature["image"].float_list.value.extend([0.5, 1.5, -2.0, number])
    feature["words"].bytes_list.value.extend([b"ab", b"c" * number])
    feature["rows"].int64_list.value.extend(range(2 * (number % 3)))
    return made.SerializeToString(deterministic=True)


def write_examples(folder):
    for number in range(9):
        (folder / f"{number}").write_bytes(example(number))


def read_examples(folder):
    """All as a batch, which is read side by side, and by protobuf: they must agree."""
    texts = [path.read_bytes() for path in sorted(folder.iterdir())]
    parse = ExampleParser(FEATURES)
    side_by_side = columns._SIDE_BY_SIDE
    found = comparable(parse(np.array(texts, object)))
    columns._SIDE_BY_SIDE = 10**9
    try:
        assert comparable(parse(np.array(texts, object))) == found, "protobuf reads it otherwise"
    finally:
        columns._SIDE_BY_SIDE = side_by_side
    return found


PARTITIONS = {
    "splits": tf.io.RaggedFeature.RowSplits("splits"),
    "lengths": tf.io.RaggedFeature.RowLengths("lengths"),
    "starts": tf.io.RaggedFeature.RowStarts("starts"),
    "limits": tf.io.RaggedFeature.RowLimits("limits"),
    "ids": tf.io.RaggedFeature.ValueRowIds("ids"),
    "uniform": tf.io.RaggedFeature.UniformRowLength(3),
}


def ragged_example(**numbers):
    """An Example of six values in rows, and its partitions of every kind."""
    good = {
        "splits": [0, 2, 2, 6], "lengths": [2, 0, 4], "starts": [0, 2, 2], "limits": [2, 2, 6],
        "ids": [0, 0, 2, 2, 2, 2],
    }  # fmt: skip
    made = message("Example")()
    for key, values in {"values": range(6), **good, **numbers}.items():
        made.features.feature[key].int64_list.value.extend(values)
    return made.SerializeToString(deterministic=True)


def write_ragged(folder):
    for number in range(3):
        (folder / f"{number}").write_bytes(ragged_example())


def read_ragged(folder):
    """By each partition on its own, and by rows of rows."""
    texts = tf.constant([path.read_bytes() for path in sorted(folder.iterdir())])
    ways = {key: [partition] for key, partition in PARTITIONS.items()}
    ways["rows of rows"] = [tf.io.RaggedFeature.UniformRowLength(1), PARTITIONS["ids"]]
    found = {}
    errors = []
    for way, partitions in ways.items():
        feature = tf.io.RaggedFeature(tf.int64, value_key="values", partitions=partitions)
        try:
            rows = tf.io.parse_example(texts, {"rows": feature})["rows"]
        except OpError as error:
            errors.append(error)
        else:
            found[way] = comparable([np.asarray(rows.flat_values), *rows.nested_row_splits])
    if errors:
        raise errors[0]
    return found


def ragged_numbers(folder, chance):
    """Changes the numbers of one of the partitions of an Example."""
    large = [2**20, 2**21, 2**24, 2**27, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
    if chance.random() < 0.5:  # rows, of which most may be empty
        key, choices = "ids", [*range(7), *large[: chance.choice([0, 0, 1, 2, 9])]]
        numbers = sorted(chance.choices(choices, k=6))
    else:
        key = chance.choice([key for key in PARTITIONS if key != "uniform"])
        numbers = chance.choices([*range(7), *large, -1, -(2**63)], k=chance.randint(0, 7))
    (folder / str(chance.randrange(3))).write_bytes(ragged_example(**{key: numbers}))
    return f"{key} {numbers}"


def write_sequence(folder):
    made = message("SequenceExample")()
    made.context.feature["label"].int64_list.value.append(7)
    for step in range(4):
        lists = made.feature_lists.feature_list
        lists["dense"].feature.add().float_list.value.extend([step, 1.0])
        lists["ragged"].feature.add().bytes_list.value.extend([b"x"] * step)
    (folder / "sequence").write_bytes(made.SerializeToString(deterministic=True))


def read_sequence(folder):
    text = (folder / "sequence").read_bytes()
    context = {"label": FixedLenFeature([], np.int64)}
    lists = {
        "dense": FixedLenSequenceFeature([2], np.float32),
        "ragged": VarLenFeature(bytes),
    }
    return comparable(parse_sequence_example(text, context, lists))


def write_tensor(folder):
    tensor = tf.io.serialize_tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).numpy()
    (folder / "tensor").write_bytes(tensor)
    (folder / "texts").write_bytes(tf.io.serialize_tensor(["a", "bc"]).numpy())


def read_tensor(folder):
    found = tf.io.parse_tensor((folder / "tensor").read_bytes(), tf.float32)
    texts = tf.io.parse_tensor((folder / "texts").read_bytes(), tf.string)
    return comparable([np.asarray(found), np.asarray(texts)])


def tensor_shape(folder, chance):
    made = message("TensorProto")(dtype=chance.choice([1, 3, 7, 8, 9, 14, 19, 99]))
    for _ in range(chance.randint(0, 4)):
        size = chance.choice([*LENGTHS, -1, 2, 3])
        made.tensor_shape.dim.add(size=size - 2**64 if size >= 2**63 else size)
    made.float_val.extend([1.0] * chance.choice([0, 1, 6, 7]))
    made.tensor_content = bytes(chance.choice([0, 3, 24]))
    (folder / "tensor").write_bytes(made.SerializeToString())
    return str(made)[:80].replace("\n", " ")


def write_json(folder):
    made = message("Example").FromString(example(5))
    from google.protobuf import json_format

    (folder / "example.json").write_text(json_format.MessageToJson(made))


def read_json(folder):
    text = (folder / "example.json").read_bytes()
    return comparable(tf.io.decode_json_example(text).numpy())


def json_values(folder, chance):
    import json

    path = folder / "example.json"
    value, how = changed_value(json.loads(path.read_text()), chance, "/outside")
    path.write_text(json.dumps(value))
    return how


# -- arrays and images ---------------------------------------------------------------------------


def write_npz(folder):
    pixels = CHANCE.randint(0, 256, (20, 28, 28)).astype(np.uint8)
    labels = np.arange(20) % 10
    np.savez_compressed(
        folder / "images.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels
    )


def read_npz(folder):
    images = load_images(str(folder / "images.npz"))
    return comparable([images.x_train, images.y_train, images.x_test, images.y_test])


def write_images(folder):
    pixels = CHANCE.randint(0, 256, (20, 30, 3)).astype(np.uint8)
    for kind in ("png", "jpeg", "bmp", "webp"):
        Image.fromarray(pixels).save(folder / f"image.{kind}")
    frames = [Image.fromarray(pixels // (n + 1)) for n in range(3)]
    frames[0].save(folder / "image.gif", save_all=True, append_images=frames[1:])


def read_images(folder):
    found = [tf.io.decode_image(path.read_bytes()) for path in sorted(folder.iterdir())]
    return comparable([np.asarray(image) for image in found])


def write_packed(folder):
    (folder / "packed").write_bytes(gzip.compress(TABLE * 3, mtime=0))


def read_packed(folder):
    content = (folder / "packed").read_bytes()
    return [tf.io.decode_compressed(content, "GZIP").numpy(), io.BytesIO(content).getvalue()[:0]]


def packed_twice(folder, chance):
    content, how = changed_bytes(gzip.decompress((folder / "packed").read_bytes()), chance)
    (folder / "packed").write_bytes(gzip.compress(content) * chance.choice([1, 2]))
    return how


FORMATS = {
    "csv": Format(write_csv, read_csv, is_right=is_anything),
    "parquet": Format(writes_parquet(write_page_checksum=True), read_parquet),
    "parquet-plain": Format(
        writes_parquet(compression="none", use_dictionary=False),
        read_parquet,
        is_right=is_anything,
    ),
    "parquet-unchecked": Format(writes_parquet(), read_parquet, is_right=is_anything),
    "example": Format(write_examples, read_examples, is_right=is_anything),
    "example-ragged": Format(write_ragged, read_ragged, [ragged_numbers], is_right=is_anything),
    "sequence-example": Format(write_sequence, read_sequence, is_right=is_anything),
    "tensor": Format(write_tensor, read_tensor, [tensor_shape], is_right=is_anything),
    "example-json": Format(write_json, read_json, [json_values], is_right=is_anything),
    "npz": Format(
        write_npz,
        read_npz,
        [archive_member("images.npz"), archive_array("images.npz")],
        (CommandError,),
    ),
    "images": Format(write_images, read_images, is_right=is_anything),
    "packed": Format(write_packed, read_packed, [packed_twice], is_right=is_anything),
}
