"""Checkpoints that TensorFlow 2.21 has written, of a module and of two Keras models.

They are recorded in `tests/tensorflow_checkpoints.json`.
"""

import base64
import json
import os
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest

import unison
from unison.errors import DataLossError, InvalidArgumentError
from unison.train import (
    Checkpoint,
    CheckpointManager,
    latest_checkpoint,
    load_checkpoint,
    tensor_bundle,
)
from unison.train.checkpoint_formats import open_checkpoint, remove_checkpoint
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


# -- written -------------------------------------------------------------------------------------
# `tests/soak/test_tensorflow_restores.py` restores such checkpoints with TensorFlow itself.


class Position:
    state = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def trained(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
        )
        model.compile("adam", "mse")
    model.fit(np.ones((8, 4), np.float32), np.ones((8, 3), np.float32), verbose=0)
    return model


def test_what_is_written_for_tensorflow_is_restored(tmp_path, two_replicas):
    model, position = trained(two_replicas), Position()
    position.state = {"file": "a.txt", "order": np.arange(3)}
    half = unison.Variable(np.ones(2, ml_dtypes.bfloat16))
    saved = Checkpoint(format="tensorflow", model=model, position=position, half=half)
    path = saved.save(tmp_path / "ckpt")
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint",
        "ckpt-1.data-00000-of-00001",
        "ckpt-1.index",
    ]
    again, other = trained(unison.OneDeviceStrategy("CPU:0")), Position()
    half = unison.Variable(np.zeros(2, ml_dtypes.bfloat16))
    Checkpoint(model=again, position=other, half=half).restore(path).assert_consumed()
    np.testing.assert_equal(again.get_weights(), model.get_weights())
    np.testing.assert_equal(other.state, position.state)
    assert half.numpy().tolist() == [1, 1]


def test_objects_have_tensorflows_names(tmp_path, two_replicas):
    path = Checkpoint(format="tensorflow", model=trained(two_replicas)).write(tmp_path / "ckpt")
    nodes = open_checkpoint(path).nodes

    def value_at(*names):
        node = nodes[0]
        for name in names:
            node = nodes[node.children[name]]
        return load_checkpoint(path).get_tensor(node.variable)

    assert value_at("model", "optimizer", "_iterations").dtype == np.int64
    assert value_at("model", "optimizer", "_trainable_variables", "0").shape == (4, 3)
    assert value_at("model", "_functional", "_operations", "1", "_kernel").shape == (4, 3)
    assert value_at("model", "_functional", "_operations", "2", "moving_mean").shape == (3,)


def test_one_that_is_replaced_is_whole_until_the_new_one_is(tmp_path, monkeypatch):
    weight = unison.Variable(np.float32(1.0))
    checkpoint = Checkpoint(format="tensorflow", weight=weight)
    path = checkpoint.write(tmp_path / "ckpt")
    weight.assign(2.0)
    with monkeypatch.context() as patched:
        patched.setattr(tensor_bundle, "table_of", lambda items: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                checkpoint.write(path)
    assert load_checkpoint(path).get_tensor(f"weight/{VALUE}") == 1.0
    for value in (2.0, 3.0, 4.0):
        weight.assign(value)
        checkpoint.write(path)
        assert load_checkpoint(path).get_tensor(f"weight/{VALUE}") == value
        assert len(os.listdir(tmp_path)) == 2
    Checkpoint(weight=weight).write(path)  # in another format
    remove_checkpoint(path)
    assert not os.listdir(tmp_path)


def test_old_ones_are_deleted_with_their_data(tmp_path):
    checkpoint = Checkpoint(format="tensorflow", weight=unison.Variable(1.0))
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    for _ in range(3):
        manager.save()
    assert {name.partition(".")[0] for name in os.listdir(tmp_path)} == {"checkpoint", "ckpt-3"}


def test_what_tensorflow_has_no_dtype_for_is_refused(tmp_path):
    weight = unison.Variable(np.ones(2, ml_dtypes.float8_e4m3b11fnuz))
    with pytest.raises(InvalidArgumentError, match=r"no array of dtype float8_e4m3b11fnuz.*weight"):
        Checkpoint(format="tensorflow", weight=weight).write(tmp_path / "ckpt")
    assert not os.listdir(tmp_path)
