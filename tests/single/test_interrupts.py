"""Signal handlers that raise, Ctrl-C among them, never leave variables between two steps."""

import contextlib
import functools
import os
import pathlib
import random
import signal
import sys
import threading
import time

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.backend.common.variables import AutocastScope, initialize_all_variables

import unison
import unison.tf as tf
from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program
from unison.interrupts import (
    is_of_a_signal_handler,
    signals_held,
    wait_for_event,
    wait_until,
    without_signals,
)
from unison.keras import variables
from unison.lifting import current_lift
from unison.runtime import private_jax
from unison.runtime.private_jax import Recording
from unison.strategies import scope_observers
from unison.strategies.replica_share import current_share

#: A program: its form, how many signals, a seed and the loops are its arguments.
TESTS = pathlib.Path(__file__).parents[1]
PROGRAM = (TESTS / "interruption_program.py").read_text()
PATH = os.pathsep.join([PYTHON_PATH, str(TESTS)])  # the program imports modules beside it


class AlarmError(Exception):
    """What the handlers raise."""


@pytest.fixture
def handler():
    """Handlers of two signals, which raise."""

    def raising(number, frame):
        raise AlarmError(number)

    signals = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, raising) for number in signals]
    yield raising
    for number, previous in zip(signals, before, strict=True):
        signal.signal(number, previous)


class Arriving:
    """A metric's value for which the program waits when a signal arrives."""

    def __array__(self, dtype=None, copy=None):
        signal.raise_signal(signal.SIGUSR1)
        return np.zeros((), dtype)

    __float__ = __array__


@pytest.mark.parametrize("loop", ["fit", "evaluate"])
def test_a_signal_is_not_lost_where_an_epochs_metrics_are_waited_for(handler, loop):
    """Keras waits inside a bare `except`."""
    import keras

    import unison

    class Model(keras.Sequential):
        is_at_the_end = False

        def get_metrics_result(self):
            return {"loss": Arriving()} if self.is_at_the_end else super().get_metrics_result()

    class End(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.is_at_the_end = True

        on_test_batch_end = on_train_batch_end

    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Model([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(AlarmError):
        getattr(model, loop)(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[End()])


@pytest.mark.parametrize("scales_loss", [False, True])
def test_averages_of_no_step_do_not_replace_the_weights(handler, scales_loss):
    """Keras replaces weights by their moving averages, zeros at first, wherever `fit` ends."""
    import keras

    import unison

    class Begin(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            signal.raise_signal(signal.SIGUSR1)

    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, use_ema=True)
        if scales_loss:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse")
    before = model.get_weights()
    with pytest.raises(AlarmError):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[Begin()])
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_a_metric_whose_reset_is_interrupted_is_zero_in_all_variables(handler):
    import keras

    import unison

    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        metric = keras.metrics.Mean()
    metric.update_state([1.0, 2.0])
    assign = metric.count.assign

    def interrupted(value):
        signal.raise_signal(signal.SIGUSR1)
        return assign(value)

    vars(metric.count)["assign"] = interrupted
    with pytest.raises(AlarmError):
        metric.reset_state()
    assert [float(variable.numpy()) for variable in metric.variables] == [0, 0]


def interrupted_at_line(number, module, call):
    """Calls `call` until the line of this number of a module; returns whether it came to it.

    The handler that is called there may raise an `AlarmError`, or return.
    """
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        left -= event == "line"
        if event == "line" and not left:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    try:
        call()
    except AlarmError:
        return True
    finally:
        sys.settrace(None)
    return left <= 0


@pytest.mark.parametrize("use", ["predict", "train_on_batch"])
def test_a_handler_that_uses_the_model_that_fit_trains_does_so_or_is_told_where_to(use):
    from unison.keras import trainer

    x, y = np.ones((4, 3), np.float32), np.zeros((4, 1), np.float32)
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    start = model.get_weights()
    trained = []
    for steps in range(4):
        model.set_weights(start)
        for _ in range(steps):
            model.train_on_batch(x, y)
        trained.append(model.get_weights())
    told = 0
    used = False

    def handle(number, frame):
        nonlocal told, used
        try:
            model.predict(x, verbose=0) if use == "predict" else model.train_on_batch(x, y)
            used = True
        except RuntimeError as error:
            if "Let the handler set a flag" not in str(error):
                raise
            told += 1

    before = signal.signal(signal.SIGUSR1, handle)
    number = 1
    try:
        while True:
            model.set_weights(start)
            used = False
            call = functools.partial(model.fit, x, y, verbose=0, epochs=2)
            if not interrupted_at_line(number, trainer, call):
                break
            steps = 3 if used and use == "train_on_batch" else 2
            for weight, expected in zip(model.get_weights(), trained[steps], strict=True):
                np.testing.assert_allclose(weight, expected, rtol=1e-5)
            number += 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 10 < told < number / 2


def test_a_keras_variable_keeps_its_value_wherever_its_first_program_is_interrupted(handler):
    number = 1
    while True:
        weight = keras.Variable(np.arange(3.0))
        if not interrupted_at_line(
            number, variables, tf.function(lambda weight=weight: weight * 2.0)
        ):
            break
        np.testing.assert_array_equal(weight.numpy(), [0, 1, 2])
        number += 1
    assert number > 10


def test_variables_keep_their_values_where_a_program_meets_arguments_that_jax_does_not_know(
    handler,
):
    """JAX then calls XLA from Python, which a handler can leave after XLA has overwritten them."""
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = unison.Variable(0.0)
    step = lambda: total.assign_add(1.0)  # noqa: E731
    for _ in range(4):
        strategy.run(step)
    jax.clear_caches()
    executed = 0

    def profile(frame, event, argument):
        nonlocal executed
        is_of_jax = frame.f_code.co_filename.endswith("jax/_src/interpreters/pxla.py")
        if event == "return" and is_of_jax and frame.f_code.co_name == "__call__":
            executed += 1
            signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(profile)
    try:
        with pytest.raises(AlarmError):
            strategy.run(step)
    finally:
        sys.setprofile(None)
    assert executed
    assert float(total.numpy()) == 5


def test_handlers_are_there_again_wherever_the_end_is_interrupted(handler):
    """Python 3.13 passes over `except` where a loop jumps back to its condition."""
    signals = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
    before = signal.signal(signal.SIGALRM, handler)
    rng = random.Random(1)

    def hold_until_the_alarm():
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 1e-4))
        while True:
            with signals_held:
                pass

    try:
        for _ in range(2000):
            with pytest.raises(AlarmError):
                hold_until_the_alarm()
            assert [signal.getsignal(number) for number in signals] == [handler] * 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_runs_at_the_end(handler):
    done = []
    with pytest.raises(AlarmError), signals_held:  # noqa: PT012
        signal.raise_signal(signal.SIGUSR1)
        done.append("all of it")
    assert done == ["all of it"]


