"""Saved models, and the vocabularies of Keras' layers."""

from __future__ import annotations

import json
import zlib

import numpy as np

import unison.tf as tf
from fuzzed.changes import archive_structures, comparable, outside_of
from fuzzed.format import Format, is_anything
from fuzzed.mutations import changed_bytes, changed_value
from unison.keras.lookup import IntegerLookup, StringLookup


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(np.arange(3, dtype=np.float32))
        self.parts = [tf.Variable(1.0), {"a": tf.Variable(2.0)}, (tf.Variable(3.0),)]

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    def __call__(self, x):
        return x * self.factor


def write_model(folder):
    tf.saved_model.save(Scale(), folder / "model")


def read_model(folder):
    loaded = tf.saved_model.load(folder / "model")
    result = loaded(np.ones((2, 3), np.float32)) if callable(loaded) else None
    return comparable(np.asarray(result))


def write_changed_model(folder, model):
    path = folder / "model" / "saved_model.json"
    described = json.loads(path.read_text())
    checksum = zlib.crc32(json.dumps(model, sort_keys=True).encode())
    path.write_text(json.dumps(described | {"model": model, "crc32": checksum}))


def model_index(folder, chance):
    described = json.loads((folder / "model" / "saved_model.json").read_text())
    model, how = changed_value(described["model"], chance, outside_of(folder))
    write_changed_model(folder, model)
    return how


def model_program(folder, chance):
    """Changes the bytes of a program, and gives it the right checksum."""
    model = json.loads((folder / "model" / "saved_model.json").read_text())["model"]
    program = chance.choice(model["programs"])
    described = program[chance.choice(["data", "data_for_none"])] or program["data"]
    path = folder / "model" / "functions" / f"{described['name']}.jaxexport"
    content, how = changed_bytes(path.read_bytes(), chance)
    path.write_bytes(content)
    described["crc32"] = zlib.crc32(content)
    write_changed_model(folder, model)
    return how


def write_vocabulary(folder):
    layer = StringLookup()
    layer.adapt(["a b", "é", "a", "c c"])
    layer.save_assets(str(folder))


def reads_vocabulary(make):
    def read(folder):
        layer = make()
        layer.load_assets(str(folder))
        return layer.get_vocabulary(), np.asarray(layer(layer.get_vocabulary()[1:])).tolist()

    return read


def write_numbers(folder):
    layer = IntegerLookup()
    layer.adapt([5, 7, 5, 12])
    layer.save_assets(str(folder))


#: In a model that was loaded: calling it as a user does may end as calls of wrong arguments do.
_CALLS = (TypeError, ValueError)

FORMATS = {
    "saved-model": Format(
        write_model,
        read_model,
        [model_index, model_index, *archive_structures("model/variables/variables.index")],
        _CALLS,
    ),
    "saved-model-program": Format(
        write_model, read_model, [model_program], _CALLS, changes_bytes=False
    ),
    "vocabulary": Format(
        write_vocabulary, reads_vocabulary(StringLookup), (), (ValueError,), is_anything
    ),
    "vocabulary-integers": Format(
        write_numbers, reads_vocabulary(IntegerLookup), (), (ValueError,), is_anything
    ),
}
