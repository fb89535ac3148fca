"""Stages of a model on different devices, through which micro-batches go."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import ROUND_OFF, assert_close, run_training, run_training_under
from unison.keras import Pipeline
from unison.pipelining import bubble, pack_stages, pipeline, unpack_stage

FEATURES, CLASSES = 16, 10
rng = np.random.default_rng(0)
X = rng.normal(size=(64, FEATURES)).astype("float32")
Y = rng.integers(0, CLASSES, 64)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def stages_of_different_sizes():
    return [
        [keras.layers.Dense(24, activation="relu"), keras.layers.LayerNormalization()],
        [keras.layers.Dense(20, activation="tanh")],
        [keras.layers.Dense(12, activation="relu")],
        [keras.layers.Dense(FEATURES)],
    ]


def build(middle, optimizer=None):
    head = keras.layers.Dense(CLASSES)  # first: a pipeline draws a seed of its own
    model = keras.Sequential([keras.Input((FEATURES,)), *middle(), head])
    optimizer = optimizer or keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    return model


def build_plain():
    return build(lambda: [layer for stage in stages_of_different_sizes() for layer in stage])


def build_pipeline(schedule="gpipe"):
    return build(lambda: [Pipeline(stages_of_different_sizes(), 4, schedule)])


def train(model):
    history = model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0).history
    middle = [layer for layer in model.layers if isinstance(layer, Pipeline)]
    if middle:
        weights = [value for stage in middle[0].stage_weights() for value in stage]
        return history, [*weights, *model.layers[-1].get_weights()]
    return history, model.get_weights()


@pytest.fixture(scope="module")
def alone():
    return run_training(build_plain, train).result


def strategy_of(batch, stage, zero=0):
    return unison.ModelParallelStrategy(mesh={"batch": batch, "stage": stage}, zero=zero)


@pytest.mark.parametrize(
    ("batch", "stage", "zero", "schedule"),
    [
        (2, 2, 0, "gpipe"),
        (1, 4, 0, "gpipe"),
        (2, 2, 3, "gpipe"),
        (1, 4, 0, "1f1b"),
        (2, 2, 3, "1f1b"),
    ],
)
def test_a_pipeline_trains_as_the_layers_on_one_device(batch, stage, zero, schedule, alone):
    build_it = functools.partial(build_pipeline, schedule)
    together = run_training_under(strategy_of(batch, stage, zero), build_it, train)
    assert_close(together.result, alone)


def test_a_pipeline_without_stages_on_devices_computes_the_same(alone):
    assert_close(run_training(build_pipeline, train).result, alone)


def test_each_device_has_the_weights_and_slots_of_its_stages_only():
    with strategy_of(1, 4).scope():
        model = build_pipeline()
    train(model)
    (packed,) = [v for v in model.trainable_variables if v.name == "pipeline_stages"]
    slots = [v for v in model.optimizer.variables if v.shape == packed.shape]
    largest = FEATURES * 24 + 24 + 2 * 24  # 456, up to a multiple of 64
    assert len(slots) == 2
    for variable in (packed, *slots):
        shards = variable.cell.array.addressable_shards
        assert {shard.data.shape for shard in shards} == {(1, 512)}
    assert largest <= 512
    # The stages' own variables take no memory.
    assert all(v.cell.array is None for s in model.layers[0]._stages.layers for v in s.variables)


def test_a_functional_model_is_cut_behind_named_layers():
    def whole():
        inputs = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(24, activation="relu", name="first")(inputs)
        branches = keras.layers.Dense(8)(hidden), keras.layers.Dense(8)(hidden)
        merged = keras.layers.Add(name="second")(branches)
        return keras.Model(inputs, keras.layers.Dense(FEATURES)(merged))

    keras.utils.set_random_seed(0)
    model = whole()
    expected = model.predict(X, verbose=0)
    keras.utils.set_random_seed(0)
    with strategy_of(2, 2).scope():
        cut = Pipeline.cut(whole(), at=["second"], microbatches=2)
        model = keras.Sequential([keras.Input((FEATURES,)), cut])
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, **ROUND_OFF)


def test_weights_are_restored_under_another_mesh(tmp_path):
    with strategy_of(1, 4).scope():
        model = build_pipeline()
    train(model)
    model.save(tmp_path / "model.keras")
    with strategy_of(2, 2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    alone = keras.models.load_model(tmp_path / "model.keras")
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, **ROUND_OFF)
    np.testing.assert_allclose(alone.predict(X, verbose=0), expected, **ROUND_OFF)
    assert_close(train(loaded), train(model))


def test_stages_get_weights_from_elsewhere():
    model = build_pipeline()
    weights = [[value + 1 for value in own] for own in model.layers[0].stage_weights()]
    model.layers[0].set_stage_weights(weights)
    for own, given in zip(model.layers[0].stage_weights(), weights, strict=True):
        assert_close(own, given)
    with pytest.raises(ValueError, match="of the shapes"):
        model.layers[0].set_stage_weights(weights[:-1])


def test_dropout_in_stages_draws_for_each_micro_batch_and_step():
    def dropping():
        stages = [[keras.layers.Dropout(0.5)], [keras.layers.Dropout(0.5), keras.layers.Dense(1)]]
        return Pipeline(stages, microbatches=2)

    strategy = unison.ModelParallelStrategy(2, mesh={"stage": 2})
    with strategy.scope():
        layer = dropping()
        layer.build((None, 512))
    layer.set_stage_weights([[], [np.eye(512, 1, dtype="float32"), np.zeros(1, "float32")]])

    def outputs(training):
        return np.asarray(
            strategy.run(lambda x: layer(x, training=training), (jnp.ones((64, 512)),))
        )

    np.testing.assert_array_equal(outputs(False), np.ones((64, 1)))
    first, second = outputs(True), outputs(True)
    assert set(np.unique(first)) <= {0.0, 4.0}  # kept by both, times 2 for each
    halves = (first[:32], first[32:], second[:32], second[32:])
    assert len({half.tobytes() for half in halves}) == 4


# -- the function --------------------------------------------------------------------------


def linear(weights, inputs, seed):
    return jnp.tanh(inputs @ weights["kernel"] + weights["bias"])


def weights_of_stages(sizes):
    shapes = itertools.pairwise(sizes)
    return [
        {"kernel": rng.normal(size=s).astype("float32"), "bias": np.ones(s[1], "float32")}
        for s in shapes
    ]


@pytest.mark.parametrize(
    ("microbatches", "schedule"),
    [(1, "gpipe"), (2, "gpipe"), (8, "gpipe"), (1, "1f1b"), (8, "1f1b")],
)
def test_gradients_through_a_pipeline_are_those_of_its_stages_in_turn(microbatches, schedule):
    weights = weights_of_stages([6, 8, 5, 7, 3])
    strategy = strategy_of(2, 2)
    variable = strategy.create_variables(
        {"pipeline_stages": pack_stages(weights)}, aggregation=unison.VariableAggregation.SUM
    )["pipeline_stages"]

    def step(x):
        def loss(packed, x):
            out = pipeline(
                [linear] * 4,
                packed,
                x,
                like=weights,
                microbatches=microbatches,
                schedule=schedule,
            )
            return (out**2).sum()

        value, gradients = jax.value_and_grad(loss, (0, 1))(variable.value(), x)
        variable.assign_sub(gradients[0])
        return value, gradients[1]

    def in_turn(packed, hidden):
        for row, like in zip(packed, weights, strict=True):
            hidden = linear(unpack_stage(row, like), hidden, 0)
        return (hidden**2).sum()

    (batch,) = strategy.experimental_distribute_dataset([X[:, :6]])
    value, of_batch = strategy.run(step, (batch,))
    packed = pack_stages(weights)
    expected, gradients = jax.value_and_grad(in_turn, (0, 1))(packed, X[:, :6])
    np.testing.assert_allclose(strategy.reduce("SUM", value), expected, **ROUND_OFF)
    np.testing.assert_allclose(variable.numpy(), packed - gradients[0], **ROUND_OFF)
    np.testing.assert_allclose(strategy.gather(of_batch, 0), gradients[1], **ROUND_OFF)


def test_tokens_go_through_a_pipeline_in_turns_without_a_gradient_of_their_own():
    tables = [rng.normal(size=(7, 5)).astype("float32"), np.eye(5, dtype="float32")]
    stages = [lambda table, tokens, _: table[tokens], lambda kernel, x, _: x @ kernel]
    tokens = rng.integers(0, 7, (8, 3))

    def gradient(packed):
        def loss(packed):
            out = pipeline(stages, packed, tokens, like=tables, microbatches=4, schedule="1f1b")
            return (out**2).sum()

        return jax.grad(loss)(packed)

    packed = pack_stages(tables)
    strategy = unison.ModelParallelStrategy(2, mesh={"stage": 2})
    np.testing.assert_allclose(strategy.run(gradient, (packed,)), gradient(packed), **ROUND_OFF)


def bytes_of_temporaries(schedule, microbatches, examples, width):
    """What a device takes for the gradient of four stages between which `width` features go."""
    shapes = [(2, width), (width, width), (width, width), (width, 2)]
    weights = [{"kernel": np.zeros(s, "f"), "bias": np.zeros(s[1], "f")} for s in shapes]
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(packed, x):
        out = pipeline(
            [linear] * 4, packed, x, like=weights, microbatches=microbatches, schedule=schedule
        )
        return (out**2).sum()

    packed = jax.ShapeDtypeStruct((4, pack_stages(weights).shape[1]), "float32")
    batch = jax.ShapeDtypeStruct((microbatches * examples, 2), "float32")
    shardings = tuple(jax.NamedSharding(mesh, spec) for spec in (jax.P("stage"), jax.P()))
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss), in_shardings=shardings).lower(packed, batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("schedule", "waiting"), [("gpipe", 32), ("1f1b", 0)])
def test_of_32_more_micro_batches_the_inputs_wait_or_not(schedule, waiting):
    examples, width = 8, 512
    few, many = (bytes_of_temporaries(schedule, count, examples, width) for count in (16, 48))
    assert round((many - few) / (examples * width * 4)) == pytest.approx(waiting, abs=2)


def test_the_bubble_is_the_share_of_idle_ticks():
    assert bubble(microbatches=1, devices=4) == 0.75
    assert bubble(microbatches=9, devices=1) == 0


# -- bad input -----------------------------------------------------------------------------


def test_a_batch_that_micro_batches_do_not_divide_is_refused():
    with strategy_of(2, 2).scope():
        model = build_pipeline()
    with pytest.raises(ValueError, match=r"4 micro-batches divide\. Received: 15 examples"):
        model.fit(X[:30], Y[:30], batch_size=30, verbose=0)


def test_stages_that_devices_do_not_divide_are_refused():
    strategy = strategy_of(1, 4)
    weights = weights_of_stages([4] * 4)

    def step():
        stages = [linear] * 3
        return pipeline(
            stages, pack_stages(weights), jnp.ones((4, 4)), like=weights, microbatches=2
        )

    with pytest.raises(ValueError, match=r"4 devices .*Received: 3 stages"):
        strategy.run(step)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (lambda: keras.layers.BatchNormalization(), "LayerNormalization"),
        (lambda: keras.layers.Dense(2, kernel_regularizer="l2"), "weight_decay"),
        (lambda: 3, "a layer, a model or a list"),
    ],
)
def test_a_stage_that_no_pipeline_can_have_is_refused(stage, said):
    with pytest.raises(ValueError, match=said):
        Pipeline([stage()], microbatches=1).build((None, 4))


def test_a_schedule_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"'gpipe', '1f1b'\)\. Received: 'zb'"):
        Pipeline([keras.layers.Dense(2)], microbatches=1, schedule="zb")


def test_parameters_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="one dtype"):
        pack_stages([jnp.ones(2), jnp.ones(2, jnp.bfloat16)])