def test_a_handler_runs_at_the_end_of_the_outermost_context(handler):
    done = []
    with pytest.raises(AlarmError), signals_held:  # noqa: PT012
        with signals_held:
            signal.raise_signal(signal.SIGUSR1)
        done.append("all of it")
    assert done == ["all of it"]


def test_handlers_are_as_they_were_afterwards(handler):
    with pytest.raises(AlarmError), signals_held:
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is handler
    with pytest.raises(AlarmError):
        signal.raise_signal(signal.SIGUSR1)


def test_a_second_signal_is_delivered_although_the_first_raises(handler):
    with pytest.raises(AlarmError) as raised, signals_held:  # noqa: PT012
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
    numbers = {raised.value.args[0], raised.value.__context__.args[0]}
    assert numbers == {signal.SIGUSR1, signal.SIGUSR2}
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_handler_that_is_set_later_is_held_as_well(handler):
    with signals_held:
        pass
    signal.signal(signal.SIGUSR1, lambda number, frame: handler(number, frame))
    done = []
    with pytest.raises(AlarmError), signals_held:  # noqa: PT012
        signal.raise_signal(signal.SIGUSR1)
        done.append("all of it")
    assert done


def test_ctrl_c_is_held():
    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []
    try:
        with pytest.raises(KeyboardInterrupt), signals_held:  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


def test_an_error_inside_is_passed_on(handler):
    with pytest.raises(LookupError), signals_held:
        raise LookupError
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_in_another_thread_nothing_is_held(handler):
    seen = []

    def look():
        with signals_held:
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30)
    assert seen == [handler]


def test_a_forked_child_holds_signals_in_its_main_thread(handler):
    """Forked in another thread, which is the child's main one."""
    codes = []

    def fork():
        child = os.fork()
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return
        code = 1
        try:
            with signals_held:
                signal.raise_signal(signal.SIGUSR1)
                code = 2
        except AlarmError:
            code = 0 if code == 2 else 3
        finally:
            os._exit(code)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join(30)
    assert codes == [0]


