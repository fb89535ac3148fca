"""Optimizers that send compressed gradients: in Keras' fit, in loops of one's own, and Optax."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import unison
import unison.train
from hlo import compiled_programs
from unison import compression
from unison.cells import Layout
from unison.compression import everything
from unison.planning import plan_fit

METHODS = {
    "bfloat16": compression.bfloat16(),
    "float16": compression.float16(),
    "int8": compression.int8(),
    "int4": compression.int4(),
    "sign": compression.sign(),
    "topk": compression.topk(0.1),
    "powersgd": compression.powersgd(2),
}
FEATURES = 48
rng = np.random.default_rng(0)
X = rng.normal(size=(38, FEATURES)).astype("float32")
Y = (X[:, :8] @ rng.normal(size=(8, 4))).astype("float32")


def momentum():
    return keras.optimizers.SGD(0.02, momentum=0.9)


def built(strategy, method, make_optimizer=momentum, model_class=keras.Sequential, units=64):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = model_class(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(units, "tanh"),
                keras.layers.Dense(4),
            ]
        )
        optimizer = make_optimizer()
        if method is not None:
            assert unison.train.with_compression(optimizer, method) is optimizer
        model.compile(optimizer, "mse")
    return model


def fit(model, epochs=2):
    # The last batch of 6 gives 4 replicas 2, 2, 2 and 0 examples.
    return model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def loop(strategy, model, steps=3):
    """A loop of one's own, over even batches."""
    count = strategy.num_replicas_in_sync
    weights = model.trainable_variables
    with strategy.scope():
        model.optimizer.build(weights)

    def step(x, y):
        def loss(values):
            outputs, _ = model.stateless_call(values, [], x)
            return jnp.sum((outputs - y) ** 2) / (16 * 4)

        model.optimizer.apply(jax.grad(loss)([weight.value for weight in weights]), weights)

    for start in range(0, 16 * steps % 32 + 16, 16):
        parts = [np.split(array[start : start + 16], count) for array in (X, Y)]
        strategy.run(step, tuple(map(unison.PerReplica, parts)))


def copies(variable):
    """The replicas' copies of a variable, stacked."""
    stored = variable.cell.array
    if variable.cell.layout is Layout.LOCAL:
        return np.asarray(stored)
    return np.stack([np.asarray(shard.data) for shard in stored.addressable_shards])


def assert_weights_close(model, other, atol=1e-6):
    for one, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, expected, atol=atol)


# -- Keras -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_replicas_that_fit_by_compressed_gradients_stay_equal(method, four_replicas):
    model = built(four_replicas, method)
    losses = fit(model, epochs=3)
    assert losses[-1] < losses[0]
    for weight in model.trainable_variables:
        assert weight.cell.layout is Layout.MIRRORED
        assert (copies(weight) == copies(weight)[0]).all()


