"""What an import loads, and that public names are there when they are used."""

import ast
import importlib
import json
import types
from pathlib import Path

import pytest

from subprocess_program import run_program
from unison import lazy_loader

PACKAGE = Path(__file__).parents[2] / "src" / "unison"

#: The packages that load their names when they are used.
LAZY = sorted(
    ".".join(stub.parent.relative_to(PACKAGE.parent).parts)
    for stub in PACKAGE.rglob("__init__.pyi")
)

#: What `import unison` loads of Unison: what is registered with other rooms, and the log.
OF_UNISON = {
    "unison",
    "unison.data",
    "unison.conversion",
    "unison.data.observers",
    "unison.hooks",
    "unison.interrupts",
    "unison.lazy_loader",
    "unison.runtime",
    "unison.runtime.launching",
    "unison.runtime.launching.watching",
    "unison.runtime.logs",
    "unison.strategies",
    "unison.strategies.keras_additions",
    "unison.strategies.observing",
    "unison.strategies.scope_observers",
    "unison.thread_local",
}

#: What `import unison.tf` loads beyond that: what it changes in JAX, and registers.
OF_THE_FACE = {
    "unison.errors",
    "unison.identity_key",
    "unison.runtime.uncaught",
    "unison.storage",
    "unison.storage.decoding",
    "unison.tf",
    "unison.tf.dtypes",
    "unison.tf.keras_imports",
    "unison.tf.missing",
    "unison.tf.patches",
    "unison.tf.random_stream",
    "unison.tf.tensor_spec",
    "unison.tf.trace_types",
    "unison.tf.variable_slices",
    "unison.tracebacks",
    "unison.train",
    "unison.train.random_state",
    "unison.unsupported",
}


def answer_of(program: str, **options) -> object:
    """What a program prints as JSON, in a fresh process."""
    finished = run_program(program, **options)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def loaded_by(statement: str) -> set[str]:
    """The modules that a statement loads which `import jax` does not, without Python's own."""
    program = f"""
import jax, json, sys
before = set(sys.modules)
{statement}
new = set(sys.modules) - before
print(json.dumps([name for name in new if name.split(".")[0] not in sys.stdlib_module_names]))
"""
    return set(answer_of(program))


def test_importing_unison_loads_jax_and_a_few_small_modules():
    assert loaded_by("import unison") == OF_UNISON


def test_importing_the_face_loads_what_it_changes_and_registers():
    assert loaded_by("import unison.tf") == OF_UNISON | OF_THE_FACE


def test_importing_the_face_loads_no_server_of_pythons_and_no_processes():
    heavy = ("http.server", "multiprocessing", "socketserver", "ssl")
    program = f"""
import jax, json, sys
before = set(sys.modules)
import unison.tf
print(json.dumps([name for name in {heavy} if name in set(sys.modules) - before]))
"""
    assert answer_of(program) == []