def test_a_function_is_held(handler):
    done = []

    @without_signals
    def function(argument):
        signal.raise_signal(signal.SIGUSR1)
        done.append(argument)

    with pytest.raises(AlarmError):
        function("argument")
    assert done == ["argument"]


# -- waiting for other threads -----------------------------------------------------------------


def test_what_is_waited_for_is_done_with_the_lock_acquired():
    condition = threading.Condition(threading.Lock())
    assert wait_until(condition, lambda: True, condition._lock.locked)


@pytest.mark.parametrize("timeout", [0.0, 0.12])
def test_a_wait_ends_with_its_timeout(timeout):
    condition = threading.Condition(threading.Lock())
    begin = time.monotonic()
    assert wait_until(condition, lambda: False, condition._lock.locked, timeout)
    assert timeout <= time.monotonic() - begin < timeout + 10


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_handler_that_raises_ends_the_waiting_and_leaves_the_lock_released(handler, after):
    condition = threading.Condition(threading.Lock())
    looks = []

    def look():
        if len(looks) == after:
            signal.raise_signal(signal.SIGUSR1)
        looks.append("a look")
        return False

    with pytest.raises(AlarmError):
        wait_until(condition, look, lambda: None)
    assert condition.acquire(blocking=False)


def test_a_handler_that_raises_ends_the_waiting_for_an_event(handler):
    event = threading.Event()
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
    with pytest.raises(AlarmError):
        wait_for_event(event)
    event.set()
    wait_for_event(event)


def error_of(function):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function()
    return caught.value


class Handler:
    """Handlers of several kinds."""

    def method(self, number, frame):
        raise AlarmError

    __call__ = method


@pytest.mark.parametrize(
    "raising",
    [lambda number, frame: [][0], Handler().method, Handler(), functools.partial(Handler().method)],
    ids=["function", "method", "object", "partial function"],
)
def test_the_error_of_a_handler_is_recognized(handler, raising):
    signal.signal(signal.SIGUSR1, raising)

    def interrupted():
        with signals_held:
            signal.raise_signal(signal.SIGUSR1)

    assert is_of_a_signal_handler(error_of(interrupted))


def test_another_error_is_not_that_of_a_handler(handler):
    assert not is_of_a_signal_handler(error_of(lambda: [][0]))
    assert not is_of_a_signal_handler(AlarmError())


# -- training loops ------------------------------------------------------------------------


def require_whole_steps(form, loop, signals, seed=0):
    """Runs the program, which looks at the variables after each of so many interruptions."""
    env = {"UNISON_CPU_DEVICES": "2", "PYTHONPATH": PATH, **FEW_OPTIMIZATIONS}
    imported = ("jax", *(["keras"] if form == "keras" else []), "unison")
    done = run_program(PROGRAM, form, signals, seed, loop, env=env, timeout=200, imported=imported)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(f"seed {seed}, {loop}: {{")


@pytest.mark.parametrize(
    ("form", "loop"),
    [
        ("keras", "run on one device"),
        ("keras", "run"),
        ("keras", "fit"),
        ("tf", "fit"),
        ("keras", "fit with central storage"),
        ("tf", "fit of a step of one's own"),
        ("keras", "schedule"),
        ("keras", "assign on servers"),
        ("tf", "fit on servers"),
        pytest.param("keras", "fit of a hard model", marks=pytest.mark.soak),
        pytest.param("tf", "function of a hard model and an iterator", marks=pytest.mark.soak),
    ],
)
def test_a_loop_that_is_interrupted_is_after_a_whole_step(form, loop):
    """`make soak` interrupts all loops, fifty times each."""
    require_whole_steps(form, loop, signals=4)


@pytest.mark.smoke
def test_a_fit_that_is_soon_interrupted_is_after_a_whole_step():
    """With this seed, the first signals come after 0.7 and 0.05 seconds: few steps to repeat."""
    require_whole_steps("tf", "fit", signals=2, seed=4)


