"""Every public name of TensorFlow is there, or says what to use instead."""

import importlib.util
import inspect
import re
import types
from pathlib import Path

import jax
import pytest

import surface_members
import unison.tf as tf
from unison.tf.advice import ADVICE
from unison.tf.missing import _all_names, names_missing_from, public_names
from unison.unsupported import UnsupportedMember

#: The modules whose names other files answer for.
ELSEWHERE = ("tf.compat", "tf.keras", "tf.losses", "tf.metrics", "tf.optimizers", "tf.initializers")
MODULES = [path for path in _all_names() if not path.startswith(ELSEWHERE)]


def found(path: str) -> object:
    """The object of a dotted name; None if a part of it is not supported."""
    value = tf
    for name in path.split(".")[1:]:
        try:
            value = getattr(value, name)
        except AttributeError:
            return None
    return value


@pytest.mark.parametrize("path", MODULES)
def test_a_public_name_is_there_or_says_what_to_use_instead(path):
    module = found(path)
    if module is None:
        parent, _, name = path.rpartition(".")
        module, names = found(parent), (name,)
        if module is None:  # said of the module above
            return
    else:
        names = public_names(path)
    for name in names:
        if hasattr(module, name):
            continue
        with pytest.raises(AttributeError) as raised:
            getattr(module, name)
        message = str(raised.value)
        assert f".{name} is not supported by Unison: " in message
        assert len(message.partition("Unison: ")[2]) > 10


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (tf, "SparseTensorSpec", "dense tensors"),
        (tf.signal, "fftnd", "jax.numpy.fft"),
        (tf.nn, "ctc_greedy_decoder", "keras.ops.ctc_decode"),
        (tf.strings, "to_hash_bucket_strong", "to_hash_bucket_fast"),
        (tf.config, "experimental_connect_to_host", "TF_CONFIG"),
        (tf.config.experimental, "get_device_policy", "JAX"),
        (tf.random, "uniform_candidate_sampler", "tf.random"),
        (tf.io, "decode_proto", "Dataset.map"),
        (tf.experimental if hasattr(tf, "experimental") else tf, "dtensor", "jax.sharding"),
    ],
)
def test_a_name_of_tensorflow_that_is_not_there_says_what_to_use_instead(module, name, instead):
    with pytest.raises(AttributeError, match=f"{name} is not supported by Unison") as raised:
        getattr(module, name)
    assert instead in str(raised.value)


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (tf, "reduce_summ", "did you mean 'reduce_sum'"),
        (tf, "quantum_leap", "jax.numpy, jax or keras"),
        (tf.nn, "relu7", "did you mean 'relu'"),
        (tf.math, "bessel", "neither in TensorFlow 2.21 nor in Unison"),
        (tf.random, "gamma_ray", "neither in TensorFlow 2.21 nor in Unison"),
        (tf.io.gfile, "exist", "did you mean 'exists'"),
        (tf.config.threading, "threads", "neither in TensorFlow 2.21 nor in Unison"),
    ],
)
def test_a_name_that_tensorflow_has_not_either_is_told_apart(module, name, hint):
    with pytest.raises(AttributeError) as raised:
        getattr(module, name)
    assert hint in str(raised.value)


def test_a_module_may_say_more_than_the_table():
    lookup = names_missing_from("unison.tf.nn", {"dilation2d": "use mine"})
    with pytest.raises(AttributeError, match=r"tf\.nn\.dilation2d is not supported.*use mine"):
        lookup("dilation2d")


def test_advice_is_for_names_that_tensorflow_has():
    def is_known(full_name: str) -> bool:
        parent, _, name = full_name.rpartition(".")
        return name in public_names(parent)

    assert [name for name in ADVICE if not is_known(name)] == []


def test_advice_is_for_names_that_are_missing_or_for_those_in_a_module():
    is_for_nothing = [
        name for name in ADVICE if not isinstance(found(name), types.ModuleType | None)
    ]
    assert is_for_nothing == []


def test_every_listed_name_is_there():
    for module in (tf, tf.nn, tf.io, tf.image, tf.errors, tf.linalg, tf.math):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_keras_modules_have_their_second_names():
    assert tf.losses is tf.keras.losses
    assert tf.initializers is tf.keras.initializers
    assert tf.optimizers.Adam is tf.keras.optimizers.Adam


