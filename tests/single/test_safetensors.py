"""Files of Hugging Face's format, written for other programs and read from them."""

import json
import struct

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors

import unison
from keras_comparison import mirrored
from unison.errors import DataLossError, InvalidArgumentError, NotFoundError
from unison.train import Checkpoint, list_variables, load_checkpoint, save_safetensors
from unison.train.safetensors import _DTYPES


def parsed(path):
    """The header and the bytes of a file, read as the format's page describes it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path, header, content=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


def array(values, begin=0, **changes):
    """The description of an array of float32 in a header."""
    place = [begin, begin + 4 * len(values)]
    return {"dtype": "F32", "shape": [len(values)], "data_offsets": place} | changes


def test_a_file_is_what_the_format_says(tmp_path):
    objects = {
        "dense": {"kernel": unison.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))},
        "Scale": unison.Variable(np.ones(3, ml_dtypes.bfloat16)),
        "steps": [unison.Variable(7)],
    }
    path = tmp_path / "model.safetensors"
    save_safetensors(objects, path, metadata={"format": "unison"})
    header, content = parsed(path)
    assert header == {
        "__metadata__": {"format": "unison"},
        "dense.kernel": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "steps.0": {"dtype": "I32", "shape": [], "data_offsets": [24, 28]},
        "Scale": {"dtype": "BF16", "shape": [3], "data_offsets": [28, 34]},
    }
    assert (path.stat().st_size - len(content)) % 8 == 0
    np.testing.assert_array_equal(np.frombuffer(content[:24], np.float32), np.arange(6))


def test_hugging_faces_library_reads_it(tmp_path):
    weight = unison.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))
    save_safetensors({"a": {"w": weight}}, tmp_path / "m.safetensors", {"key": "text"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {"key": "text"}
        np.testing.assert_array_equal(file.get_tensor("a.w"), weight.numpy())


@pytest.mark.parametrize("dtype", _DTYPES.values())
def test_every_dtype_is_written_and_read(tmp_path, dtype):
    values = np.array([[0, 1, 1]]).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    weight = unison.Variable(values)
    save_safetensors([weight], tmp_path / "m.safetensors")
    read = load_checkpoint(tmp_path / "m.safetensors").get_tensor("0")
    assert read.dtype == weight.numpy().dtype
    np.testing.assert_array_equal(read, weight.numpy())


def test_a_keras_model_is_restored(tmp_path, two_replicas):
    def build(strategy):
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("adam", "mse")
        return model

    model = build(two_replicas)
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    path = tmp_path / "model.safetensors"
    save_safetensors(model, path)
    again = build(mirrored(4))
    again.optimizer.build(again.trainable_variables)
    Checkpoint(again).read(path).expect_partial().assert_existing_objects_matched()
    np.testing.assert_equal(again.get_weights(), model.get_weights())
    assert ("layers[0].kernel", [4, 3]) in list_variables(path)


def test_a_large_model_is_in_several_files(tmp_path):
    for number, name in enumerate(("model.layers.0.weight", "model.layers.1.weight")):
        content = np.full(2, number, np.float32).tobytes()
        write(tmp_path / f"part-{number}.safetensors", {name: array([0, 0])}, content)
    weights = {f"model.layers.{n}.weight": f"part-{n}.safetensors" for n in range(2)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    layers = [{"weight": unison.Variable(np.full(2, -1, np.float32))} for _ in range(2)]
    Checkpoint(model={"layers": layers}).read(index).expect_partial()
    assert [layer["weight"].numpy().tolist() for layer in layers] == [[0, 0], [1, 1]]


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end with \.safetensors"):
        save_safetensors([unison.Variable(1.0)], tmp_path / "model")
    with pytest.raises(ValueError, match=r"cannot be empty. Received: 'a\.b'"):
        save_safetensors({"a.b": unison.Variable(1.0)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="cannot be empty"):
        save_safetensors(unison.Variable(1.0), tmp_path / "m.safetensors")
    weight = unison.Variable(np.ones(2, ml_dtypes.float8_e4m3fnuz))
    with pytest.raises(InvalidArgumentError, match="no array of dtype float8_e4m3fnuz"):
        save_safetensors([weight], tmp_path / "m.safetensors")
    with pytest.raises(NotFoundError):
        load_checkpoint(tmp_path / "m.safetensors")


WRONG = {
    "nothing": (b"", b""),
    "a list": (b"[]", b""),
    "no JSON": (b"{", b""),
    "an array beyond the end": ({"a": array([1, 2])}, b"1234"),
    "a large shape": ({"a": array([1], shape=[2**50])}, b"1234"),
    "a large place": ({"a": array([1], data_offsets=[2**60, 2**60 + 4])}, b"1234"),
    "an order": ({"a": array([1], data_offsets=[4, 0])}, b"1234"),
    "a dtype": ({"a": array([1], dtype="F31")}, b"1234"),
    "a shape": ({"a": array([1], shape="1")}, b"1234"),
    "a number": ({"a": 1}, b"1234"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_corrupt_file_is_an_error(tmp_path, wrong):
    path = write(tmp_path / "m.safetensors", *WRONG[wrong])
    with pytest.raises(DataLossError, match="is corrupt"):
        load_checkpoint(path)


def test_a_header_that_is_not_there_is_an_error(tmp_path):
    path = tmp_path / "m.safetensors"
    for content in (b"", b"1234", struct.pack("<Q", 2**40) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(DataLossError, match="is corrupt"):
            load_checkpoint(path)


def test_a_list_of_files_does_not_lead_out_of_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "secret.safetensors", {"a": array([1.0])}, b"1234")
    index = tmp_path / "in" / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(DataLossError, match="leads out of the folder"):
        load_checkpoint(index)
