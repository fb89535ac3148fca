"""Variables that are first created inside the function that a strategy or `Function` calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unison
from unison import PerReplica, VariableAggregation, get_replica_context

ONCE = r"may create variables in its first call only.*`if self.v is None"


class Lazy:
    """Creates its variable at the first call, as an unbuilt layer does."""

    def __init__(self, initial_value, **annotations):
        self.initial_value = initial_value
        self.annotations = annotations
        self.variable = None

    def __call__(self, x):
        if self.variable is None:
            value = self.initial_value
            value = value(x) if callable(value) else value
            self.variable = unison.Variable(value, **self.annotations)
        return self.variable.assign_add(x)


# What runs a function of one array, compiled.
RUNS = {
    "run": lambda strategy, fn: lambda x: strategy.run(fn, args=(x,)),
    "run of a Function": lambda strategy, fn: lambda x: strategy.run(unison.Function(fn), (x,)),
    "Function": lambda strategy, fn: unison.Function(fn),
}


@pytest.mark.parametrize(
    "initial_value",
    [
        lambda x: np.zeros(2, "float32"),
        lambda x: jnp.zeros(2),
        lambda x: jnp.zeros(x.shape) + jnp.arange(2.0) * 0,
        lambda x: lambda: jnp.zeros(x.shape),
        lambda x: jax.random.normal(jax.random.key(0), x.shape) * 0.0,
        lambda x: [0.0, 0.0],
    ],
    ids=["numpy", "array", "computed", "callable", "random", "list"],
)
@pytest.mark.parametrize("way", RUNS)
def test_a_variable_is_created_at_the_first_call(two_replicas, way, initial_value):
    layer = Lazy(initial_value, aggregation=VariableAggregation.MEAN)
    call = RUNS[way](two_replicas, layer)
    for _ in range(3):
        call(jnp.ones(2))
    assert layer.variable.numpy().tolist() == [3.0, 3.0]


def test_it_belongs_to_the_strategy_that_runs_the_function(two_replicas):
    layer = Lazy(0.0, aggregation=VariableAggregation.SUM)
    two_replicas.run(layer, args=(PerReplica([1.0, 2.0]),))
    assert two_replicas.extended.variable_created_in_scope(layer.variable)
    assert float(layer.variable) == 3.0


def test_its_initial_value_may_be_another_variable(two_replicas):
    with two_replicas.scope():
        other = unison.Variable(5.0)
    layer = Lazy(0.0, aggregation=VariableAggregation.MEAN)
    layer.initial_value = lambda x: other
    two_replicas.run(layer, args=(1.0,))
    assert float(layer.variable) == 6.0
    derived = Lazy(lambda x: lambda: other + 1, aggregation=VariableAggregation.MEAN)
    two_replicas.run(derived, args=(1.0,))
    assert float(derived.variable) == 7.0


@pytest.mark.parametrize(
    "initial_value",
    [
        lambda x: x,
        lambda x: jnp.zeros(2) + x[0],
        lambda x: get_replica_context().replica_id_in_sync_group * jnp.ones(2),
    ],
    ids=["an argument", "computed from one", "the replica"],
)
def test_its_initial_value_must_not_depend_on_the_inputs(two_replicas, initial_value):
    with pytest.raises(ValueError, match=r"depends on values that exist only.*such as zeros"):
        two_replicas.run(Lazy(initial_value), args=(jnp.ones(2),))


def test_it_may_be_created_for_replicas_of_different_shapes(two_replicas):
    layer = Lazy(0.0, aggregation=VariableAggregation.SUM)
    uneven = PerReplica([np.ones(3, "float32"), np.ones(1, "float32")])
    two_replicas.run(lambda x: layer(jnp.sum(x)), args=(uneven,))
    assert float(layer.variable) == 4.0


def test_it_may_be_created_in_merge_call(two_replicas):
    made = []

    def merge(strategy):
        if not made:
            made.append(unison.Variable(1.0))
        made[0].assign_add(1.0)

    for _ in range(2):
        two_replicas.run(lambda: get_replica_context().merge_call(merge))
    assert float(made[0]) == 3.0


@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("keep", [True, False])
def test_a_function_that_creates_one_in_every_call_is_refused(two_replicas, way, keep):
    kept = []

    def fn(x):
        variable = unison.Variable(1.0)
        if keep:
            kept.append(variable)
        return variable + x

    with pytest.raises(ValueError, match=ONCE):
        RUNS[way](two_replicas, fn)(jnp.ones(2))


def test_a_function_that_was_called_before_creates_no_more(two_replicas):
    made = []

    @unison.Function
    def grow(x):
        if x.shape[0] > len(made):
            made.append(unison.Variable(0.0))
        return made[-1] + x

    grow(jnp.ones(1))
    with pytest.raises(ValueError, match=ONCE):
        grow(jnp.ones(2))


def test_tracing_for_another_shape_creates_nothing(two_replicas):
    layer = Lazy(0.0, aggregation=VariableAggregation.SUM)
    step = lambda x: layer(jnp.sum(x))  # noqa: E731
    for size in (1, 2, 3):
        two_replicas.run(step, args=(jnp.ones(size),))
    assert float(layer.variable) == 2 * (1 + 2 + 3)
