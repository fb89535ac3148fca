"""Saved models that TensorFlow, its C++ loader and ONNX Runtime run, without JAX and Unison.

Where TensorFlow is installed beside Unison:

    pip install tensorflow jax2onnx onnxruntime && pytest -m soak \\
        tests/soak/test_saved_models_for_tensorflow.py
"""

import json
import subprocess
import sys

import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.errors import NotFoundError
from unison.runtime.devices import prepare_backend
from unison.saving import load, save
from unison.storage import files

pytestmark = pytest.mark.soak

pytest.importorskip("tensorflow")

#: The beginning of programs that serve a model, in which JAX and Unison cannot be imported.
SERVES = """
import json, sys
sys.modules["jax"] = sys.modules["unison"] = None
import numpy as np, tensorflow as tf
"""

ONES = np.ones((2, 3), np.float32)

#: XLA compiles for other vectors in TensorFlow than in JAX.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(autouse=True, scope="module")
def _devices():
    prepare_backend()


def served(program: str, *arguments) -> dict:
    """Returns what a program of TensorFlow alone prints as its last line, from JSON."""
    done = subprocess.run(
        [sys.executable, "-c", SERVES + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


class Scale(tf.Module):
    """Has functions of several kinds, and variables at several places."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0, name="the factor")
        self.calls = tf.Variable(0, trainable=False)
        self.items = [tf.Variable(1.0), 5, {"a": tf.Variable(5.0, dtype=tf.bfloat16)}]
        self.pair = (tf.Variable([6.0]),)
        self.inner = tf.Module()
        self.inner.w = tf.Variable([[1.0, -1.0]])

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    def __call__(self, x):
        self.calls.assign_add(1)
        return x * self.factor

    @tf.function
    def choose(self, x, y=1.0, training=False):
        return {"out": x * self.factor + y, "neg": -x} if training else (x, y)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.bool)])
    def counted(self, numbers, doubled):
        counts = tf.cast(numbers, tf.float32) * self.factor
        return tf.where(doubled, 2.0 * counts, counts), numbers + 1


OF_A_MODULE = """
loaded = tf.saved_model.load(sys.argv[1])
ones = tf.ones((2, 3))

def gradient(function, *args):
    with tf.GradientTape() as tape:
        results = function(*args)
        total = tf.reduce_sum(results if isinstance(results, tf.Tensor) else results[0])
    return float(tape.gradient(total, loaded.factor))

with tf.GradientTape() as tape:
    tape.watch(ones)
    total = tf.reduce_sum(loaded(ones))
of_input = tape.gradient(total, ones)
loaded.factor.assign(4.0)
chosen = loaded.choose(ones, training=True)
counts, numbers = loaded.counted(tf.constant([1, 2]), tf.constant(True))
print(json.dumps({
    "scaled": loaded(ones).numpy().tolist(),
    "none": loaded(tf.ones((0, 3))).shape.as_list(),
    "calls": int(loaded.calls),
    "chosen": {name: float(tf.reduce_sum(chosen[name])) for name in chosen},
    "plain": [float(tf.reduce_sum(each)) for each in loaded.choose(ones)],
    "counts": counts.numpy().tolist() + numbers.numpy().tolist(),
    "gradients": [
        gradient(loaded, ones),
        gradient(loaded, tf.ones((0, 3))),
        gradient(loaded.counted, tf.constant([1, 2]), tf.constant(True)),
    ],
    "of_input": of_input.numpy().tolist(),
    "parts": [
        float(loaded.items[0]), float(loaded.items[-1]["a"]), loaded.pair[0].numpy().tolist(),
        loaded.inner.w.numpy().tolist(),
    ],
    "dtype": loaded.items[-1]["a"].dtype.name,
    "trainable": [loaded.factor.trainable, loaded.calls.trainable],
    "signature": loaded.signatures["serving_default"](x=ones)["output_0"].numpy().tolist(),
}))
"""


@pytest.mark.parametrize("way", ["saved", "loaded and saved"])
def test_tensorflow_runs_and_differentiates_a_module(tmp_path, way):
    module = Scale()
    module.choose(ONES)
    module.choose(ONES, training=True)
    signatures = module.__call__
    if way == "loaded and saved":
        save(module, tmp_path / "first", signatures)
        module = load(tmp_path / "first")
        signatures = module.signatures["serving_default"]
    save(module, tmp_path / "model", signatures, format="tensorflow")
    assert served(OF_A_MODULE, tmp_path / "model") == {
        "scaled": [[4.0] * 3] * 2,
        "none": [0, 3],
        "calls": 3,
        "chosen": {"neg": -6.0, "out": 30.0},
        "plain": [6.0, 1.0],
        "counts": [8.0, 16.0, 2, 3],
        "gradients": [6.0, 0.0, 6.0],
        "of_input": [[2.0] * 3] * 2,
        "parts": [1.0, 5.0, [6.0], [[1.0, -1.0]]],
        "dtype": "bfloat16",
        "trainable": [True, False],
        "signature": [[4.0] * 3] * 2,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of several inputs that two replicas have trained, and its predictions."""
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        image, count = tf.keras.Input((8, 8, 1), name="image"), tf.keras.Input((2,), name="a-count")
        x = tf.keras.layers.Conv2D(2, 3, activation="relu")(image)
        x = tf.keras.layers.BatchNormalization()(x)
        x = tf.keras.layers.Dropout(0.5)(tf.keras.layers.Flatten()(x))
        x = tf.keras.layers.Concatenate()([x, count])
        model = tf.keras.Model([image, count], tf.keras.layers.Dense(3, "softmax")(x))
        model.compile("adam", "sparse_categorical_crossentropy")
    random = np.random.default_rng(0)
    images = random.normal(size=(21, 8, 8, 1)).astype(np.float32)
    counts = random.normal(size=(21, 2)).astype(np.float32)
    model.fit([images, counts], random.integers(0, 3, 21), verbose=0)
    given = tmp_path_factory.mktemp("given") / "given.npz"
    np.savez(given, images=images, counts=counts)
    return model, given, model.predict([images, counts], verbose=0)


OF_A_MODEL = """
given = np.load(sys.argv[2])
infer = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
arrays = [tf.constant(given["images"]), tf.constant(given["counts"])]
names = json.loads(sys.argv[3])
(result,) = infer(**dict(zip(names, arrays))).values()
print(json.dumps(result.numpy().tolist()))
"""


def test_tensorflow_serves_a_keras_model_that_replicas_have_trained(trained, tmp_path):
    model, given, expected = trained
    save(model, tmp_path / "model", format="tensorflow")
    result = served(OF_A_MODEL, tmp_path / "model", given, json.dumps(["inputs", "inputs_1"]))
    np.testing.assert_allclose(result, expected, **CLOSE)


def test_keras_exports_a_model_that_replicas_have_trained(trained, tmp_path):
    model, given, expected = trained
    model.export(tmp_path / "model", verbose=False)
    result = served(OF_A_MODEL, tmp_path / "model", given, json.dumps(["image", "a_count"]))
    np.testing.assert_allclose(result, expected, **CLOSE)


WITH_THE_LOADER_OF_SERVERS = """
import ctypes, os
from tensorflow.core.protobuf import saved_model_pb2

path = sys.argv[1]
described = saved_model_pb2.SavedModel()
with open(os.path.join(path, "saved_model.pb"), "rb") as file:
    described.ParseFromString(file.read())
signature = described.meta_graphs[0].signature_def["serving_default"]
(fed,), (fetched,) = signature.inputs.values(), signature.outputs.values()

library = ctypes.CDLL(os.path.join(os.path.dirname(tf.__file__), "libtensorflow_cc.so.2"))
for name in "NewStatus NewSessionOptions NewGraph LoadSessionFromSavedModel Message".split():
    getattr(library, "TF_" + name).restype = ctypes.c_void_p
for name in "AllocateTensor TensorData GraphOperationByName".split():
    getattr(library, "TF_" + name).restype = ctypes.c_void_p
library.TF_Message.restype = ctypes.c_char_p
pointer = ctypes.c_void_p
status, graph = pointer(library.TF_NewStatus()), pointer(library.TF_NewGraph())

def checked():
    assert library.TF_GetCode(status) == 0, library.TF_Message(status)

tags = (ctypes.c_char_p * 1)(b"serve")
options = pointer(library.TF_NewSessionOptions())
session = pointer(library.TF_LoadSessionFromSavedModel(
    options, None, path.encode(), tags, 1, graph, None, status
))
checked()

class Output(ctypes.Structure):
    _fields_ = [("operation", pointer), ("index", ctypes.c_int)]

def output(name):
    operation, index = name.split(":")
    return Output(library.TF_GraphOperationByName(graph, operation.encode()), int(index))

x = np.arange(6, dtype=np.float32).reshape(2, 3)
sizes = (ctypes.c_int64 * 2)(*x.shape)
tensor = pointer(library.TF_AllocateTensor(1, sizes, 2, ctypes.c_size_t(x.nbytes)))
ctypes.memmove(library.TF_TensorData(tensor), x.ctypes.data, x.nbytes)
results = (pointer * 1)()
library.TF_SessionRun(
    session, None, (Output * 1)(output(fed.name)), (pointer * 1)(tensor), 1,
    (Output * 1)(output(fetched.name)), results, 1, None, 0, None, status,
)
checked()
found = np.zeros_like(x)
ctypes.memmove(found.ctypes.data, library.TF_TensorData(pointer(results[0])), found.nbytes)
print(json.dumps(found.tolist()))
"""


class Others(tf.Module):
    """Has functions of several shapes, 64 bits, any names, and no results."""

    def __init__(self):
        super().__init__()
        self.count = tf.Variable(np.int64(2**40))

    @tf.function
    def doubled(self, x):
        return 2 * x

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="a-b")])
    def counted(self, ids):
        return ids + self.count

    @tf.function(input_signature=[])
    def nothing(self):
        return None


