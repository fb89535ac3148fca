"""A pipeline by 1F1B that computes the loss: each micro-batch goes through it once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import ROUND_OFF, assert_close, run_training, run_training_under
from unison.keras import Pipeline
from unison.pipelining import pack_stages, pipeline, pipeline_loss, unpack_stage
from unison.planning import plan_fit, target

FEATURES, CLASSES = 16, 10
rng = np.random.default_rng(0)
X = rng.normal(size=(64, FEATURES)).astype("float32")
Y = rng.integers(0, CLASSES, 64)
WEIGHTS = rng.uniform(0.5, 1.5, 64).astype("float32")
CROSSENTROPY = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


def strategy_of(batch, stage, zero=0):
    return unison.ModelParallelStrategy(mesh={"batch": batch, "stage": stage}, zero=zero)


# -- Keras -----------------------------------------------------------------------------------


def build(in_pipeline, loss=CROSSENTROPY, regularized=False, schedule="1f1b"):
    """A model whose last layer is the pipeline, or one of its layers in turn."""
    embedding = keras.layers.Dense(24, "tanh")
    stages = [
        [keras.layers.Dense(24, "relu"), keras.layers.LayerNormalization()],
        [keras.layers.Dense(20, "tanh")],
        [keras.layers.Dense(12, "relu")],
        [keras.layers.Dense(CLASSES)],
    ]
    penalty = keras.regularizers.L2(0.1) if regularized else None
    if in_pipeline:
        rest = [Pipeline(stages, 4, schedule, activity_regularizer=penalty)]
    else:
        last = keras.layers.Identity(activity_regularizer=penalty)
        rest = [*(layer for stage in stages for layer in stage), last]
    model = keras.Sequential([keras.Input((FEATURES,)), embedding, *rest])
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    model.compile(optimizer, loss(), metrics=["accuracy"])
    return model


def train(model):
    history = model.fit(
        X, Y, sample_weight=WEIGHTS, batch_size=32, epochs=2, shuffle=False, verbose=0
    ).history
    weights = []
    for layer in model.layers:
        own = layer.stage_weights() if isinstance(layer, Pipeline) else [layer.get_weights()]
        weights += [value for stage in own for value in stage]
    return history, weights


@pytest.mark.parametrize(
    ("batch", "stage", "zero", "loss", "regularized"),
    [
        (1, 4, 0, CROSSENTROPY, False),
        (2, 2, 3, CROSSENTROPY, False),
        # What no mean of means is, or more than a loss, is computed outside.
        (1, 2, 0, functools.partial(CROSSENTROPY, reduction="sum"), False),
        (1, 2, 0, functools.partial(CROSSENTROPY, ignore_class=0), False),
        (1, 2, 0, keras.losses.Circle, False),
        (1, 2, 0, CROSSENTROPY, True),
    ],
    ids=["stages", "with zero", "sum", "masked", "of batches", "regularized"],
)
def test_a_model_that_ends_with_a_pipeline_trains_as_on_one_device(
    batch, stage, zero, loss, regularized
):
    build_it = functools.partial(build, loss=loss, regularized=regularized)
    alone = run_training(lambda: build_it(False), train)
    together = run_training_under(strategy_of(batch, stage, zero), lambda: build_it(True), train)
    assert_close(together.result, alone.result)


def planned(schedule, loss=CROSSENTROPY):
    with target("h100:4"):
        strategy = strategy_of(1, 4)
        with strategy.scope():
            model = build(True, loss, schedule=schedule)
        examples = jax.ShapeDtypeStruct((64, FEATURES), "float32")
        return plan_fit(model, examples, jax.ShapeDtypeStruct((64,), "int32"))


def test_a_loss_that_is_a_mean_saves_a_forward_pass():
    apart = planned("1f1b", functools.partial(CROSSENTROPY, reduction="sum"))
    assert planned("1f1b").flops < 0.9 * apart.flops


# -- the function ----------------------------------------------------------------------------


def linear(weights, inputs, seed):
    return jnp.tanh(inputs @ weights["kernel"] + weights["bias"])


def error(results, targets):
    return ((results - targets) ** 2).mean()


@pytest.mark.parametrize(
    ("microbatches", "others"), [(8, 0.0), (4, 0.5)], ids=["loss", "loss and results"]
)
def test_gradients_of_a_loss_are_those_of_the_stages_in_turn(microbatches, others):
    sizes = [(6, 8), (8, 5), (5, 7), (7, 3)]
    weights = [
        {"kernel": rng.normal(size=s).astype("float32"), "bias": np.ones(s[1], "float32")}
        for s in sizes
    ]
    packed, targets = pack_stages(weights), X[:, 6:9]
    strategy = unison.ModelParallelStrategy(2, mesh={"stage": 2})
    like = {"like": weights, "microbatches": microbatches}

    def step(packed, x):
        def loss(packed, x):
            value, results = pipeline_loss([linear] * 4, packed, x, error, targets, **like)
            return 3 * value + others * (results**2).sum() if others else 3 * value

        return jax.value_and_grad(loss, (0, 1))(packed, x)

    def in_turn(packed, x):
        hidden = x
        for row, shapes in zip(packed, weights, strict=True):
            hidden = linear(unpack_stage(row, shapes), hidden, 0)
        return 3 * error(hidden, targets) + others * (hidden**2).sum()

    expected = jax.value_and_grad(in_turn, (0, 1))(packed, X[:, :6])
    assert_close(jax.tree.leaves(strategy.run(step, (packed, X[:, :6]))), jax.tree.leaves(expected))
    # Without devices along the axis as well.
    assert_close(jax.tree.leaves(step(packed, X[:, :6])), jax.tree.leaves(expected))


def test_a_loss_that_nobody_differentiates_is_that_of_the_results():
    weights = [np.eye(4, dtype="float32")] * 2
    strategy = unison.ModelParallelStrategy(2, mesh={"stage": 2})

    def step():
        given = (pack_stages(weights), X[:, :4], error, X[:, 4:8])
        return pipeline_loss([lambda w, x, _: x @ w] * 2, *given, like=weights, microbatches=4)

    value, results = strategy.run(step)
    np.testing.assert_allclose(results, X[:, :4], **ROUND_OFF)
    np.testing.assert_allclose(value, error(X[:, :4], X[:, 4:8]), **ROUND_OFF)


@functools.cache
def compiled(schedule, microbatches, examples=8, width=512):
    """The gradient of four stages between which `width` features go, for four devices."""
    shapes = [(width, width)] * 4
    weights = [{"kernel": np.zeros(s, "f"), "bias": np.zeros(s[1], "f")} for s in shapes]
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    given = {"like": weights, "microbatches": microbatches}

    def loss(packed, x):
        if schedule == "with loss":
            return pipeline_loss([linear] * 4, packed, x, error, x, **given)[0]
        return error(pipeline([linear] * 4, packed, x, schedule=schedule, **given), x)

    packed = jax.ShapeDtypeStruct((4, pack_stages(weights).shape[1]), "float32")
    batch = jax.ShapeDtypeStruct((microbatches * examples, width), "float32")
    shardings = tuple(jax.NamedSharding(mesh, spec) for spec in (jax.P("stage"), jax.P()))
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss), in_shardings=shardings).lower(packed, batch)
        return lowered.compile()


def test_nothing_is_computed_that_gpipe_does_not_compute():
    # XLA counts a loop's body once, which is a tick; of a conditional, the largest branch.
    forward = 2 * 8 * 512 * 512
    ticks = {name: compiled(name, 16) for name in ("gpipe", "1f1b", "with loss")}
    products = {
        name: round(one.cost_analysis()["flops"] / forward, 1) for name, one in ticks.items()
    }
    # Forward, again from the kept input, and two products for the gradient; and once more.
    assert products == {
        "gpipe": pytest.approx(4, abs=0.3),
        "with loss": pytest.approx(4, abs=0.3),
        "1f1b": pytest.approx(5, abs=0.3),
    }


def test_of_32_more_micro_batches_nothing_waits():
    few, many = (compiled("with loss", count).memory_analysis() for count in (16, 48))
    more = many.temp_size_in_bytes - few.temp_size_in_bytes
    assert more < 2 * 8 * 512 * 4


def test_a_pipeline_with_its_loss_takes_less_memory_than_gpipe():
    loss, gpipe = (compiled(name, 48).memory_analysis() for name in ("with loss", "gpipe"))
    assert loss.temp_size_in_bytes < gpipe.temp_size_in_bytes - 32 * 8 * 512 * 4


# -- bad input -------------------------------------------------------------------------------


def loss_of(loss, targets):
    weights = [np.eye(4, dtype="float32")]
    stages = [lambda w, x, _: x @ w]
    given = (stages, pack_stages(weights), X[:, :4], loss, targets)
    return pipeline_loss(*given, like=weights, microbatches=4)


def test_targets_of_other_examples_are_refused():
    with pytest.raises(ValueError, match=r"of 64 examples.*\(32, 4\)"):
        loss_of(error, X[:32, :4])


def test_a_loss_of_each_example_is_refused():
    with pytest.raises(ValueError, match=r"a scalar.*of shape \(16,\)"):
        loss_of(lambda results, targets: (results - targets).mean(axis=1), X[:, :4])