@pytest.mark.parametrize(
    "method",
    [
        compression.bfloat16(warmup_steps=100),
        compression.float16(rule=lambda path, weight: False),
        compression.int8(warmup_steps=100),
        compression.int4(rule=lambda path, weight: False),
        compression.topk(1.0, momentum=0, rule=everything),
        compression.powersgd(64),
        compression.local_sgd(1),
        compression.diloco(1, outer_learning_rate=1.0, outer_momentum=0.0),
    ],
    ids=["bfloat16", "float16", "int8", "int4", "topk", "powersgd", "local_sgd", "diloco"],
)
def test_without_loss_training_is_that_without_compression(method, four_replicas):
    plain, other = built(four_replicas, None), built(four_replicas, method)
    fit(plain), fit(other)
    assert_weights_close(other, plain)
    assert other.evaluate(X, Y, verbose=0) == pytest.approx(plain.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize(
    "method", [compression.sign(warmup_steps=100), compression.topk(1.0)], ids=["sign", "topk"]
)
def test_the_momentum_of_a_compression_is_that_of_the_optimizer(method, four_replicas):
    plain = built(four_replicas, None)
    other = built(four_replicas, method, lambda: keras.optimizers.SGD(0.02))
    fit(plain), fit(other)
    assert_weights_close(other, plain)


@pytest.mark.parametrize(
    ("method", "atol"),
    [
        (compression.bfloat16(), 2e-3),
        (compression.sign(momentum=0, warmup_steps=100), 1e-6),
        (compression.local_sgd(1), 1e-6),
    ],
    ids=["bfloat16", "sign", "local_sgd"],
)
def test_a_loop_of_ones_own_is_compressed_as_well(method, atol, two_replicas, monkeypatch):
    plain, other = built(two_replicas, None), built(two_replicas, method)
    loop(two_replicas, plain)
    texts = compiled_programs(monkeypatch)
    loop(two_replicas, other)
    assert_weights_close(other, plain, atol)
    assert int(unison_step(other.optimizer)) == 2
    assert any("all-to-all(" in text for text in texts) == (method != compression.local_sgd(1))


def unison_step(optimizer):
    (step,) = (v for v in optimizer.variables if v.name == "compression_step")
    return step.numpy()


def test_a_step_of_ones_own_in_fit_is_compressed_as_well(two_replicas):
    class Assigning(keras.Sequential):
        def train_step(self, data):
            x, y = data
            weights = self.trainable_variables

            def loss(values):
                squares = (self.stateless_call(values, [], x)[0] - y) ** 2
                return jnp.mean(squares) / two_replicas.num_replicas_in_sync

            value, gradients = jax.value_and_grad(loss)([w.value for w in weights])
            self.optimizer.apply(gradients, weights)
            return {"loss": value}

    plain, other = built(two_replicas, None), built(two_replicas, compression.sign())
    assigning = built(two_replicas, compression.sign(), model_class=Assigning)
    for model in (plain, other, assigning):
        fit(model, epochs=1)
    assert_weights_close(assigning, other)
    assert np.abs(assigning.get_weights()[0] - plain.get_weights()[0]).max() > 1e-4


def test_one_device_trains_as_without_compression():
    strategy = unison.OneDeviceStrategy("CPU:0")
    plain, other = built(strategy, None), built(strategy, compression.sign(momentum=0))
    fit(plain), fit(other)
    assert_weights_close(other, plain, atol=0)


@pytest.mark.parametrize(
    "method",
    [
        compression.topk(0.05, momentum=0),
        compression.sign(momentum=0),
        compression.powersgd(2),
        compression.int8(error_feedback=True),
    ],
    ids=["topk", "sign", "powersgd", "int8"],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_weight_without_a_gradient_keeps_what_is_to_be_sent_of_it(method, two_replicas):
    given = rng.normal(size=(6, 2, 40, 40)).astype("float32")
    with two_replicas.scope():
        weights = [keras.Variable(np.zeros((40, 40), "float32"), name=name) for name in "ab"]
        sgd = unison.train.with_compression(keras.optimizers.SGD(1.0), method)
        sgd.build(weights)

    def step(place, gradient):
        sgd.apply([gradient], [weights[place]])

    for index, of_replicas in enumerate(given):
        update = functools.partial(step, index % 2)
        two_replicas.run(update, (unison.PerReplica(list(of_replicas)),))
    residuals = [v for v in sgd.variables if "residual" in v.name]
    for place, (weight, residual) in enumerate(zip(weights, residuals, strict=True)):
        owed = residual.numpy()
        assert np.abs(owed).max() > 1e-3
        expected = given[place::2].sum(axis=(0, 1))
        np.testing.assert_allclose(owed - weight.numpy(), expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_the_momentum_of_a_weight_without_a_gradient_waits(two_replicas):
    method = compression.topk(1.0, momentum=0.5)
    with two_replicas.scope():
        weights = [keras.Variable(np.zeros(shape, "float32")) for shape in [(40, 40), (3,)]]
        sgd = unison.train.with_compression(keras.optimizers.SGD(1.0), method)
        sgd.build(weights)

    def step(place):
        sgd.apply([jnp.ones(weights[place].shape)], [weights[place]])

    for place in (0, 1, 0, 1):
        two_replicas.run(functools.partial(step, place))
    # 2, and 2 + 1 of momentum: as if no other weight had been between.
    for weight in weights:
        np.testing.assert_array_equal(weight.numpy(), np.full(weight.shape, -5))


def test_every_replica_updates_whole_weights(two_replicas):
    model = built(two_replicas, compression.int8(), units=2**11)
    fit(model, epochs=1)
    assert Layout.SHARDED not in {variable.cell.layout for variable in model.optimizer.variables}


def test_the_residual_lies_in_variables_of_which_each_replica_has_its_own(two_replicas):
    model = built(two_replicas, compression.sign())
    fit(model, epochs=1)
    (residual,) = (v for v in model.optimizer.variables if "residual" in v.name)
    assert residual.cell.layout is Layout.LOCAL
    first, second = copies(residual)
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(residual.numpy(), first + second, rtol=1e-6)
    sent, norm = unison.train.compression_report(model.optimizer)
    assert sent.compressed == (model.layers[0].kernel.path,)
    assert sent.bytes_sent < sent.bytes_uncompressed / 5
    assert norm == pytest.approx(np.linalg.norm(first + second), rel=1e-5)


def test_a_checkpoint_has_what_is_still_to_be_sent(two_replicas, four_replicas, tmp_path):
    model = built(two_replicas, compression.sign())
    fit(model, epochs=1)
    path = unison.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    other = built(four_replicas, compression.sign())
    with four_replicas.scope():
        other.optimizer.build(other.trainable_variables)
    unison.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    for one, expected in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), expected.numpy(), rtol=1e-6)
    (residual,) = (v for v in other.optimizer.variables if "residual" in v.name)
    assert copies(residual).shape[0] == 4
    fit(other, epochs=1)


def test_one_replica_sends_what_a_checkpoint_of_several_owes(two_replicas, tmp_path):
    model = built(two_replicas, compression.sign(momentum=0))
    fit(model, epochs=1)
    assert unison.train.compression_report(model.optimizer)[1] > 0
    path = unison.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    alone = unison.OneDeviceStrategy("CPU:0")
    other = built(alone, compression.sign(momentum=0))
    with alone.scope():
        other.optimizer.build(other.trainable_variables)
    unison.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    assert unison.train.compression_report(other.optimizer)[1] > 0
    fit(other, epochs=1)
    assert unison.train.compression_report(other.optimizer)[1] == 0


def test_a_step_that_overflows_is_skipped_by_the_loss_scale_and_forgotten(two_replicas):
    def scaled():
        return keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=2.0**12)

    model = built(two_replicas, compression.sign(), scaled)
    plain_scale = built(two_replicas, compression.sign())
    fit(model), fit(plain_scale)
    assert_weights_close(model, plain_scale, atol=1e-5)
    weights, variables = model.get_weights(), model.optimizer.inner_optimizer.variables
    (residual,) = (v for v in variables if "residual" in v.name)
    before = copies(residual)
    model.fit(X[:16] * np.float32(np.inf), Y[:16], batch_size=16, verbose=0)
    np.testing.assert_array_equal(copies(residual), before)
    for weight, old in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, old)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**11


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_weights_of_half_precision_are_compressed_in_single_precision(name, two_replicas):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = built(two_replicas, METHODS[name])
    finally:
        keras.config.set_dtype_policy(policy)
    losses = fit(model, epochs=3)
    assert losses[-1] < losses[0]
    for weight in model.trainable_variables:
        assert weight.dtype == "bfloat16"
        assert (copies(weight) == copies(weight)[0]).all()
    kept = [v.dtype for v in model.optimizer.variables if "of_replica" in v.name]
    assert set(kept) <= {"float32"}


