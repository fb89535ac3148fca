"""Saved models that somebody else has made: right checksums, and anything behind them."""

import base64
import dataclasses
import json
import os
import shutil
import sys
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.export import serialization
from jax._src.export import serialization_generated as table
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import hlo
from jax.extend.mlir import ir, serialize_portable_artifact

import unison.tf as tf
from peak_memory import peak_memory
from unison.errors import DataLossError, InvalidArgumentError, OpError
from unison.runtime.devices import prepare_backend
from unison.saving import load, save
from unison.saving.exported import read_exported
from unison.saving.module_decoder import ModuleDecoder

ONES = np.ones(3, np.float32)


@pytest.fixture(autouse=True, scope="module")
def _devices():
    prepare_backend()


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0)
        self.parts = [tf.Variable(1.0), tf.Variable(2.0)]

    @tf.function(input_signature=[tf.TensorSpec([3], tf.float32)])
    def __call__(self, x):
        return x * self.factor


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save(Scale(), path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    """A saved model, beside a program that nobody has named."""
    path = tmp_path / "model"
    for source in sorted(saved.rglob("*")):
        target = path / source.relative_to(saved)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            target.write_bytes(source.read_bytes())
    (tmp_path / "outside.jaxexport").write_bytes((path / "functions/0.jaxexport").read_bytes())
    return path


def change(folder, to_model):
    """Changes the index of a saved model, which has its checksum again."""
    described = json.loads((folder / "saved_model.json").read_text())
    changed = to_model(described["model"])
    model = described["model"] if changed is None else changed
    checksum = zlib.crc32(json.dumps(model, sort_keys=True).encode())
    described |= {"model": model, "crc32": checksum}
    (folder / "saved_model.json").write_text(json.dumps(described))


def replace_program(folder, data):
    """Puts another program in place of all, and gives it the right checksum."""

    def correct(model):
        for program in model["programs"]:
            for described in filter(None, (program["data"], program["data_for_none"])):
                (folder / "functions" / f"{described['name']}.jaxexport").write_bytes(data)
                described["crc32"] = zlib.crc32(data)

    change(folder, correct)


def program_of(model):
    return model["programs"][0]


def function_of(model):
    return model["objects"][0]["functions"]["__call__"]


# -- the index -----------------------------------------------------------------------------------

WRONG = {
    "nothing": lambda m: {},
    "objects": lambda m: m.update(objects=[]),
    "an object": lambda m: m["objects"].__setitem__(0, 7),
    "a kind": lambda m: m["objects"][0].update(kind="module"),
    "functions": lambda m: m["objects"][0].update(functions=["f"]),
    "signatures": lambda m: m.update(signatures={"serving_default": 99}),
    "negative signature": lambda m: m.update(signatures={"serving_default": -1}),
    "programs": lambda m: m.update(programs={}),
    "variables": lambda m: program_of(m).update(variables=[99]),
    "variable of another kind": lambda m: program_of(m).update(variables=[0]),
    "fewer variables": lambda m: program_of(m).update(variables=[]),
    "more results": lambda m: program_of(m).update(outputs={"list": []}),
    "inputs": lambda m: program_of(m).update(inputs={"leaf": {"shape": [-1]}}),
    "a dtype": lambda m: program_of(m).update(
        outputs={"leaf": {"shape": [3], "dtype": "O", "name": None}}
    ),
    "more axes than any array has": lambda m: program_of(m).update(
        outputs={"leaf": {"shape": [0] * 10_000, "dtype": "float32", "name": None}}
    ),
    "parameters": lambda m: function_of(m).update(parameters=[{"name": "a b", "kind": "VAR"}]),
    "a parameter": lambda m: function_of(m)["parameters"][0].update(name="a b"),
    "annotations": lambda m: m["objects"][1].update(aggregation="WHATEVER"),
    "no program": lambda m: program_of(m).update(data=None),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_index_of_right_checksum_and_wrong_content_is_corrupt(folder, wrong):
    change(folder, wrong)
    with pytest.raises(DataLossError, match=r"is corrupt: "):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff", "7", '{"format": 1}'], ids=len)
def test_an_index_that_is_none_is_corrupt(folder, text):
    (folder / "saved_model.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DataLossError, match=r"saved_model.json is corrupt: .*Save the model again"):
        load(folder)


def change_children(folder, to_children):
    path = folder / "variables" / "variables.index"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(members["checkpoint.json"])
    (node,) = (node for node in index["nodes"] if "0" in node["children"])
    to_children(node["children"])
    members["checkpoint.json"] = json.dumps(index)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("place", ["700000000", "-1", "x", "1e3", "9" * 30, "\uff11"])
def test_a_place_in_a_list_takes_no_memory_that_the_file_does_not_have(folder, place):
    change_children(folder, lambda children: children.update({place: children.pop("1")}))
    with peak_memory() as peak, pytest.raises(DataLossError, match="is corrupt"):
        load(folder)
    assert peak.bytes < 50e6


# -- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../outside", "{outside}", "0/../0", "", "..", 7, None])
def test_a_program_is_in_the_folder(folder, name):
    name = name.format(outside=folder.parent / "outside") if isinstance(name, str) else name
    change(folder, lambda model: program_of(model)["data"].update(name=name))
    with pytest.raises(DataLossError, match="expected a name that matches"):
        load(folder)


def test_a_link_to_a_program_elsewhere_is_not_read(folder):
    program = folder / "functions" / "0.jaxexport"
    program.unlink()
    program.symlink_to(folder.parent / "outside.jaxexport")
    with pytest.raises(DataLossError, match="leads out of the folder"):
        load(folder)


# -- programs ------------------------------------------------------------------------------------


def exported(function, *avals, disabled=(), platforms=("cpu",)):
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in disabled]
    made = export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)
    return made(*avals)


def signature(function):
    """A function as the programs of `Scale` are called: with its variable, and one array."""
    return lambda values, arrays: ([function(arrays[0])], [])


AVALS = ([jax.ShapeDtypeStruct((), np.float32)], [jax.ShapeDtypeStruct((3,), np.float32)])


def calling(target):
    def call(x):
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((3,), np.float32))(x)

    return call


