"""What a user sees of a failure: one traceback, which ends in the user's own line."""

import contextlib
import functools
import json
import re
import sys
import textwrap
import traceback
import types

import jax
import jax.numpy as jnp
import pytest

import unison
from subprocess_program import imported_by, run_program
from unison.runtime import uncaught
from unison.tracebacks import NOTE, filter_traceback, is_filtering, user_frames

TWO = 'strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])\n'

MODEL = """
import keras
import numpy as np
import unison
{strategy}
class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        {call}
        return self.dense(x)
{rest}
with strategy.scope():
    model = Network()
    model.compile("sgd", {loss})
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
model.fit(x, y, verbose=0, callbacks=[{callback}])
"""


def model_with(call="", rest="", loss="'mse'", callback=""):
    return MODEL.format(strategy=TWO, call=call or "pass", rest=rest, loss=loss, callback=callback)


#: Programs that fail, and what the last line of the user's does that is to be shown.
PROGRAMS = {
    "in a model's call": (model_with("raise ValueError('mine')  # here"), "ValueError"),
    "in a model's call while it trains": (
        model_with("assert not training, 'mine'  # here"),
        "AssertionError",
    ),
    "in an operation of the model's": (
        model_with("_ = keras.ops.matmul(x, x) if training else None  # here"),
        "TypeError",
    ),
    "in a train_step": (
        model_with(
            rest="    def train_step(self, state, data):\n        {}['mine']  # here",
        ),
        "KeyError: 'mine'",
    ),
    "in a callback": (
        model_with(
            rest="""class Mine(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        1 / 0  # here
""",
            callback="Mine()",
        ),
        "ZeroDivisionError",
    ),
    "in the arguments of compile": (
        model_with(loss="'no such loss'").replace("callbacks=[])", "callbacks=[])  # here"),
        "ValueError: Could not interpret loss identifier",
    ),
    "in a function that is run": (
        f"""
import jax.numpy as jnp
import unison
{TWO}
def step(x):
    return jnp.dot(x, jnp.ones(3))  # here
strategy.run(step, args=(jnp.ones(4),))
""",
        "TypeError",
    ),
    "by a branch on an array": (
        f"""
import jax.numpy as jnp
import unison
{TWO}
def step(x):
    if x > 1:  # here
        return x
strategy.run(step, args=(jnp.ones(()),))
""",
        "unison.program.control_flow.ControlFlowError",
    ),
    "by an argument of a strategy's": (
        f"""
import jax.numpy as jnp
import unison
{TWO}
strategy.reduce("SUM", jnp.ones(3))  # here
""",
        "ValueError",
    ),
    "by an argument of a constructor": (
        """
import unison
unison.OneDeviceStrategy("CPU:0")
unison.MirroredStrategy(["no device"])  # here
""",
        "unison.runtime.device_strings.",
    ),
    "in a tf.function": (
        """
import unison.tf as tf
@tf.function
def square(x):
    return tf.matmul(x, tf.ones((3, 3)))  # here
square(tf.ones((2, 2)))
""",
        "unison.errors.InvalidArgumentError",
    ),
    "in an operation outside of functions": (
        """
import unison.tf as tf
x = tf.ones((2, 2))
x + tf.ones((3, 3))  # here
""",
        "TypeError",
    ),
    "in an operation of a variable on a tape": (
        """
import unison.tf as tf
v = tf.Variable(tf.ones((2, 2)))
with tf.GradientTape() as tape:
    tf.matmul(v, tf.ones((3, 3)))  # here
""",
        "unison.errors.InvalidArgumentError",
    ),
    "in a layer of one's own": (
        """
import unison.tf as tf
class Failing(tf.keras.layers.Layer):
    def call(self, x):
        raise ValueError("mine")  # here
Failing()(tf.ones(2))
""",
        "ValueError",
    ),
    "where there is no checkpoint": (
        """
import unison.tf as tf
tf.train.Checkpoint().restore("/there/is/none")  # here
""",
        "unison.errors.NotFoundError",
    ),
    "in the function of a map": (
        """
from unison.data import Dataset
def odd(x):
    assert x % 2, "mine"  # here
    return x
for batch in Dataset.range(10).map(odd).batch(2):
    pass
""",
        "AssertionError",
    ),
    "in the function of a map that runs in threads and ahead": (
        """
from unison.data import Dataset
def odd(x):
    assert x % 2, "mine"  # here
    return x
for batch in Dataset.range(10).map(odd, num_parallel_calls=2).batch(2).prefetch(2):
    pass
""",
        "AssertionError",
    ),
}