# -- other strategies --------------------------------------------------------------------------

OTHER_STRATEGIES = {
    "central storage": lambda: unison.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:3"),
    "model parallel": lambda: unison.ModelParallelStrategy(
        mesh={"batch": 2, "model": 2}, rules={r"dense.*/kernel": (None, "model")}
    ),
}


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("central storage", "sign"),
        ("model parallel", "topk"),
        *(
            pytest.param(strategy, method, marks=pytest.mark.soak)
            for strategy in OTHER_STRATEGIES
            for method in ("bfloat16", "int8", "powersgd")
        ),
    ],
)
def test_other_strategies_compress_as_mirrored_variables_do(strategy, method, two_replicas):
    models = [built(s, METHODS[method]) for s in (OTHER_STRATEGIES[strategy](), two_replicas)]
    for model in models:
        model.fit(X[:32], Y[:32], batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_weights_close(*models, atol=1e-5)


@pytest.mark.timeout(600)  # XLA compiles on one core; the machine may be busy
@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        (compression.int8(), {"all-to-all", "all-gather"}),
        pytest.param(compression.sign(), {"all-to-all", "all-gather"}, marks=pytest.mark.soak),
        pytest.param(compression.topk(), {"all-reduce"}, marks=pytest.mark.soak),
        pytest.param(compression.powersgd(), {"all-reduce"}, marks=pytest.mark.soak),
    ],
    ids=["int8", "sign", "topk", "powersgd"],
)
def test_a_step_of_a_tpu_slice_sends_the_small_type(method, kinds):
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
    model = built(unison.TPUStrategy(topology="v5e:2x4"), method, units=512)
    like = [jax.ShapeDtypeStruct((64, size), jnp.float32) for size in (FEATURES, 4)]
    plan = plan_fit(model, *like)
    assert kinds <= {one.kind for one in plan.collectives}  # XLA may sum what is small
    kernel = FEATURES * 512 * 4
    assert sum(one.sent_bytes for one in plan.collectives) < kernel


