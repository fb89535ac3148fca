"""Saved models do what TensorFlow's do; its answers are the literals."""

import os
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from subprocess_program import run_program
from unison.errors import DataLossError, NotFoundError
from unison.runtime.devices import prepare_backend
from unison.saving import contains_saved_model, keras_directory, load, save


@pytest.fixture(autouse=True, scope="module")
def _devices():
    prepare_backend()  # before Keras starts one with a single device


class Scale(tf.Module):
    """Has functions, and variables at several places; counts its calls."""

    def __init__(self):
        super().__init__()
        self.v = tf.Variable(2.0, name="vee")
        self.calls = tf.Variable(0.0, trainable=False)
        self.items = [tf.Variable(1.0), 5]
        self.named = {"a": tf.Variable(5.0)}
        self.pair = (tf.Variable(6.0),)
        self.inner = tf.Module()
        self.inner.w = tf.Variable(1.0)
        self.number = 7

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    def __call__(self, x):
        self.calls.assign_add(1.0)
        return x * self.v

    @tf.function
    def choose(self, x, y=1.0, training=False):
        return {"out": x * self.v + y, "neg": -x} if training else (x, y)

    @tf.function
    def never(self, x):
        return x

    def plain(self, x):
        return x


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save(Scale(), path)
    return path


@pytest.fixture
def loaded(folder):
    return load(folder)


ONES = np.ones((2, 3), np.float32)


# -- the folder ----------------------------------------------------------------------------------


def test_folder_holds_an_index_variables_and_programs(folder):
    assert sorted(os.listdir(folder)) == ["functions", "saved_model.json", "variables"]
    assert os.listdir(folder / "variables") == ["variables.index"]


def test_folder_is_known_by_its_index(folder, tmp_path):
    assert contains_saved_model(folder)
    assert not contains_saved_model(tmp_path)


def test_saving_replaces_what_was_saved_before(tmp_path):
    module = Scale()
    save(module, tmp_path / "model")
    module.v.assign(3.0)
    save(module, tmp_path / "model")
    assert float(load(tmp_path / "model").v) == 3.0
    assert os.listdir(tmp_path) == ["model"]


def test_failed_save_leaves_what_was_saved_before(tmp_path, monkeypatch):
    save(Scale(), tmp_path / "model")

    def refuse(*_):
        raise OSError("no space")

    monkeypatch.setattr("unison.saving.directory.write_index", refuse)
    with pytest.raises(OSError, match="no space"):
        save(Scale(), tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]
    assert float(load(tmp_path / "model").v) == 2.0


def test_format_of_tensorflow_needs_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # it cannot be imported
    with pytest.raises(ImportError, match=r"pip install tensorflow\..*format=\"stablehlo\""):
        save(Scale(), tmp_path / "model", format="tensorflow")
    assert os.listdir(tmp_path) == []


def test_format_of_a_saved_model_is_one_of_two(tmp_path):
    with pytest.raises(ValueError, match=r"'stablehlo' or 'tensorflow'\. Received: 'onnx'"):
        save(Scale(), tmp_path / "model", format="onnx")


def test_model_behind_fsspec_is_saved_and_loaded():
    save(Scale(), "memory://models/scale")
    assert contains_saved_model("memory://models/scale")
    np.testing.assert_equal(load("memory://models/scale")(ONES), 2 * ONES)


REPLACE_AND_DIE = """
import os, sys
from unison.storage import atomic

def replace(content, last_act=lambda: None):
    with atomic.replacing_folder(sys.argv[1], "last") as aside:
        for name in ("first", "last"):
            with open(os.path.join(aside, name), "w") as file:
                file.write(content)
        last_act()

def die():
    os.kill(os.getpid(), 9)

def exchange_and_die(*paths, exchange=atomic._exchange):
    exchange(*paths)
    die()

replace("old")
if sys.argv[2] == "before":
    replace("new", die)
atomic._exchange = exchange_and_die
replace("new")
"""


@pytest.mark.parametrize(("instant", "content"), [("before", "old"), ("behind", "new")])
def test_folder_is_replaced_at_one_instant(tmp_path, instant, content):
    path = tmp_path / "model"
    died = run_program(REPLACE_AND_DIE, path, instant, imported=("jax", "unison"))
    assert died.returncode == -9
    assert {file.read_text() for file in path.iterdir()} == {content}
    assert len(os.listdir(tmp_path)) == 2
    save(Scale(), path)  # which deletes what was aside
    assert os.listdir(tmp_path) == ["model"]
    assert float(load(path).v) == 2.0