@functools.cache
def shown_by(program, **given):
    """Returns what a program that fails writes to its standard error."""
    done = run_program(
        textwrap.dedent(program),
        imported=imported_by(program),
        env={"UNISON_CPU_DEVICES": "2", "KERAS_BACKEND": "jax", **given},
        timeout=120,
    )
    assert done.returncode != 0
    return done.stderr


def places_in(shown):
    """Returns file and line of all frames."""
    return [(name, int(line)) for name, line in re.findall(r'File "(.*?)", line (\d+)', shown)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_one_traceback_of_an_error_ends_in_the_users_line(name):
    program, _ = PROGRAMS[name]
    shown = shown_by(program)
    assert shown.count("Traceback") == 1, shown
    file, line = places_in(shown)[-1]
    assert file == "<string>", shown
    assert "# here" in program.splitlines()[line - 1], shown


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_traceback_has_no_frame_of_a_library(name):
    files = [file for file, _ in places_in(shown_by(PROGRAMS[name][0]))]
    libraries = [file for file in files if re.search(r"/(unison|jax|jaxlib|keras)/", file)]
    assert libraries == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_error_keeps_its_class(name):
    program, message = PROGRAMS[name]
    assert f"\n{message}" in shown_by(program)


@pytest.mark.parametrize("library", ["unison", "jax", "keras"])
def test_the_log_level_debug_shows_the_frames_of(library):
    shown = shown_by(PROGRAMS["in a model's call while it trains"][0], UNISON_LOG="debug")
    assert f"/{library}/" in "".join(file for file, _ in places_in(shown))


def test_the_log_level_debug_shows_what_led_to_an_error():
    shown = shown_by(PROGRAMS["in a tf.function"][0], UNISON_LOG="debug")
    assert "The above exception was the direct cause" in shown


def test_jax_option_off_shows_all_frames():
    shown = shown_by(PROGRAMS["in a tf.function"][0], JAX_TRACEBACK_FILTERING="off")
    assert "/unison/" in "".join(file for file, _ in places_in(shown))


# -- errors that a program catches -----------------------------------------------------------------


@pytest.fixture(autouse=True)
def filtering():
    assert is_filtering()


def raised(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args)
    return caught.value


def names_in(error):
    return [frame.name for frame in user_frames(error)]


def step_that_fails(x):
    raise LookupError("mine") from KeyError("also mine")


def test_an_error_that_is_caught_has_the_users_frames(mirrored):
    def train():
        mirrored.run(step_that_fails, args=(jnp.ones(()),))

    error = raised(train)
    trace, names = error.__traceback__, []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-2:] == ["train", "step_that_fails"]
    assert names == names_in(error)


def test_what_the_user_raised_an_error_from_stays(mirrored):
    error = raised(lambda: mirrored.run(step_that_fails, args=(jnp.ones(()),)))
    assert isinstance(error.__cause__, KeyError)


def test_what_a_library_raised_an_error_from_is_its_context(mirrored):
    error = raised(lambda: mirrored.run(lambda x: [y for y in x if y > 1], args=(jnp.ones(2),)))
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert isinstance(error.__context__, jax.errors.ConcretizationTypeError)


def test_one_note_says_how_to_see_everything(mirrored):
    error = raised(lambda: mirrored.run(step_that_fails, args=(jnp.ones(()),)))
    assert error.__notes__ == [NOTE]


def test_frames_of_the_standard_library_stay_where_the_user_calls_it(mirrored):
    error = raised(lambda: mirrored.run(lambda: json.loads("{")))
    assert names_in(error)[-1] == "raw_decode"


def test_the_end_of_an_iteration_is_let_through():
    @filter_traceback
    def at_the_end():
        raise StopIteration

    assert raised(at_the_end).__traceback__.tb_next is not None


@pytest.fixture
def mirrored():
    return unison.MirroredStrategy(["CPU:0", "CPU:1"])


# -- the hook --------------------------------------------------------------------------------------


def test_a_hook_of_the_programs_own_stays(monkeypatch):
    def own(kind, error, trace):
        pass

    monkeypatch.setattr("sys.excepthook", own)
    uncaught.install()
    assert sys.excepthook is own