@pytest.mark.parametrize(
    "target",
    [
        "xla_ffi_python_cpu_callback",
        "xla_python_cpu_callback",
        "unison_exchange",
        "mosaic_gpu_v2",
        "tpu_custom_call",
        "tf.call_tf_function",
        "anything",
    ],
)
def test_a_program_that_calls_what_jax_does_not_guarantee_is_refused_before_it_runs(folder, target):
    program = exported(signature(calling(target)), *AVALS, disabled=[target])
    replace_program(folder, bytes(program.serialize()))
    with pytest.raises(InvalidArgumentError, match=rf"0.jaxexport .*calls '{target}'.*Save the"):
        load(folder)


def test_the_gradient_of_a_program_is_refused_as_well(folder):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, x), lambda x, gradient: (calling("anything")(gradient),))
    program = exported(signature(double), *AVALS, disabled=["anything"])
    gradient = dataclasses.replace(program.vjp(), disabled_safety_checks=())
    program = dataclasses.replace(
        program, disabled_safety_checks=(), _get_vjp=lambda program: gradient
    )
    replace_program(folder, bytes(program.serialize(vjp_order=1)))
    with pytest.raises(InvalidArgumentError, match="calls 'anything'"):
        load(folder)


def test_a_program_of_several_derivatives_is_corrupt(folder):
    program = exported(signature(lambda x: x * x), *AVALS)
    replace_program(folder, bytes(program.serialize(vjp_order=2)))
    with pytest.raises(DataLossError, match="more than one derivative"):
        load(folder)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"nr_devices": 2}, "is for 2 devices"),
        ({"platforms": ("cpu", "mars")}, "mars"),
        ({"disabled_safety_checks": (export.DisabledSafetyCheck.platform(),)}, "without checks"),
    ],
    ids=str,
)
def test_a_program_that_no_saving_makes_is_refused(folder, other, what):
    program = exported(signature(lambda x: x), *AVALS)
    replace_program(folder, bytes(dataclasses.replace(program, **other).serialize()))
    with pytest.raises(InvalidArgumentError, match=f"{what}.*is not run"):
        load(folder)


def with_operations(text, main="main"):
    """A program that adds 1, or what text makes `%cst`, and has the operations of the text."""
    program = exported(signature(lambda x: x + jnp.float32(1.0)), *AVALS)
    with mlir.make_ir_context():
        begin = "%cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>"
        whole = str(program.mlir_module(serialized=False)).replace("@main(", f"@{main}(")
        assert begin in whole
        module = ir.Module.parse(whole.replace(begin, text if "%cst =" in text else begin + text))
        assert module.operation.verify()
        version = hlo.get_version_from_compatibility_requirement(
            hlo.StablehloCompatibilityRequirement.WEEK_4
        )
        data = serialize_portable_artifact(module, version)
    return bytes(dataclasses.replace(program, mlir_module_serialized=data).serialize())


TOKEN = "%token = stablehlo.after_all : !stablehlo.token"
HANDLE = "#stablehlo.channel_handle<handle = 1, type = 2>"