# -- options of the optimizer ------------------------------------------------------------------


@pytest.mark.parametrize("option", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_behind_error_feedback_is_warned_of(option, two_replicas, caplog):
    def clipping():
        return keras.optimizers.SGD(0.02, **{option: 1.0})

    for method in (compression.int8(), compression.sign()):
        model = built(two_replicas, method, clipping)
        model.optimizer.build(model.trainable_variables)
    (said,) = [each for each in caplog.records if "from the decompressed sum" in each.getMessage()]
    assert said.levelno == logging.WARNING
    assert option in said.getMessage()


def test_accumulation_behind_a_compression_is_warned_of(two_replicas, caplog):
    model = built(
        two_replicas,
        compression.int8(),
        lambda: keras.optimizers.SGD(0.02, gradient_accumulation_steps=2),
    )
    fit(model, epochs=1)
    assert any("accumulates the gradients of 2 steps" in line for line in caplog.messages)


# -- training apart ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", [compression.local_sgd(3), compression.diloco(3)])
def test_replicas_train_apart_and_meet(method, two_replicas):
    model = built(two_replicas, method)
    model.fit(X[:32], Y[:32], batch_size=16, shuffle=False, verbose=0)
    kernel = model.layers[0].kernel
    first, second = copies(kernel)
    assert np.abs(first - second).max() > 1e-4
    np.testing.assert_allclose(model.get_weights()[0], (first + second) / 2, atol=1e-7)
    predicted = model.predict(X[:5], verbose=0)
    with two_replicas.scope():
        same = keras.models.clone_model(model)
    same.set_weights(model.get_weights())
    np.testing.assert_allclose(predicted, same.predict(X[:5], verbose=0), atol=1e-5)
    model.fit(X[:16], Y[:16], batch_size=16, shuffle=False, verbose=0)
    first, second = copies(kernel)
    assert np.array_equal(first, second)


def test_diloco_goes_by_nesterovs_momentum():
    method = compression.diloco(1, outer_learning_rate=0.5, outer_momentum=0.5)
    state = method.init({"w": jnp.float32(1.0)})
    weights = {"w": jnp.float32(1.0)}
    for _ in range(2):
        after = {"w": weights["w"] - 1}
        weights, state = method.synchronized(weights, after, state)
    # d = 1, v = 1: 1 - 0.5 (1 + 0.5) = 0.25; d = 1, v = 1.5: 0.25 - 0.5 (1 + 0.75) = -0.625
    assert float(weights["w"]) == pytest.approx(-0.625)


def test_small_outer_steps_of_half_precision_add_up():
    method = compression.diloco(1, outer_learning_rate=0.25, outer_momentum=0.0)
    weights = {"w": jnp.ones((), jnp.bfloat16)}
    state = method.init(weights)
    for _ in range(8):
        after = {"w": weights["w"] - jnp.bfloat16(2**-8)}
        weights, state = method.synchronized(weights, after, state)
    # Each goes a quarter of what a half float below 1 can tell.
    assert weights["w"].dtype == jnp.bfloat16
    assert float(weights["w"]) == 1 - 8 * 2**-10
    weights, state = method.synchronized({"w": jnp.bfloat16(3)}, {"w": jnp.bfloat16(2)}, state)
    assert float(weights["w"]) == 2.75  # the weights were loaded: a round begins there


def test_training_apart_takes_no_notice_of_compresses_and_says_so(tmp_path, caplog):
    strategy = unison.MultiWorkerMirroredStrategy(
        communication_options=unison.CommunicationOptions(compresses=False)
    )
    model = built(strategy, compression.local_sgd(3))
    board = unison.keras.TensorBoard(tmp_path)
    model.fit(X[:32], Y[:32], batch_size=16, verbose=0, callbacks=[board])
    kernel = copies(model.layers[0].kernel)
    assert np.abs(kernel[0] - kernel[1]).max() > 1e-4
    assert any("does not switch local_sgd and diloco off" in line for line in caplog.messages)
    sent, _ = unison.train.compression_report(model.optimizer)
    assert board._communication()["communication/bytes_a_step"] == sent.bytes_sent


# -- Optax -------------------------------------------------------------------------------------


def optax_steps(transformation, strategy, steps=2):
    weights = {"w": jnp.ones((FEATURES, 32)), "b": jnp.zeros(32)}

    def step(weights, state, x):
        def loss(weights):
            return jnp.sum(jnp.tanh(x @ weights["w"] + weights["b"])) / 16

        updates, state = transformation.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    state = transformation.init(weights)
    for index in range(steps):
        x = np.split(X[16 * index : 16 * index + 16], strategy.num_replicas_in_sync)
        weights, state = strategy.run(step, (weights, state, unison.PerReplica(x)))
    return weights, state


def test_an_optax_transformation_sends_compressed_gradients(two_replicas):
    sgd = optax.sgd(0.1, momentum=0.9)
    expected, _ = optax_steps(unison.train.aggregated(sgd), two_replicas)
    for method, atol in [
        (compression.int8(), 1e-3),
        (compression.sign(momentum=0, warmup_steps=5), 1e-6),
        (compression.local_sgd(1), 1e-6),
    ]:
        weights, state = optax_steps(unison.train.compressed(sgd, method), two_replicas)
        assert int(state.compression.step.values[0]) == 2
        for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, atol=atol)