def test_folder_behind_fsspec_is_none_until_all_of_it_is_there(monkeypatch):
    import fsspec

    path = "memory://models/replaced"
    save(Scale(), path)

    def stop(*args, **kwargs):
        raise OSError("the connection broke")

    kind = fsspec.get_filesystem_class("memory")
    with monkeypatch.context() as patched:
        patched.setattr(kind, "put", stop)
        with pytest.raises(OSError, match="the connection broke"):
            save(Scale(), path)
    with pytest.raises(NotFoundError, match="There is no saved model"):
        load(path)
    save(Scale(), path)
    assert float(load(path).v) == 2.0


def test_variables_of_a_saved_model_are_a_checkpoint(folder):
    module = Scale()
    module.v.assign(0.0)
    tf.train.Checkpoint(module).read(folder / "variables" / "variables").assert_consumed()
    assert float(module.v) == 2.0
    module.v.assign(0.0)
    tf.train.Checkpoint(module).read(folder).assert_consumed()
    assert float(module.v) == 2.0


@pytest.mark.parametrize("make", [lambda path: None, os.makedirs])
def test_folder_without_a_model_is_an_os_error(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(OSError, match="There is no saved model"):
        load(tmp_path / "x")


def test_model_of_tensorflow_is_named_as_one(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(NotFoundError, match="TensorFlow saved"):
        load(tmp_path)


@pytest.mark.parametrize("tags", [None, "serve", ["serve"]])
def test_model_is_saved_to_serve(folder, tags):
    assert float(tf.saved_model.load(folder, tags=tags).v) == 2.0


def test_model_is_saved_for_nothing_else(folder):
    with pytest.raises(ValueError, match="tags='train'"):
        load(folder, tags="train")


@pytest.mark.parametrize(
    "file", ["saved_model.json", "functions/0.jaxexport", "variables/variables.index"]
)
def test_damaged_file_is_noticed(tmp_path, file):
    save(Scale(), tmp_path / "model")
    path = tmp_path / "model" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataLossError, match="is corrupt"):
        load(tmp_path / "model")


def test_missing_program_is_not_found(tmp_path):
    save(Scale(), tmp_path / "model")
    os.remove(tmp_path / "model" / "functions" / "0.jaxexport")
    with pytest.raises(NotFoundError, match=r"0\.jaxexport"):
        load(tmp_path / "model")


# -- what is saved -------------------------------------------------------------------------------


def test_parts_of_the_object_are_attributes(loaded):
    assert float(loaded.v) == 2.0
    assert float(loaded.items[0]) == 1.0
    assert float(loaded.named["a"]) == 5.0
    assert float(loaded.pair[0]) == 6.0
    assert float(loaded.inner.w) == 1.0


def test_variables_are_those_of_the_object(loaded):
    assert len(loaded.variables) == 6
    assert len(loaded.trainable_variables) == 5
    assert (loaded.v.name, loaded.v.trainable, loaded.calls.trainable) == ("vee", True, False)


@pytest.mark.parametrize("name", ["number", "plain"])
def test_what_is_neither_state_nor_a_saved_function_is_gone(loaded, name):
    assert not hasattr(loaded, name)


@pytest.mark.parametrize("value", [3, [1], None, Scale])
def test_what_has_no_state_cannot_be_saved(tmp_path, value):
    with pytest.raises(ValueError, match="What is saved must be a module"):
        save(value, tmp_path / "model")


def test_variable_that_the_object_does_not_lead_to_is_named(tmp_path):
    outside = tf.Variable(4.0, name="outside")

    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def f(self, x):
            return x * outside

    with pytest.raises(AssertionError, match="'outside'"):
        save(Module(), tmp_path / "model")


def test_function_of_text_is_refused_with_what_can_be_saved(tmp_path):
    module = tf.Module()
    module.f = tf.function(tf.strings.length, input_signature=[tf.TensorSpec([None], tf.string)])
    with pytest.raises(ValueError, match="Save the function of the numbers"):
        save(module, tmp_path / "model")


def test_function_that_was_called_is_saved_for_its_whole_input_signature(tmp_path):
    scale = Scale()
    scale(tf.ones([2, 3]))
    save(scale, tmp_path / "model")
    assert load(tmp_path / "model")(tf.ones([5, 3])).shape == (5, 3)


def test_function_without_a_number_of_axes_is_refused(tmp_path):
    module = tf.Module()
    module.f = tf.function(lambda x: x, input_signature=[tf.TensorSpec(None, tf.float32)])
    with pytest.raises(ValueError, match="how many axes"):
        save(module, tmp_path / "model")


def test_function_that_works_for_some_sizes_only_says_so(tmp_path):
    module = tf.Module()
    spec = tf.TensorSpec([None, None], tf.float32)
    module.f = tf.function(lambda x: x @ x, input_signature=[spec])
    with pytest.raises(ValueError, match="give the size"):
        save(module, tmp_path / "model")


# -- functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 0])
def test_batch_may_have_any_size(loaded, rows):
    x = np.ones((rows, 3), np.float32)
    np.testing.assert_equal(loaded(x), 2 * x)


def test_variables_that_a_function_assigns_are_assigned(loaded):
    loaded(ONES)
    loaded(ONES)
    assert float(loaded.calls) == 2.0


def test_function_uses_the_variables_as_they_are(loaded):
    loaded.v.assign(5.0)
    np.testing.assert_equal(loaded(ONES), 5 * ONES)


@pytest.mark.parametrize("x", [[[1.0, 2.0, 3.0]], np.array([[1.0, 2.0, 3.0]], np.float32)])
def test_lists_and_arrays_of_numpy_are_taken(loaded, x):
    assert loaded(x).tolist() == [[2.0, 4.0, 6.0]]


@pytest.mark.parametrize("x", [np.ones((1, 3), np.int32), np.ones((1, 4), np.float32), "text"])
def test_what_does_not_fit_the_input_signature_is_a_type_error(loaded, x):
    with pytest.raises(TypeError, match=r"It was saved for:\n  \(\(float32\[None, 3\]\)"):
        loaded(x)


def test_arguments_that_the_function_does_not_have_are_a_type_error(loaded):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        loaded(ONES, z=1)


def test_function_that_was_never_called_has_nothing_to_call(loaded):
    with pytest.raises(ValueError, match="was never called"):
        loaded.never(ONES)


def test_results_keep_their_structure(tmp_path):
    module = tf.Module()
    module.f = tf.function(
        lambda x: {"b": (x, None, [x + 1.0]), "a": x * 2.0},
        input_signature=[tf.TensorSpec([], tf.float32)],
    )
    save(module, tmp_path / "model")
    result = load(tmp_path / "model").f(1.0)
    assert jax.tree.map(float, result) == {"b": (1.0, None, [2.0]), "a": 2.0}


def test_function_of_nested_arguments_is_called_with_them(tmp_path):
    module = tf.Module()
    specs = [{"x": tf.TensorSpec([], tf.float32), "y": [tf.TensorSpec([], tf.float32)]}]
    module.f = tf.function(lambda tree: tree["x"] - tree["y"][0], input_signature=specs)
    save(module, tmp_path / "model")
    assert float(load(tmp_path / "model").f({"x": 3.0, "y": [1.0]})) == 2.0


def test_two_batches_that_must_agree_are_saved_for_any_size_of_both(tmp_path):
    module = tf.Module()
    spec = tf.TensorSpec([None], tf.float32)
    module.f = tf.function(lambda x, y: x + y, input_signature=[spec, spec])
    save(module, tmp_path / "model")
    assert load(tmp_path / "model").f([1.0, 2.0], [3.0, 4.0]).tolist() == [4.0, 6.0]


def test_two_batches_that_need_not_agree_may_differ(tmp_path):
    module = tf.Module()
    spec = tf.TensorSpec([None], tf.float32)
    module.f = tf.function(
        lambda x, y: tf.reduce_sum(x) + tf.reduce_sum(y), input_signature=[spec, spec]
    )
    save(module, tmp_path / "model")
    assert float(load(tmp_path / "model").f([1.0], [3.0, 4.0])) == 8.0


def test_branches_and_loops_of_a_function_are_saved(tmp_path):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.v = tf.Variable(0.0)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def f(self, x):
            up, down = lambda: self.v.assign_add(10.0), lambda: self.v.assign_sub(1.0)
            tf.cond(tf.reduce_sum(x) > 0, up, down)
            _, total = tf.while_loop(
                lambda i, _: i < 3, lambda i, total: (i + 1, total + x), (0, x - x)
            )
            return total + self.v

    save(Module(), tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.f([1.0, 2.0]).tolist() == [13.0, 16.0]
    assert loaded.f([-1.0]).tolist() == [6.0]
    assert float(loaded.v) == 9.0


def test_collectives_in_a_function_are_those_of_one_replica(tmp_path):
    module = tf.Module()
    module.f = tf.function(
        lambda x: unison.all_reduce("SUM", x), input_signature=[tf.TensorSpec([None], tf.float32)]
    )
    save(module, tmp_path / "model")
    assert load(tmp_path / "model").f([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_gradient_goes_through_a_function(tmp_path):
    module = tf.Module()
    module.f = tf.function(lambda x: x**3, input_signature=[tf.TensorSpec([None], tf.float32)])
    save(module, tmp_path / "model")
    cube = load(tmp_path / "model").f
    gradient = jax.grad(lambda x: jnp.sum(cube(x)))(jnp.asarray([1.0, 2.0]))
    assert gradient.tolist() == [3.0, 12.0]


def test_loaded_variables_are_trained_by_a_gradient_tape(tmp_path):
    module = Scale()
    save(module, tmp_path / "model")
    loaded = load(tmp_path / "model")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loaded(ONES))
    assert float(tape.gradient(loss, loaded.v)) == 6.0


def test_loaded_model_can_be_saved_again(loaded, tmp_path):
    loaded.v.assign(5.0)
    save(loaded, tmp_path / "again")
    again = load(tmp_path / "again")
    np.testing.assert_equal(again(ONES), 5 * ONES)
    np.testing.assert_equal(again.signatures["serving_default"](ONES)["output_0"], 5 * ONES)


def test_function_can_be_called_as_it_was_called_before(tmp_path):
    module = Scale()
    module.choose(tf.ones([2]))
    module.choose(tf.ones([2]), training=True)
    module.choose(tf.ones([4]), 2.0)
    save(module, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert [part.tolist() for part in loaded.choose(tf.ones([2]))] == [[1.0, 1.0], 1.0]
    assert loaded.choose(tf.ones([2]), training=True)["out"].tolist() == [3.0, 3.0]
    assert float(loaded.choose(tf.ones([4]), 2.0)[1]) == 2.0
    with pytest.raises(ValueError, match="was not saved for these arguments"):
        loaded.choose(tf.ones([7]))
    with pytest.raises(ValueError, match="was not saved for these arguments"):
        loaded.choose(tf.ones([2]), 5.0)


# -- signatures ----------------------------------------------------------------------------------


def test_one_function_with_an_input_signature_is_served(loaded):
    assert list(loaded.signatures) == ["serving_default"]


@pytest.mark.parametrize(
    "call",
    [lambda f: f(x=ONES), lambda f: f(ONES), lambda f: f(x=ONES.tolist())],
)
def test_signature_returns_named_results(loaded, call):
    result = call(loaded.signatures["serving_default"])
    assert list(result) == ["output_0"]
    np.testing.assert_equal(result["output_0"], 2 * ONES)


@pytest.mark.parametrize("arguments", [{}, {"z": ONES}, {"x": ONES, "y": ONES}])
def test_signature_takes_its_arrays_by_name(loaded, arguments):
    with pytest.raises(TypeError, match=r"takes the arrays \['x'\]"):
        loaded.signatures["serving_default"](**arguments)


def test_signature_refuses_another_dtype(loaded):
    with pytest.raises(TypeError, match=r"takes \{x: float32\[None, 3\]\}. Received: int32"):
        loaded.signatures["serving_default"](x=np.ones((1, 3), np.int32))


def test_signature_says_what_it_takes_and_returns(loaded):
    signature = loaded.signatures["serving_default"]
    args, kwargs = signature.structured_input_signature
    assert (args, list(kwargs)) == ((), ["x"])
    assert (kwargs["x"].shape, kwargs["x"].dtype, kwargs["x"].name) == ((None, 3), np.float32, "x")
    assert signature.structured_outputs["output_0"].shape == (None, 3)
    assert {v.name for v in signature.variables} >= {"vee"}


def test_signatures_are_named_by_a_dictionary(tmp_path):
    module = Scale()
    spec = tf.TensorSpec([None], tf.float32)
    choose = module.choose.get_concrete_function(spec, training=True)
    tf.saved_model.save(
        module, tmp_path / "m", signatures={"serving_default": module.__call__, "choose": choose}
    )
    loaded = tf.saved_model.load(tmp_path / "m")
    assert sorted(loaded.signatures) == ["choose", "serving_default"]
    result = loaded.signatures["choose"](x=np.ones(2, np.float32))
    assert {name: value.tolist() for name, value in result.items()} == {
        "out": [3.0, 3.0],
        "neg": [-1.0, -1.0],
    }
    with pytest.raises(TypeError, match="takes the arrays"):
        loaded.signatures["choose"](x=np.ones(2, np.float32), y=3.0)


@pytest.mark.parametrize("signature", [3, lambda x: x, Scale.choose], ids=["3", "lambda", "any"])
def test_what_has_no_one_signature_cannot_be_one(tmp_path, signature):
    with pytest.raises(ValueError, match=r"A signature is a tf\.function"):
        save(Scale(), tmp_path / "model", signatures=signature)


# -- strategies ----------------------------------------------------------------------------------


def test_model_loaded_in_a_scope_runs_on_every_replica(folder, four_replicas):
    with four_replicas.scope():
        loaded = load(folder)
    results = four_replicas.run(loaded.signatures["serving_default"], args=(ONES,))
    for result in results["output_0"].values:
        np.testing.assert_equal(result, 2 * ONES)


def test_replica_without_an_example_gets_an_empty_result(folder, four_replicas):
    with four_replicas.scope():
        infer = load(folder).signatures["serving_default"]
    x = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    (batch,) = four_replicas.experimental_distribute_dataset([x])
    result = four_replicas.run(infer, args=(batch,))["output_0"]
    assert [part.shape for part in result.values] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    np.testing.assert_equal(np.concatenate(result.values), 2 * x)


def test_variables_loaded_in_a_scope_are_the_strategy_s_own(folder, two_replicas):
    with two_replicas.scope():
        loaded = load(folder)
    assert loaded.v.cell.placement == two_replicas.placement


def test_model_of_replicas_is_saved_for_one(tmp_path, four_replicas):
    with four_replicas.scope():
        module = Scale()
    module.v.assign(9.0)
    save(module, tmp_path / "model")
    np.testing.assert_equal(load(tmp_path / "model")(ONES), 9 * ONES)


def test_annotations_of_variables_are_kept(tmp_path, two_replicas):
    module = unison.Module()
    module.total = tf.Variable(
        4.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    save(module, tmp_path / "model")
    with two_replicas.scope():
        total = load(tmp_path / "model").total
    assert total.synchronization is tf.VariableSynchronization.ON_READ
    assert total.aggregation is tf.VariableAggregation.SUM
    assert not total.trainable


@pytest.mark.parametrize(("value", "copies"), [(10.0, [5.0, 5.0]), (7, [4, 3])])
def test_a_sum_over_the_replicas_is_loaded_as_it_was(tmp_path, two_replicas, value, copies):
    module = unison.Module()
    module.total = unison.Variable(
        value,
        synchronization=unison.VariableSynchronization.ON_READ,
        aggregation=unison.VariableAggregation.SUM,
    )
    save(module, tmp_path / "model")
    with two_replicas.scope():
        total = load(tmp_path / "model").total
    assert total.numpy() == value
    assert [copy.item() for copy in two_replicas.experimental_local_results(total)] == copies


# -- Keras ---------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)


def classifier():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(2, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
        ]
    )
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def model():
    return classifier()


@pytest.fixture(scope="module")
def keras_folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("keras") / "model"
    keras_directory.save_model(model, path)
    return path


def test_keras_model_is_served_for_inference(model, keras_folder):
    loaded = tf.saved_model.load(keras_folder)
    infer = loaded.signatures["serving_default"]
    assert list(infer.structured_input_signature[1]) == ["inputs"]
    np.testing.assert_allclose(infer(X)["output_0"], model(X), rtol=1e-5, atol=1e-6)
    assert len(loaded.trainable_variables) == 6


def test_keras_model_is_served_under_a_strategy(model, keras_folder, two_replicas):
    with two_replicas.scope():
        infer = tf.saved_model.load(keras_folder).signatures["serving_default"]
        batches = two_replicas.experimental_distribute_dataset([X])
    (result,) = [two_replicas.run(infer, args=(batch,)) for batch in batches]
    gathered = np.concatenate(result["output_0"].values)
    np.testing.assert_allclose(gathered, model(X), rtol=1e-5, atol=1e-6)


def test_keras_model_is_rebuilt_from_its_folder(model, keras_folder):
    rebuilt = keras_directory.load_model(keras_folder)
    np.testing.assert_equal(rebuilt.get_weights(), model.get_weights())
    assert rebuilt.optimizer is not None


def test_keras_model_is_rebuilt_without_compiling(keras_folder):
    assert not keras_directory.load_model(keras_folder, compile=False).compiled


def test_keras_model_is_rebuilt_in_a_scope_and_trains_there(keras_folder, two_replicas):
    with two_replicas.scope():
        rebuilt = keras_directory.load_model(keras_folder)
    rebuilt.fit(X, np.zeros((5, 3)), verbose=0)
    assert rebuilt.weights[0].cell.placement == two_replicas.placement


def test_keras_model_in_several_parts_names_its_inputs_in_order(tmp_path):
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, {"sum": keras.layers.Add()([a, b]), "b": b})
    save(model, tmp_path / "model")
    infer = load(tmp_path / "model").signatures["serving_default"]
    assert list(infer.structured_input_signature[1]) == ["inputs", "inputs_1"]
    result = infer(inputs=ONES, inputs_1=2 * ONES)
    np.testing.assert_equal(result["sum"], 3 * ONES)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5, name="output_layer")

    def call(self, x):
        return self.dense(x)


class MadeOf(Subclassed):
    def __init__(self, thing):
        super().__init__()
        self.made_of = type(thing)


def test_model_that_is_not_built_is_saved_without_a_signature(tmp_path):
    save(Subclassed(), tmp_path / "model")
    assert load(tmp_path / "model").signatures == {}


def test_called_model_is_served_for_any_batch(tmp_path):
    model = Subclassed()
    model(np.ones((4, 2), np.float32))
    save(model, tmp_path / "model")
    infer = load(tmp_path / "model").signatures["serving_default"]
    assert infer(np.ones((7, 2), np.float32))["output_0"].shape == (7, 5)


def test_model_that_cannot_be_rebuilt_is_saved_with_a_warning(tmp_path, caplog):
    model = MadeOf(object())
    model(ONES)
    keras_directory.save_model(model, tmp_path / "model")
    assert "load_model cannot rebuild it" in caplog.text
    assert tf.saved_model.load(tmp_path / "model").signatures
    with pytest.raises(NotFoundError, match="no Keras model to rebuild"):
        keras_directory.load_model(tmp_path / "model")


def test_exported_model_has_a_function_to_serve_and_no_code(model, tmp_path):
    keras_directory.export_model(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert sorted(loaded.signatures) == ["serve", "serving_default"]
    assert list(loaded.signatures["serve"].structured_input_signature[1]) == ["image"]
    np.testing.assert_allclose(loaded.serve(X), model(X), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotFoundError, match="it was exported"):
        keras_directory.load_model(tmp_path / "model")


def test_model_that_is_not_built_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match="built"):
        keras_directory.export_model(Subclassed(), tmp_path / "model")


def test_model_goes_through_a_folder_by_the_words_of_keras_2(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.save(tmp_path / "model")
    rebuilt = tf.keras.models.load_model(tmp_path / "model")
    np.testing.assert_equal(rebuilt.get_weights(), model.get_weights())


def test_options_of_the_tutorial_are_taken(model, tmp_path):
    options = tf.saved_model.SaveOptions(experimental_io_device="/job:localhost")
    tf.saved_model.save(model, tmp_path / "model", options=options)
    options = tf.saved_model.LoadOptions(experimental_io_device="/job:localhost")
    assert tf.saved_model.load(tmp_path / "model", options=options).signatures