@pytest.mark.parametrize(
    "operation",
    [
        f'\n{TOKEN}\n%in:2 = "stablehlo.infeed"(%token) : (!stablehlo.token) '
        "-> (tensor<3xf32>, !stablehlo.token)",
        f'\n{TOKEN}\n%out = "stablehlo.outfeed"(%cst, %token) : (tensor<f32>, !stablehlo.token) '
        "-> !stablehlo.token",
        f'\n{TOKEN}\n%sent = "stablehlo.send"(%cst, %token) <{{channel_handle = {HANDLE}, '
        "is_host_transfer = true}> : (tensor<f32>, !stablehlo.token) -> !stablehlo.token",
        "%id = stablehlo.replica_id : tensor<ui32>\n"
        "%cst = stablehlo.convert %id : (tensor<ui32>) -> tensor<f32>",
    ],
    ids=["infeed", "outfeed", "send", "replica_id"],
)
def test_a_program_that_speaks_with_the_host_or_others_is_refused(folder, operation):
    replace_program(folder, with_operations(operation))
    with pytest.raises(InvalidArgumentError, match=r"has the operation stablehlo\.\w+, and"):
        load(folder)


def test_a_program_without_a_main_function_is_corrupt(folder):
    replace_program(folder, with_operations("", main="another"))
    with pytest.raises(DataLossError, match=r"expected a function main, received \['another'\]"):
        load(folder)


def test_constants_that_are_not_in_the_file_take_no_memory(folder):
    # XLA makes an array of them before it looks for what is needed.
    data = with_operations(
        "%large = stablehlo.constant dense<2.0> : tensor<10000000000xf32>\n"
        "%piece = stablehlo.slice %large [0:1] : (tensor<10000000000xf32>) -> tensor<1xf32>\n"
        "%cst = stablehlo.reshape %piece : (tensor<1xf32>) -> tensor<f32>"
    )
    assert len(data) < 10_000
    replace_program(folder, data)
    with pytest.raises(DataLossError, match="its constants take 400000000"):
        load(folder)


