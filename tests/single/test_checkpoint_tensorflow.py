"""Checkpoints that TensorFlow 2.21 has written, of a module and of two Keras models.

They are recorded in `tests/tensorflow_checkpoints.json`.
"""

import base64
import json
from pathlib import Path

import keras
import numpy as np
import pytest

import unison
from unison.errors import DataLossError
from unison.train import Checkpoint, latest_checkpoint, load_checkpoint
from unison.train.sorted_table import uncompressed

RECORDED = json.loads(Path(__file__).parents[1].joinpath("tensorflow_checkpoints.json").read_text())
VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def recorded(tmp_path):
    def folder_of(name):
        for file, content in RECORDED[name].items():
            (tmp_path / file).write_bytes(base64.b64decode(content))
        return tmp_path

    return folder_of


def test_arrays_of_every_kind_are_read(recorded):
    path = latest_checkpoint(recorded("module"))
    reader = load_checkpoint(path)
    found = {
        key.removeprefix("model/").removesuffix(f"/{VALUE}"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
    }
    assert {name: (str(array.dtype), array.tolist()) for name, array in found.items()} == {
        "half": ("bfloat16", [1.5, 2.5]),
        "parts/0": ("float32", 1.5),
        "parts/1": ("bool", [True, False]),
        "save_counter": ("int64", 1),
        "steps": ("int64", 5),
        "text": ("object", [b"a", b"bc"]),
        "w": ("float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    }


def test_module_is_restored_by_its_names(recorded, two_replicas):
    with two_replicas.scope():
        module = unison.Module()
        module.w = unison.Variable(np.zeros((2, 3), np.float32))
        module.steps = unison.Variable(np.int32(0))
        module.parts = [unison.Variable(np.float32(0.0))]
    path = latest_checkpoint(recorded("module"))
    Checkpoint(model=module).restore(path).expect_partial().assert_existing_objects_matched()
    assert (int(module.steps), float(module.parts[0])) == (5, 1.5)
    np.testing.assert_equal(module.w.numpy(), np.arange(6.0).reshape(2, 3))


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3)
        self.second = keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))


def sequential():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("name", "build", "prediction"),
    [("subclass", Subclass, -0.3234793543815613), ("sequential", sequential, 0.6539821624755859)],
)
def test_keras_model_predicts_and_goes_on_as_under_tensorflow(
    recorded, two_replicas, name, build, prediction
):
    with two_replicas.scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.1), "mse")
        epoch = unison.Variable(np.int32(0))
    model(np.ones((2, 4), np.float32))
    model.optimizer.build(model.trainable_variables)
    status = Checkpoint(model=model, epoch=epoch).restore(latest_checkpoint(recorded(name)))
    status.assert_consumed()
    np.testing.assert_allclose(
        model.predict(np.ones((2, 4), np.float32), verbose=0), [[prediction]] * 2, rtol=1e-5
    )
    assert (int(epoch), int(model.optimizer.iterations.numpy())) == (3, 1)
    assert any(np.any(v.numpy()) for v in model.optimizer.variables[2:])


@pytest.mark.parametrize("file", ["ckpt-1.index", "ckpt-1.data-00000-of-00001"])
def test_any_flipped_bit_is_noticed(recorded, file):
    folder = recorded("module")
    whole = (folder / file).read_bytes()
    wrong = []
    padding = 48 if file.endswith("index") else 0  # of the footer, most of which means nothing
    for place in range(len(whole) - padding):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (folder / file).write_bytes(damaged)
        try:
            reader = load_checkpoint(folder / "ckpt-1")
            for key in reader.get_variable_to_shape_map():
                reader.get_tensor(key)
        except DataLossError:
            continue
        wrong.append(place)
    assert wrong == []


def test_missing_part_is_a_data_loss(recorded):
    folder = recorded("module")
    (folder / "ckpt-1.data-00000-of-00001").unlink()
    assert latest_checkpoint(folder) is None


def test_compressed_blocks_are_read():
    # Snappy's "abab...": two bytes as they are, and a copy that overlaps with what it makes.
    assert uncompressed(bytes([10, 0x04, *b"ab", 0b000_100_01, 2])) == b"ababababab"
    with pytest.raises(ValueError, match="not there"):
        uncompressed(bytes([10, 0x04, *b"ab", 0b000_100_01, 9]))