@pytest.mark.parametrize("package", LAZY)
def test_each_name_of_a_stub_is_an_attribute(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", LAZY)
def test_no_name_that_is_loaded_later_is_that_of_another_file(package):
    """Importing the file would put the module in the name's place."""
    module = importlib.import_module(package)
    folder = Path(module.__file__).parent
    files = {file.stem for file in folder.glob("*.py")} | {
        file.parent.name for file in folder.glob("*/__init__.py")
    }
    taken = {name: getattr(module, name) for name in files & set(module.__all__)}
    assert {name: f"{package}.{name}" for name in taken} == {
        name: getattr(value, "__name__", value) for name, value in taken.items()
    }


@pytest.mark.parametrize("package", LAZY)
def test_a_stub_names_only_what_is_imported(package):
    stub = PACKAGE.parent.joinpath(*package.split("."), "__init__.pyi").read_text()
    kinds = {type(statement).__name__ for statement in ast.parse(stub).body}
    assert kinds <= {"Import", "ImportFrom", "AnnAssign", "FunctionDef"}


def test_threads_that_use_names_for_the_first_time_at_once_get_the_same_ones():
    program = """
import json, random, sys, threading
import unison, unison.tf
packages = [unison, unison.tf, unison.data, unison.train, unison.strategies, unison.runtime]
names = [(package, name) for package in packages for name in package.__all__]
start = threading.Barrier(8)
found, errors = [], []

def use(seed):
    order = random.Random(seed).sample(names, len(names))
    start.wait()
    try:
        found.append({(p.__name__, name): getattr(p, name) for p, name in order})
    except BaseException as error:
        errors.append(repr(error))

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
[thread.start() for thread in threads]
[thread.join(90) for thread in threads]
same = all(one[key] is found[0][key] for one in found for key in found[0])
print(json.dumps([errors, len(found), same]))
"""
    assert answer_of(program, timeout=110) == [[], 8, True]


def test_a_scope_opens_while_another_thread_imports_what_observes_scopes():
    program = """
import os, sys, threading
os.environ["KERAS_BACKEND"] = "jax"
import keras, unison
from unison.strategies import scope_observers

strategy = unison.OneDeviceStrategy("CPU:0")
observe, is_open = scope_observers.observe_scopes, threading.Event()

def observe_late(observer):  # in the import of unison.keras, once the scope is being opened
    is_open.wait(3)
    observe(observer)

class Tells:
    def opened(self): is_open.set()
    def closed(self): pass

scope_observers._observers.insert(0, Tells())
scope_observers.observe_scopes = observe_late
importing = threading.Thread(target=lambda: __import__("unison.keras"), daemon=True)
importing.start()
while "unison.keras.scope" not in sys.modules:
    pass

def use():
    with strategy.scope():
        print(type(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])).__name__)

using = threading.Thread(target=use, daemon=True)
using.start()
using.join(30), importing.join(5)
print(using.is_alive(), importing.is_alive(), flush=True)
os._exit(0)
"""
    assert run_program(program, timeout=100).stdout.split() == ["Sequential", "False", "False"]


def test_only_the_outermost_import_that_waited_for_another_thread_is_repeated(monkeypatch):
    deadlock = type("_DeadlockError", (RuntimeError,), {})  # the name of Python's own
    begun = []

    def import_module(name):
        begun.append(name)
        if name == "outer":
            return lazy_loader._imported("inner")
        if begun.count("inner") < 3:
            raise deadlock("deadlock detected")
        return "the module"

    fake = types.SimpleNamespace(import_module=import_module)
    monkeypatch.setattr(lazy_loader, "importlib", fake)
    assert lazy_loader._imported("outer") == "the module"
    assert begun == 3 * ["outer", "inner"]


@pytest.mark.parametrize("error", [RuntimeError("it fails"), ImportError("pip install x")])
def test_a_module_that_fails_is_imported_once(error, monkeypatch):
    begun = []

    def import_module(name):
        begun.append(name)
        raise error

    monkeypatch.setattr(
        lazy_loader, "importlib", types.SimpleNamespace(import_module=import_module)
    )
    with pytest.raises(type(error), match=str(error)):
        lazy_loader._imported("module")
    assert begun == ["module"]


def test_a_star_imports_all_public_names():
    program = """
import json, unison
names = {}
exec("from unison import *", names)
print(json.dumps([name for name in unison.__all__ if name not in names]))
"""
    assert answer_of(program, imported=("jax",)) == []


def test_names_are_listed_before_they_are_loaded():
    program = """
import json, sys, unison
names = dir(unison)
loaded = "unison.data.dataset" in sys.modules
print(json.dumps(["MirroredStrategy" in names, "data" in names, loaded]))
"""
    assert answer_of(program, imported=("jax",)) == [True, True, False]


def test_help_shows_what_is_loaded_later():
    program = """
import json, pydoc, unison
text = pydoc.plain(pydoc.render_doc(unison))
print(json.dumps(["class MirroredStrategy(" in text, "all_reduce(" in text]))
"""
    assert answer_of(program, imported=("jax",)) == [True, True]


def test_a_name_that_is_loaded_later_is_unpickled_in_a_fresh_process():
    program = """
import json, pickle, cloudpickle, subprocess, sys, unison, unison.tf as tf
things = (unison.MirroredStrategy, unison.data.Dataset, tf.reduce_sum, tf.TensorSpec([2], "int32"))
for dumps in (pickle.dumps, cloudpickle.dumps):
    assert pickle.loads(dumps(things)) == things
read = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer)))"
done = subprocess.run([sys.executable, "-c", read], input=pickle.dumps(things), capture_output=True)
print(json.dumps([done.stdout.decode().strip(), done.stderr.decode()]))
"""
    assert answer_of(program, imported=("jax",), timeout=90) == ["4", ""]


@pytest.mark.parametrize(
    "program",
    [
        "import unison.tf as tf\nDense = tf.keras.layers.Dense",
        "from unison.tf import keras\nDense = keras.layers.Dense",
        "import unison.tf.keras\nDense = unison.tf.keras.layers.Dense",
        "import unison.tf.keras.layers as layers\nDense = layers.Dense",
        "from unison.tf.keras.layers import Dense",
    ],
    ids="attribute from-package module module-below from-module".split(),
)
def test_keras_is_found_in_the_face_however_it_is_written(program):
    source = f"import json\n{program}\nprint(json.dumps(Dense(3).units))"
    assert answer_of(source, imported=("jax",), timeout=90) == 3


#: A step that assigns, and an argument of Keras 2: Keras on JAX itself takes neither.
TENSORFLOWS_MODEL = """
import json, sys
import numpy as np
class Model(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
inputs = keras.Input((2,))
model = Model(inputs, keras.layers.Dense(1)(inputs))
model.compile(keras.optimizers.SGD(lr=0.1), "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
print(json.dumps([int(model.optimizer.iterations), keras.__spec__.loader.__class__.__name__]))
"""


@pytest.mark.parametrize("backend", ["tensorflow", ""], ids=["variable", "file"])
@pytest.mark.parametrize(
    "imports",
    [
        "import unison.tf as tf; import keras",
        "import unison.tf as tf; from keras import layers; import keras",
        "import unison.tf as tf, importlib.util; importlib.util.find_spec('keras'); import keras",
        "import unison.tf as tf; import unison.keras; import keras",
        "import os; os.environ['KERAS_BACKEND'] = 'jax'; import keras; import unison.tf as tf",
    ],
    ids="after module-of-it asked-for ours before".split(),
)
def test_keras_by_its_own_name_is_tensorflows(imports, backend, tmp_path):
    # What Keras writes where it has been used with TensorFlow.
    (tmp_path / "keras.json").write_text('{"backend": "tensorflow"}')
    env = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": backend}
    source = imports + TENSORFLOWS_MODEL
    assert answer_of(source, imported=("jax",), env=env, timeout=90) == [1, "SourceFileLoader"]


def test_keras_on_another_backend_is_left_alone(tmp_path):
    program = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "numpy"
import keras
import unison.tf
print(json.dumps([keras.backend.backend(), "unison.keras" in sys.modules]))
"""
    assert answer_of(program, imported=("jax",)) == ["numpy", False]


def test_a_name_that_does_not_exist_is_an_attribute_error():
    import unison

    with pytest.raises(AttributeError, match="module 'unison' has no attribute 'MiroredStrategy'"):
        unison.MiroredStrategy  # noqa: B018


def test_a_name_that_does_not_exist_cannot_be_imported():
    with pytest.raises(ImportError, match="cannot import name 'MiroredStrategy' from 'unison'"):
        exec("from unison import MiroredStrategy")


def test_a_package_without_its_stub_says_what_is_missing(tmp_path):
    from unison.lazy_loader import attach_stub

    with pytest.raises(ImportError, match=r"names of package are listed in its __init__\.pyi"):
        attach_stub("package", str(tmp_path / "__init__.py"))


def test_the_state_of_the_random_stream_is_restored_before_it_is_used():
    program = """
import json, sys
import unison.tf as tf
from unison.train import random_state
loaded = "unison.tf.random_keys" in sys.modules
random_state.set_of_libraries({"tf.random": {"seed": 7, "draws": 3, "of_programs": None}})
continued = tf.random.uniform([2]).tolist()
tf.random.set_seed(7)
print(json.dumps([loaded, continued == [tf.random.uniform([2]).tolist() for _ in range(4)][3]]))
"""
    assert answer_of(program, imported=("jax",)) == [False, True]