#: A module of StableHLO in 333 bytes, whose location is a call site of two call sites, forty times.
#: A flipped bit says that fewer attributes precede: each is read again for each that refers to it.
NEVER_READ = base64.b64decode(
    "TUzvUg1TdGFibGVITE9fdjEuMTcuMAABFwUBAQcBAwsDBQ8TA29dAwFVEw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8P"
    "Dw8PDw8PDw8PDw8PDw8PDwsPAwkLCwsLAwMPAiYCF1EDAxUFBRUHBxUJCRULCxUNDRUPDxURERUTExUVFRUXFxUZ"
    "GRUbGxUdHRUfHxUhIRUjIxUlJRUnJxUpKRUrKxUtLRUvLxUxMRUzMxU1NRU3NxU5ORU7OxU9PRU/PxVBQRVDQxVF"
    "RRVHRxVJSRVLSxVNTRVPTxUBAQULFQMDAwEjAR0NHQ8RAQEEMQUBUAEBBwQhAwEFA1ABAwcEDQMBBQUAUwYDAQUB"
    "AG8RAwsFFREPCxFidWlsdGluAHZobG8AbW9kdWxlAGZ1bmNfdjEAcmV0dXJuX3YxAGEAbWFpbgAACBUFBQEBC1VX"
    "VVlb"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
def test_a_module_that_is_read_forever_is_corrupt(folder):
    program = exported(signature(lambda x: x), *AVALS)
    data = bytes(dataclasses.replace(program, mlir_module_serialized=NEVER_READ).serialize())
    replace_program(folder, data)
    with pytest.raises(DataLossError, match=r"333 bytes takes more than 2 s of CPU time"):
        load(folder)


def test_a_module_for_which_an_allocation_fails_is_corrupt(monkeypatch, tmp_path):
    """At the limit of memory, MLIR may raise an error rather than abort, as of invalid modules."""
    dialects = tmp_path / "jaxlib" / "mlir" / "dialects"
    dialects.mkdir(parents=True)
    for package in (dialects, *dialects.parents[:2]):
        (package / "__init__.py").touch()
    (dialects / "stablehlo.py").write_text(
        "def deserialize_portable_artifact_str(module):\n    raise MemoryError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ModuleDecoder() as decoder, pytest.raises(ValueError, match="of 3 bytes takes more than"):
        decoder.check([b"any"])


def test_a_module_that_is_invalid_is_not_decoded_in_this_process():
    """An error of MLIR's reader can leave the process's memory corrupt."""
    module = exported(signature(lambda x: x), *AVALS).mlir_module_serialized
    with ModuleDecoder() as decoder:
        with pytest.raises(ValueError, match="is no StableHLO that the installed jaxlib can read"):
            decoder.check([module[: len(module) // 2]])
        decoder.check([module])


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
def test_the_memory_for_a_module_does_not_depend_on_the_number_of_cores():
    module = exported(signature(lambda x: x), *AVALS).mlir_module_serialized
    with ModuleDecoder() as decoder:
        decoder.check([module])
        assert len(os.listdir(f"/proc/{decoder._process.pid}/task")) == 1


@pytest.mark.parametrize("executable", [shutil.which("false"), "", None], ids=repr)
def test_a_model_is_loaded_where_no_child_process_starts(saved, executable, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", executable)
    loaded = load(saved)
    np.testing.assert_array_equal(loaded(ONES), 2 * ONES)
    assert "without limits of time and memory" in caplog.text


def test_an_index_that_cannot_be_read_is_not_corrupt(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(f"not for you: {path}")

    monkeypatch.setattr("unison.saving.directory.read_index", refuse)
    with pytest.raises(PermissionError, match="not for you"):
        load(folder)


def test_arguments_that_refer_to_each_other_end(folder, monkeypatch):
    def nested(builder, tree):
        """Lists of the same list twice, forty times: a tree of 2**40 leaves, in a kilobyte."""
        table.PyTreeDefStart(builder)
        offset = table.PyTreeDefEnd(builder)
        for _ in range(40):
            table.PyTreeDefStartChildrenVector(builder, 2)
            builder.PrependUOffsetTRelative(offset)
            builder.PrependUOffsetTRelative(offset)
            children = builder.EndVector()
            table.PyTreeDefStart(builder)
            table.PyTreeDefAddKind(builder, table.PyTreeDefKind.list)
            table.PyTreeDefAddChildren(builder, children)
            offset = table.PyTreeDefEnd(builder)
        return offset

    program = exported(signature(lambda x: x), *AVALS)
    with monkeypatch.context() as patched:
        patched.setattr(serialization, "_serialize_pytreedef", nested)
        data = bytes(program.serialize())
    assert len(data) < 10_000
    replace_program(folder, data)
    with pytest.raises(DataLossError, match="are not lists and dictionaries"):
        load(folder)


@pytest.mark.parametrize("size", ["a^1000000000", "__import__('os')", "[a]", "a" * 5000], ids=len)
def test_a_size_that_takes_long_to_parse_is_corrupt(folder, size):
    place = ("a" * len(size)).encode()
    symbol = export.symbolic_shape(place.decode())
    avals = AVALS[0], [jax.ShapeDtypeStruct(symbol, np.float32)]
    data = bytes(exported(signature(lambda x: x), *avals).serialize())
    assert place in data
    replace_program(folder, data.replace(place, size.encode()))
    with pytest.raises(DataLossError, match="expected the size of an axis"):
        load(folder)


def test_arguments_of_a_program_of_ones_own_classes_are_refused(folder):
    import collections

    Pair = collections.namedtuple("Pair", "values arrays")
    export.register_namedtuple_serialization(Pair, serialized_name="test.Pair")
    program = export.export(jax.jit(lambda pair: ([pair.arrays[0]], [])))(Pair(*AVALS))
    replace_program(folder, bytes(program.serialize()))
    with pytest.raises(DataLossError, match="are not lists and dictionaries"):
        load(folder)


def test_other_arguments_than_the_description_says_are_corrupt(folder):
    program = exported(lambda arrays: [arrays[0]], AVALS[1])
    replace_program(folder, bytes(program.serialize()))
    with pytest.raises(DataLossError, match="its arguments or results are others"):
        load(folder)


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\xff" * 4096, os.urandom(300)], ids=len)
def test_bytes_that_are_no_program_are_corrupt(folder, data):
    replace_program(folder, data)
    with pytest.raises(OpError, match=r"is corrupt|holds a program"):
        load(folder)


def test_what_saving_writes_is_read(saved):
    loaded = load(saved)
    np.testing.assert_array_equal(loaded(ONES), 2 * ONES)


def test_a_program_of_all_that_linear_algebra_calls_is_read():
    def solve(x):
        q, r = jnp.linalg.qr(x)
        values = jnp.linalg.svd(x, compute_uv=False)
        noise = jax.random.normal(jax.random.key(0), (3,))
        return q @ r + values[:, None] + noise + jax.lax.top_k(x, 3)[0]

    size = export.symbolic_shape("batch, 3, 3")
    program = export.export(jax.jit(solve), platforms=("cpu", "cuda", "rocm", "tpu"))
    data = program(jax.ShapeDtypeStruct(size, np.float32)).serialize(vjp_order=1)
    assert read_exported(bytes(data), "x").platforms == ("cpu", "cuda", "rocm", "tpu")