def test_the_state_of_an_optax_transformation_is_each_replicas_own(two_replicas):
    transformation = unison.train.compressed(optax.sgd(0.1), compression.sign(), op="MEAN")
    weights, state = optax_steps(transformation, two_replicas)
    first, second = state.compression.of_replica["residual"][0].values
    assert not np.array_equal(first, second)
    assert np.array_equal(*weights["w"].values)


def test_an_optax_transformation_that_trains_apart_needs_the_weights():
    transformation = unison.train.compressed(optax.sgd(0.1), compression.local_sgd(2))
    with pytest.raises(ValueError, match=r"update\(gradients, state, params\)"):
        transformation.update(jnp.ones(3), transformation.init(jnp.ones(3)))


# -- bad arguments -----------------------------------------------------------------------------


def test_only_keras_optimizers_are_given_a_compression():
    with pytest.raises(TypeError, match="Expected a Keras optimizer"):
        unison.train.with_compression(optax.sgd(0.1), compression.int8())
    with pytest.raises(TypeError, match="Expected a compression"):
        unison.train.with_compression(keras.optimizers.SGD(), "int8")
    with pytest.raises(TypeError, match="Expected a compression"):
        unison.train.compressed(optax.sgd(0.1), compression.int8)


def test_an_optimizer_is_given_one_compression():
    optimizer = unison.train.with_compression(keras.optimizers.SGD(), compression.int8())
    with pytest.raises(ValueError, match="has a compression already"):
        unison.train.with_compression(optimizer, compression.int4())


def test_a_loss_scale_and_replicas_apart_do_not_go_together():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="take no LossScaleOptimizer"):
        unison.train.with_compression(optimizer, compression.local_sgd())


def test_what_has_no_compression_has_no_report():
    with pytest.raises(ValueError, match="has no compression"):
        unison.train.compression_report(keras.optimizers.SGD())