#: Instances of the classes whose instances set attributes when they are made, if `cls()` does not.
INSTANCES = {
    "tf.DType": lambda: tf.float32,
    "tf.Tensor": lambda: tf.constant(1.0),
    "tf.TensorArray": lambda: tf.TensorArray(tf.float32, 1),
    "tf.Variable": lambda: tf.Variable(1.0),
    "tf.data.DatasetSpec": lambda: tf.data.DatasetSpec(tf.TensorSpec([])),
    "tf.distribute.Strategy": tf.distribute.get_strategy,
    "tf.distribute.InputContext": tf.distribute.InputContext,
    "tf.lookup.StaticHashTable": lambda: tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2]), 0
    ),
    "tf.lookup.experimental.MutableHashTable": lambda: tf.lookup.experimental.MutableHashTable(
        tf.int64, tf.int64, 0
    ),
    "tf.tpu.experimental.DeviceAssignment": lambda: tf.tpu.experimental.DeviceAssignment.build(
        tf.tpu.experimental.Topology([1, 1, 1, 1], [[[0, 0, 0, 0]]])
    ),
    "tf.tpu.experimental.Topology": lambda: tf.tpu.experimental.Topology(
        [1, 1, 1, 1], [[[0, 0, 0, 0]]]
    ),
}

MEMBERS = surface_members.recorded()

#: Members of classes that are not Unison's.
NOT_OURS = {"tf.Tensor": ["OVERLOADABLE_OPERATORS"]}


def instance_of(path: str, owner: object) -> object:
    """An instance of a class, or the class itself if it needs arguments."""
    if path in INSTANCES:
        return INSTANCES[path]()
    try:
        return owner()
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        return owner


@pytest.mark.parametrize(("path", "names"), MEMBERS.items(), ids=list(MEMBERS))
def test_a_public_member_of_a_class_is_there_or_says_what_to_use_instead(path, names):
    owner = found(path)
    if owner is None or not (inspect.isclass(owner) or path in INSTANCES):
        return
    value = instance_of(path, owner)
    absent = {name for name in names if not hasattr(owner, name) and not hasattr(value, name)}
    without_advice = {name for name in absent if not is_unsupported(value, name)}
    assert without_advice - {*NOT_OURS.get(path, ())} == set()


def is_unsupported(value: object, name: str) -> bool:
    owners = value.__mro__ if inspect.isclass(value) else type(value).__mro__
    is_array = isinstance(value, jax.Array)  # of a class that `jax.Array` only describes
    declared = [vars(owner).get(name) for owner in (*owners, *(jax.Array,) * is_array)]
    return any(isinstance(member, UnsupportedMember) for member in declared)


@pytest.mark.parametrize(
    ("expression", "advice"),
    [
        ("tf.Variable(1.0).eval", "Variable.eval is not supported by Unison: .*numpy"),
        ("tf.Variable.from_proto", "Variable.from_proto is not supported .*Checkpoint"),
        ("tf.distribute.Server.create_local_server", "cluster of one task"),
        ("tf.distribute.get_strategy().configure", "cluster_resolver="),
        ("tf.data.Dataset.range(2).fingerprint", "plan.description"),
        ("tf.TensorArray(tf.int32, 1).grad", "tf.GradientTape"),
        ("tf.TensorSpec([2]).experimental_as_proto", "pickle"),
        ("tf.keras.Sequential().save_spec", "input_shape"),
        ("tf.constant(1.0).eval", "numpy"),
    ],
)
def test_a_member_that_is_not_there_says_what_to_use_instead(expression, advice):
    with pytest.raises(AttributeError, match=advice):
        eval(expression, {"tf": tf})


def parameters_of(function: object) -> str:
    def default(value: object) -> str:
        if isinstance(value, tf.DType):
            return f"tf.{value.name}"
        return repr(str(value) if isinstance(value, str) else value)

    shown = []
    for parameter in inspect.signature(function).parameters.values():
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        has_default = parameter.default is not parameter.empty
        shown.append(
            f"{mark}{parameter.name}={default(parameter.default)}"
            if has_default
            else f"{mark}{parameter.name}"
        )
    return ", ".join(shown)


SIGNATURES = [
    line.split(": ", 1)
    for line in (Path(__file__).parents[1] / "surface_signatures.txt").read_text().splitlines()
]


def test_there_are_signatures():
    assert len(SIGNATURES) > 500


def test_arguments_have_tensorflows_names_order_and_defaults():
    differing = {path: parameters_of(found(path)) for path, _ in SIGNATURES}
    assert differing == dict(SIGNATURES)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("import unison.tf.lite", "jax.export"),
        ("from unison.tf import Graph", "tf.function"),
        ("from unison.tf.feature_column import numeric_column", "Keras"),
        ("from unison.tf.python.keras import layers", "public names"),
        ("import unison.tf.distribut", "did you mean 'distribute'"),
    ],
)
def test_import_of_a_missing_module_says_what_to_use(line, advice):
    with pytest.raises(ModuleNotFoundError, match=re.escape(advice)):
        exec(line, {})


def test_who_only_asks_for_a_module_is_told_that_there_is_none():
    assert importlib.util.find_spec("unison.tf.feature_column") is None
    assert importlib.util.find_spec("unison.tf.data") is not None