class Shell:
    """What IPython's shell has to do with errors."""

    custom_exceptions = ()

    def set_custom_exc(self, kinds, show):
        self.custom_exceptions, self.show = kinds, show

    def showtraceback(self, error, tb_offset=None):
        self.shown = error


def test_a_notebook_shows_the_users_frames(monkeypatch):
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    uncaught.install()
    error = raised(jnp.matmul, jnp.ones((2, 2)), jnp.ones((3, 3)))
    trace = error.__traceback__
    assert isinstance(error, shell.custom_exceptions)
    shell.show(shell, type(error), error, trace)
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(shell.shown[2])]
    assert frames == [__file__]


def test_a_notebooks_own_hook_stays(monkeypatch):
    shell = Shell()
    shell.custom_exceptions = (ValueError,)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    uncaught.install()
    assert shell.custom_exceptions == (ValueError,)


def test_a_scope_of_the_programs_own_ends_where_its_interrupted_end_is_shown(mirrored):
    """A notebook keeps the error: nothing else would end the scope."""

    def interrupted(frame, event, argument):
        if event == "call" and frame.f_code is end:
            raise KeyboardInterrupt

    end = contextlib._GeneratorContextManager.__exit__.__code__

    with pytest.raises(KeyboardInterrupt) as caught, mirrored.scope():
        sys.setprofile(interrupted)
    sys.setprofile(None)
    assert unison.has_strategy()
    uncaught.show(KeyboardInterrupt, caught.value, caught.tb)
    assert not unison.has_strategy()


def test_an_error_without_the_users_frames_is_shown_whole(capsys):
    error = raised(unison.OneDeviceStrategy, "no device")
    error.__traceback__ = error.__traceback__.tb_next
    uncaught.show(type(error), error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err


# -- Ctrl-C ----------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt_soon():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
"""
LOOPS = {
    "fit": """
import keras, numpy as np, unison
with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
model.fit(x, y, verbose=0)
interrupt_soon()
model.fit(x, y, verbose=0, epochs=10**6)  # here
""",
    "run": """
import jax.numpy as jnp, unison
strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
strategy.run(lambda x: x, args=(jnp.ones(3),))
interrupt_soon()
def train(): strategy.run(jnp.sin, args=(jnp.ones(3),))  # here
while True: train()  # here
""",
    "operations": """
import unison.tf as tf
x = tf.ones((64, 64))
x = tf.matmul(x, x) * 1e-3
interrupt_soon()
while True: x = tf.matmul(x, x) * 1e-3  # here
""",
    "a pass over a dataset, with worker processes": """
import time
from unison.data import Dataset
def slow(x):
    time.sleep(0.01)
    return x
numbers = Dataset.range(10**7).map(slow, num_parallel_calls=2, executor="process")
batches = iter(numbers.batch(2).prefetch(2))
next(batches)
interrupt_soon()
for batch in batches: pass  # here
""",
}


def test_methods_that_a_dataclass_of_a_library_has_made_are_the_librarys():
    made = {"__name__": "jax._src.example", "__file__": jax.__file__}
    exec("def __init__(): raise KeyboardInterrupt", made)  # in the file "<string>"
    with pytest.raises(KeyboardInterrupt) as caught:
        made["__init__"]()
    names = [frame.name for frame in user_frames(caught.value)]
    assert names == ["test_methods_that_a_dataclass_of_a_library_has_made_are_the_librarys"]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_interrupt_prints_one_line_that_says_where_the_program_was(loop):
    program = INTERRUPTED + LOOPS[loop]
    shown = shown_by(program)
    assert len(shown.splitlines()) == 1, shown
    place = re.fullmatch(r"KeyboardInterrupt: <string>, line (\d+), in .*\n", shown)
    assert place is not None, shown
    assert "# here" in program.splitlines()[int(place[1]) - 1]


def test_a_program_that_is_interrupted_ends_by_the_signal():
    program = INTERRUPTED + LOOPS["run"]
    done = run_program(program, imported=("jax", "unison"), env={"UNISON_CPU_DEVICES": "2"})
    assert done.returncode in (-2, 130)


def test_the_log_level_debug_shows_where_an_interrupt_arrived():
    assert "Traceback" in shown_by(INTERRUPTED + LOOPS["run"], UNISON_LOG="debug")