OF_OTHERS = """
loaded = tf.saved_model.load(sys.argv[1])
counted = loaded.counted(tf.constant([1, 2], tf.int64))
named = loaded.signatures["with names"](self_=tf.ones((1,)), arg_1x=tf.ones((2, 1)))
print(json.dumps({
    "doubled": [loaded.doubled(tf.ones(shape)).shape.as_list() for shape in ((2,), (3,), (2, 2))],
    "counted": counted.numpy().tolist(),
    "nothing": loaded.nothing() is None,
    "named": {name: float(value) for name, value in named.items()},
    "signature": loaded.signatures["counted"](a_b=counted * 0)["output_0"].numpy().tolist(),
}))
"""


def test_functions_of_several_shapes_of_64_bits_and_with_any_names(tmp_path):
    module = Others()
    for shape in ((2,), (3,), (2, 2)):
        module.doubled(np.ones(shape, np.float32))

    @tf.function(
        input_signature=[
            tf.TensorSpec([1], tf.float32, name="self"),
            tf.TensorSpec([None, 1], tf.float32, name="1x"),
        ]
    )
    def named(one, other):
        return {"difference": tf.reduce_sum(other) - 3.0 * tf.reduce_sum(one)}

    signatures = {"with names": named, "counted": module.counted}
    save(module, tmp_path / "model", signatures, format="tensorflow")
    assert served(OF_OTHERS, tmp_path / "model") == {
        "doubled": [[2], [3], [2, 2]],
        "counted": [2**40 + 1, 2**40 + 2],
        "nothing": True,
        "named": {"difference": -1.0},
        "signature": [2**40, 2**40],
    }


def test_a_remote_folder_holds_the_format_that_was_saved_last():
    folder = "memory://saved/in/turn"
    save(Scale(), folder)
    save(Scale(), folder, format="tensorflow")
    with pytest.raises(NotFoundError, match="TensorFlow saved"):
        load(folder)
    save(Scale(), folder)
    assert not files.exists(f"{folder}/saved_model.pb")
    assert float(load(folder).factor) == 2.0


def test_the_loader_of_tensorflow_serving_loads_and_runs_a_model(tmp_path):
    module = Scale()
    save(module, tmp_path / "model", module.__call__, format="tensorflow")
    found = served(WITH_THE_LOADER_OF_SERVERS, tmp_path / "model")
    assert found == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_onnx_runtime_runs_a_model_that_replicas_have_trained(trained, tmp_path):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, given, expected = trained
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    names = [each.name for each in session.get_inputs()]
    arrays = dict(zip(names, np.load(given).values(), strict=True))
    (result,) = session.run(None, arrays)
    np.testing.assert_allclose(result, expected, **CLOSE)
