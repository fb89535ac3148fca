"""Metrics whose states are not sums: maxima and minima are right, and others are warned of."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

from keras_comparison import assert_close, mirrored, regression_data
from unison.keras.metric_states import Update, updates_of

# Batches of 16, 16 and 3: the last one leaves one of 4 replicas idle.
X, Y = regression_data(35)
BELOW_ZERO = Y - 100


class StateOf(keras.metrics.Metric):
    """Keeps `update(state, batch)`."""

    def __init__(self, update, initial=0.0, aggregation="sum"):
        super().__init__(name="kept")
        self.update, self.initial = update, initial
        self.state = self.add_variable(
            (), keras.initializers.Constant(initial), aggregation=aggregation, name="state"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(self.update(self.state, y_true))

    def result(self):
        return self.state + 0.0

    def reset_state(self):
        self.state.assign(self.initial)


def outcomes(replicas, *metric, y=BELOW_ZERO, **kwargs):
    """What `fit` and `evaluate` say of a metric."""

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[StateOf(*metric, **kwargs)])
        return model

    if replicas is None:
        model = build()
    else:
        with mirrored(replicas).scope():
            model = build()
    history = model.fit(X, y, batch_size=16, epochs=2, verbose=0).history
    evaluated = model.evaluate(X, y, batch_size=16, verbose=0, return_dict=True)
    return {"fit": history["kept"], "evaluate": evaluated["kept"]}


@pytest.mark.parametrize(
    "metric",
    [
        (lambda state, y: ops.maximum(state, ops.max(y)), -1e30),
        (lambda state, y: ops.minimum(state, ops.min(y)), 1e30),
        (lambda state, y: ops.maximum(state, ops.max(ops.abs(y)))),
        (lambda state, y: state + ops.sum(y)),
    ],
    ids=["maximum", "minimum", "maximum-of-0", "sum"],
)
def test_extremes_are_those_of_all_replicas(metric, caplog):
    metric = metric if isinstance(metric, tuple) else (metric,)
    assert_close(outcomes(4, *metric), outcomes(None, *metric))
    assert "another way" not in caplog.text


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_what_the_metric_says_of_its_state_holds(aggregation, caplog):
    counted = outcomes(2, lambda state, y: state + 1, aggregation=aggregation)
    assert counted == outcomes(None, lambda state, y: state + 1)
    assert "another way" not in caplog.text


@pytest.mark.parametrize(
    "update",
    [lambda state, y: ops.mean(y), lambda state, y: 0.9 * state + 0.1 * ops.mean(y)],
    ids=["last", "moving-average"],
)
def test_a_state_that_is_no_sum_is_warned_of_once(update, caplog):
    outcomes(2, update)
    (warning,) = [r.getMessage() for r in caplog.records if "another way" in r.getMessage()]
    assert "'kept/state'" in warning
    assert "aggregation='mean'" in warning


def test_a_maximum_is_right_where_it_is_read_and_restored_outside(two_replicas):
    with two_replicas.scope():
        metric = StateOf(lambda state, y: ops.maximum(state, ops.max(y)))
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric])
    model.evaluate(X, Y, batch_size=16, verbose=0)
    assert_close(float(metric.result()), float(Y.max()))
    metric.state.assign(7.0)
    assert float(metric.result()) == 7.0


# -- what a traced step tells ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "update"),
    [
        (lambda s, x: s, Update.NONE),
        (lambda s, x: s + x, Update.SUM),
        (lambda s, x: x + s, Update.SUM),
        (lambda s, x: s - x, Update.SUM),
        (lambda s, x: x - s, Update.OTHER),
        (lambda s, x: s + s, Update.OTHER),
        (lambda s, x: x, Update.OTHER),
        (lambda s, x: jnp.float32(1), Update.OTHER),
        (lambda s, x: s * x, Update.OTHER),
        (lambda s, x: jnp.maximum(x, s), Update.MAX),
        (lambda s, x: jnp.minimum(s, x), Update.MIN),
        (lambda s, x: jnp.maximum(s, x) + x, Update.OTHER),
        (lambda s, x: (s.astype("float16") + 1).astype("float32"), Update.SUM),
        (lambda s, x: jnp.where(x > 0, s + x, s), Update.SUM),
        (lambda s, x: jnp.where(s > 0, s + x, s), Update.OTHER),
        (lambda s, x: jnp.where(x > 0, x, s), Update.OTHER),
        (lambda s, x: jax.lax.cond(x > 0, lambda: s + x, lambda: s), Update.SUM),
        (lambda s, x: jax.lax.cond(x > 0, lambda: s + x, lambda: jnp.maximum(s, x)), Update.OTHER),
        (lambda s, x: jnp.zeros(3).at[1].add(s)[1], Update.OTHER),
        (lambda s, x: jnp.broadcast_to(s, (3,)).at[1].add(x).reshape(3)[0] + 0 * x, Update.OTHER),
        (jax.jit(lambda s, x: s + jnp.sin(x)), Update.SUM),
        (jax.checkpoint(lambda s, x: s + jnp.sin(x)), Update.SUM),
    ],
)  # fmt: skip
def test_a_traced_step_tells_how_it_updates_a_state(step, update):
    traced = jax.make_jaxpr(step)(np.float32(1), np.float32(2))
    assert updates_of(traced.jaxpr, {0: 0}) == {0: update}


def test_a_state_that_depends_on_another_one_is_no_sum():
    traced = jax.make_jaxpr(lambda a, b: (a + 1, b + a))(np.float32(1), np.float32(2))
    assert updates_of(traced.jaxpr, {0: 0, 1: 1}) == {0: Update.SUM, 1: Update.OTHER}
