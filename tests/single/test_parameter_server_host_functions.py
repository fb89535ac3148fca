"""Host functions in scheduled functions: they run in the coordinator, before variables change."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import unison
import unison.tf as tf
from parameter_server_threads import clusters
from unison.errors import InvalidArgumentError
from unison.parameter_server import FixedShardsPartitioner


@pytest.fixture
def started():
    with clusters() as start:
        yield start


class TooLargeError(Exception):
    """What the user's function raises."""


def require_small(x):
    if np.any(x > 2):
        raise TooLargeError(float(np.max(x)))


#: What a step calls, and the error where its argument is 5.
CALLS = {
    "an assertion": (lambda x: tf.debugging.assert_less(x, 2.0), InvalidArgumentError),
    "a debug callback": (lambda x: jax.debug.callback(require_small, x), TooLargeError),
    "an io callback": (lambda x: io_callback(require_small, None, x), TooLargeError),
    "an ordered one": (lambda x: io_callback(require_small, None, x, ordered=True), TooLargeError),
    "one in a jitted function": (
        lambda x: jax.jit(lambda y: jax.debug.callback(require_small, y))(x),
        TooLargeError,
    ),
}


def job(started, call, **cluster):
    """Returns a coordinator, a step and its variables, on two servers."""
    strategy, coordinator = started(servers=2, partitioner=FixedShardsPartitioner(2), **cluster)
    sums = unison.VariableAggregation.SUM
    with strategy.scope():
        table = unison.Variable(np.zeros((4, 2), np.float32), aggregation=sums)
        total = unison.Variable(0.0, aggregation=sums)

    def step(x):
        table.assign_add(jnp.ones((4, 2)) * x)
        call(x)
        total.assign_add(x)
        return x + 1

    return coordinator, step, [table, total]


@pytest.mark.parametrize("kind", CALLS)
def test_a_host_function_that_raises_ends_in_its_error(started, kind):
    call, error = CALLS[kind]
    coordinator, step, _ = job(started, call)
    value = coordinator.schedule(step, args=(5.0,))
    with pytest.raises(error):
        coordinator.join()
    with pytest.raises(error):
        value.fetch()


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_call_whose_host_function_raises_has_no_effect(started, kind, synchronous):
    call, error = CALLS[kind]
    coordinator, step, variables = job(started, call, workers=1, synchronous=synchronous)
    coordinator.schedule(step, args=(1.0,))
    coordinator.join()
    coordinator.schedule(step, args=(5.0,))
    with pytest.raises(error):
        coordinator.join()
    assert [np.max(variable.numpy()) for variable in variables] == [1.0, 1.0]
    value = coordinator.schedule(step, args=(1.0,))
    coordinator.join()
    assert float(value.fetch()) == 2.0
    assert [np.max(variable.numpy()) for variable in variables] == [2.0, 2.0]


def test_each_worker_of_a_synchronous_step_calls_the_host_function(started):
    seen = []
    call = lambda x: jax.debug.callback(lambda y: seen.append(float(y)), x)  # noqa: E731
    coordinator, step, _ = job(started, call, workers=2, synchronous=True)
    coordinator.schedule(step, args=(1.0,))
    coordinator.join()
    assert seen == [1.0, 1.0]


def test_a_host_function_runs_in_the_coordinator_and_sees_the_values(started):
    seen = []
    call = lambda x: jax.debug.callback(  # noqa: E731
        lambda y, *, name: seen.append((name, float(y), threading.current_thread().name)),
        x * 3,
        name="three times",
    )
    coordinator, step, _ = job(started, call)
    coordinator.schedule(step, args=(2.0,))
    coordinator.join()
    assert seen == [("three times", 6.0, "unison-coordinator-0")]


def test_a_print_shows_the_values(started, capsys):
    coordinator, step, _ = job(started, lambda x: jax.debug.print("x is {}", x))
    coordinator.schedule(step, args=(2.0,))
    coordinator.join()
    assert "x is 2.0" in capsys.readouterr().out


def test_host_functions_are_called_in_order(started):
    seen = []

    def call(x):
        for place in range(3):
            jax.debug.callback(lambda place: seen.append(int(place)), place)

    coordinator, step, _ = job(started, call)
    coordinator.schedule(step, args=(2.0,))
    coordinator.join()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x),
        lambda x: jax.lax.cond(x > 0, lambda: jax.debug.print("large"), lambda: None),
    ],
    ids=["with a result", "in a branch"],
)
def test_what_cannot_be_sent_is_refused(started, call):
    strategy, coordinator = started()
    with strategy.scope():
        total = unison.Variable(0.0)

    def step(x):
        result = call(x)
        total.assign_add(x if result is None else result)

    coordinator.schedule(step, args=(1.0,))
    with pytest.raises(ValueError, match="Leave out calls of host functions"):
        coordinator.join()
    assert float(total.numpy()) == 0.0