LOST = """
import numpy as np, jax
import unison
import unison.tf as tf

strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
SUM = unison.VariableAggregation.SUM
with strategy.scope():
    total = unison.Variable(np.zeros(3, np.float32), aggregation=SUM)

def step(x):
    tf.debugging.assert_less(x, 2.0)
    total.assign_add(x)

for _ in range(4):
    strategy.run(step, args=(np.ones(3, np.float32),))
try:
    strategy.run(step, args=(np.full(3, 5, np.float32),))
except Exception as error:
    print("does not hold" if "did not hold" in str(error) else error)
strategy.run(step, args=(np.ones(3, np.float32),))
print(total.numpy().tolist())
"""


@pytest.mark.parametrize("what", ["runs a step", "assigns", "reads"])
def test_a_handler_that_returns_neither_loses_a_step_nor_its_own_writes(what, two_replicas):
    with two_replicas.scope():
        count = unison.Variable(0.0, aggregation=unison.VariableAggregation.MEAN)
    done = 0

    def add():
        count.assign_add(1.0)

    def handle(number, frame):
        nonlocal done
        if what == "runs a step":
            two_replicas.run(add)
        elif what == "assigns":
            count.assign_add(1.0)
        else:
            kept.append(count.numpy())
        done += what != "reads"
        arrived.append(number)

    kept, arrived = [], []
    for _ in range(8):  # the first ones hold signals
        two_replicas.run(add)
        done += 1
    before = signal.signal(signal.SIGALRM, handle)
    try:
        for number in range(40):
            signal.setitimer(signal.ITIMER_REAL, 2e-4 + 3.7e-5 * number)
            until = time.monotonic() + 20
            while len(arrived) == number and time.monotonic() < until:
                two_replicas.run(add)
                done += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(arrived) == 40
    assert count.numpy() == done
    assert all(value == int(value) and value <= done for value in kept)


def test_what_a_handler_assigns_before_a_step_of_fit_outlives_the_epoch(two_replicas, monkeypatch):
    import keras

    from unison.keras.trainer import trainer_of

    with two_replicas.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
    trainer = trainer_of(model)
    run_step = trainer.run_step

    def interrupted(*args):
        signal.raise_signal(signal.SIGUSR1)
        return run_step(*args)

    monkeypatch.setattr(trainer, "run_step", interrupted)
    rate = model.optimizer.learning_rate
    before = signal.signal(signal.SIGUSR1, lambda number, frame: rate.assign(0.25))
    try:
        model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=2, verbose=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert rate.numpy() == 0.25


def test_a_host_function_that_raises_leaves_the_variables_alone():
    done = run_program(LOST, env={"UNISON_CPU_DEVICES": "2"}, imported=("jax", "unison"))
    assert done.stdout.splitlines() == ["does not hold", "[10.0, 10.0, 10.0]"], done.stderr[-3000:]


FITTED = """
import keras, jax
import numpy as np
import unison

class Checking(keras.layers.Layer):
    def call(self, x):
        return jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

def check(x):
    if np.any(x > 2):
        raise ValueError("too large")
    return np.asarray(x)

with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.stop_gradient(Checking()(inputs))))
    model.compile("adam", "mse")
x, y = np.ones((32, 3), np.float32), np.ones((32, 1), np.float32)
model.fit(x, y, 8, verbose=0)
x[16:] = 5
try:
    model.fit(x, y, 8, shuffle=False, verbose=0)
except Exception as error:
    print("too large" in str(error), int(model.optimizer.iterations.numpy()))
model.fit(x[:16], y[:16], 8, verbose=0)
print(np.isfinite(model.get_weights()[0]).all(), int(model.optimizer.iterations.numpy()))
"""


def test_a_host_function_that_raises_in_fit_leaves_the_steps_before_it():
    done = run_program(FITTED, env={"UNISON_CPU_DEVICES": "2"}, imported=("jax", "keras"))
    assert done.stdout.splitlines() == ["True 6", "True 8"], done.stderr[-3000:]


def test_a_variable_can_be_read_again_wherever_a_handler_interrupts_a_read(handler):
    """JAX keeps an array that it has begun to divide with too few parts."""
    with unison.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        mean = unison.Variable(np.zeros(2), synchronization="on_read", aggregation="mean")
    before = signal.signal(signal.SIGALRM, handler)
    moments = random.Random(0)
    try:
        for number in range(500):
            mean.assign(np.full(2, number))
            with contextlib.suppress(AlarmError):
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 6e-5))
                mean.numpy()
                time.sleep(1e-3)
            assert mean.numpy().tolist() == [number, number]
    finally:
        signal.signal(signal.SIGALRM, before)


#: Of a generator's context manager, of the one in which JAX traces a function, and of Keras'
#: scopes, at whose end variables get their first values.
ENDS_OF_CONTEXTS = (
    contextlib._GeneratorContextManager.__exit__.__code__,
    contextlib.ExitStack.__exit__.__code__,
    private_jax.core.set_current_trace.__exit__.__code__,
    keras.StatelessScope.__exit__.__code__,
    SymbolicScope.__exit__.__code__,
    AutocastScope.__exit__.__code__,
    initialize_all_variables.__code__,
    keras.Variable._deferred_initialize.__code__,
)


#: Where a generator's context manager has run the generator to its `yield`.
BEGIN_OF_CONTEXT = contextlib._GeneratorContextManager.__enter__.__code__


def interrupted_at_a_context(call, number):
    """Calls `call`; a handler raises where a context has begun or ends for the `number`th time.

    Returns the error, of which Keras can make another one; None if there are fewer contexts.
    """
    ended = 0

    def profile(frame, event, argument):
        nonlocal ended
        has_begun = event == "c_return" and frame.f_code is BEGIN_OF_CONTEXT
        if has_begun or (event == "call" and frame.f_code in ENDS_OF_CONTEXTS):
            ended += 1
            if ended == number:
                signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(profile)
    try:
        call()
    except Exception as error:
        if ended < number:
            raise
        return error
    finally:
        sys.setprofile(None)
    return None


def test_a_stack_that_is_ending_goes_on_in_its_order():
    """An error of one context is the context of errors that the next ones catch."""
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    ended = []

    @contextlib.contextmanager
    def using_the_first():
        try:
            yield
        finally:
            with contextlib.suppress(ZeroDivisionError):
                strategy.run(lambda: 1 / 0)
            ended.append("second")

    def fail():
        raise ValueError("third")

    stack = contextlib.ExitStack()
    stack.callback(ended.append, "first")
    stack.enter_context(using_the_first())
    stack.callback(fail)
    with pytest.raises(ValueError, match="third"):
        stack.close()
    assert ended == ["second", "first"]


BLOCKS = {
    "tape": tf.GradientTape,
    "accumulator": lambda: tf.autodiff.ForwardAccumulator(tf.constant(1.0), tf.constant(1.0)),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_recording_ends_wherever_a_handler_interrupts_a_beginning_or_end(handler, block):
    """Whatever is computed later would be recorded, too."""
    kind = type(block())
    places = [kind.__enter__, kind._begin, kind._end, tf.GradientTape._switch_off]
    codes = [each.__code__ for each in [*places, Recording.switch_on, Recording.switch_off]]
    number = met = 0

    def profile(frame, event, argument):
        nonlocal met
        if event in ("c_return", "call") and frame.f_code in codes:
            met += 1
            if met == number:
                signal.raise_signal(signal.SIGUSR1)

    while met >= number:  # the last one met fewer places
        met, number = 0, number + 1
        sys.setprofile(profile)
        with contextlib.suppress(AlarmError), block():
            pass
        sys.setprofile(None)
        assert not private_jax.is_recording(), number
    assert number > 5


@pytest.mark.parametrize("loop", ["run", "function", pytest.param("fit", marks=pytest.mark.soak)])
def test_a_thread_leaves_its_scopes_where_a_handler_interrupts_them(handler, loop):
    """The errors are kept, as a notebook does: nothing ends the scopes later."""
    strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = unison.Variable(1.0)

    def begin():
        """Returns a call that traces."""
        if loop == "fit":
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_bfloat16")])
                model.compile("sgd", "mse", metrics=["mae"])
            models.append(model)
            return lambda: model.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=4, verbose=0)
        step = lambda: strategy.run(lambda: total.assign(total + 1.0))  # noqa: E731
        return tf.function(step) if loop == "function" else step

    kept, models = [], []
    while error := interrupted_at_a_context(begin(), len(kept) + 1):
        kept.append(error)
        assert not unison.has_strategy()
        assert not scope_observers._open_scopes
        assert current_lift() is None
        assert not isinstance(jax.numpy.ones(1), jax.core.Tracer)
        assert current_share() is None
        assert np.isfinite(total.numpy())
        assert not in_stateless_scope()
        for model in models[-1:]:
            for variable in [*model.variables, *model.metrics_variables]:
                assert np.isfinite(np.asarray(variable.numpy())).all()
                assert variable._value is not None
    assert len(kept) > 10
