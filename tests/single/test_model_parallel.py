"""Variables divided between the devices of a replica, and between the replicas."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from keras_comparison import ROUND_OFF, assert_same_outcome, run_training, run_training_under
from unison.cells import Layout
from unison.partitioning import PartitionRules, partition_specs
from unison.strategies.model_parallel import _workers_per_replica

FEATURES, HIDDEN, CLASSES = 32, 64, 10
rng = np.random.default_rng(0)
# 70 examples by 32: the last batch of 6 leaves replicas with 3 and 3, or 2, 2, 2 and 0.
X = rng.normal(size=(70, FEATURES)).astype("float32")
Y = rng.integers(0, CLASSES, 70)

#: Megatron's: the first product is divided by columns, the second by rows.
RULES = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def two_by_two(rules=RULES, zero=0):
    return unison.ModelParallelStrategy(mesh={"batch": 2, "model": 2}, rules=rules, zero=zero)


def build(optimizer=None):
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, activation="relu", name="up"),
            keras.layers.Dense(HIDDEN, name="down"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    return model


def train(model, epochs=2):
    return model.fit(X, Y, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history


@pytest.fixture(scope="module")
def alone():
    return run_training(build, train)


def bytes_on_devices(variables):
    """What the variables' arrays take on each device that has some of them."""
    sizes = {}
    for variable in variables:
        for shard in variable.cell.array.addressable_shards:
            sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    return set(sizes.values())


# -- tensor parallel -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{"batch": 2, "model": 2}, {"batch": 1, "model": 4}], ids=str)
def test_a_model_with_divided_weights_trains_as_on_one_device(mesh, alone):
    strategy = unison.ModelParallelStrategy(mesh=mesh, rules=RULES)
    assert_same_outcome(run_training_under(strategy, build, train), alone)


def test_replicas_of_several_devices_may_have_parts_of_different_sizes():
    def train_on_odd(model):
        return model.fit(X[:37], Y[:37], batch_size=32, shuffle=False, verbose=0).history

    together = run_training_under(two_by_two(zero=3), build, train_on_odd)
    assert_same_outcome(together, run_training(build, train_on_odd))


def test_an_axis_of_one_device_divides_nothing():
    mesh, rules = {"batch": 4, "model": 1}, {"kernel": (None, "model")}
    strategy = unison.ModelParallelStrategy(mesh=mesh, rules=rules, zero=3)
    kernel = strategy.create_variables({"kernel": np.ones((64, 16), "float32")})["kernel"]
    assert bytes_on_devices([kernel]) == {4 * 64 * 16 // 4}
    sums = strategy.run(lambda: (jnp.ones(64) @ kernel.value()).sum())
    assert [float(value) for value in sums.values] == [64 * 16] * 4


def test_devices_have_their_parts_of_weights_and_slots_only():
    strategy = two_by_two()
    with strategy.scope():
        model = build()
    train(model, epochs=1)
    divided = FEATURES * HIDDEN + HIDDEN + HIDDEN * HIDDEN
    whole = HIDDEN + 2 * HIDDEN + HIDDEN * CLASSES + CLASSES
    assert bytes_on_devices(model.trainable_variables) == {4 * (divided // 2 + whole)}
    slots = [variable for variable in model.optimizer.variables if variable.shape]
    assert bytes_on_devices(slots) == {2 * 4 * (divided // 2 + whole)}
    up = model.get_layer("up").kernel.cell.array
    assert {shard.data.shape for shard in up.addressable_shards} == {(FEATURES, HIDDEN // 2)}


def test_evaluate_and_predict_see_whole_outputs(alone):
    def predictions(model):
        return model.predict(X, batch_size=32, verbose=0)

    together = run_training_under(two_by_two(), build, predictions)
    np.testing.assert_allclose(
        together.result, run_training(build, predictions).result, **ROUND_OFF
    )


def test_a_layout_map_of_keras_is_taken_as_it_is(alone):
    devices = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], list(range(4)))
    layout_map = keras.distribution.LayoutMap(devices)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*up/bias"] = ("model",)
    strategy = two_by_two(layout_map)
    assert_same_outcome(run_training_under(strategy, build, train), alone)
    with strategy.scope():
        kernel = build().get_layer("up").kernel
    assert kernel.cell.division == jax.P(None, "model")


def test_a_saved_model_goes_on_under_another_mesh(tmp_path, alone):
    with two_by_two(zero=3).scope():
        model = build()
    train(model)
    unison.train.Checkpoint(model=model, optimizer=model.optimizer).write(tmp_path / "point")
    with unison.ModelParallelStrategy(mesh={"batch": 1, "model": 4}, rules=RULES).scope():
        other = build()
    other.optimizer.build(other.trainable_variables)
    unison.train.Checkpoint(model=other, optimizer=other.optimizer).read(tmp_path / "point")
    for saved, restored in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(saved.numpy(), restored.numpy())
    np.testing.assert_allclose(train(other)["loss"], train(model)["loss"], **ROUND_OFF)


def test_a_keras_file_is_loaded_without_a_strategy(tmp_path):
    with two_by_two(zero=3).scope():
        model = build()
    train(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for saved, restored in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), restored.numpy())


def normalized():
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, name="up"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Activation("relu"),
            keras.layers.Dense(HIDDEN, name="down"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile("sgd", LOSS)
    return model


def test_statistics_and_random_streams_are_those_of_replicas_of_one_device():
    data_parallel = unison.MirroredStrategy(["CPU:0", "CPU:1"])
    expected = run_training_under(data_parallel, normalized, train)
    assert_same_outcome(run_training_under(two_by_two(zero=1), normalized, train), expected)


# -- ZeRO ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_that_divide_their_state_train_as_one_device(zero, alone):
    assert_same_outcome(run_training_under(two_by_two(zero=zero), build, train), alone)


def clipping_together():
    return build(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5))


def accumulating():
    return build(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


def averaging():
    return build(keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.5))


def looking_at_whole_weights():
    return build(keras.optimizers.Adafactor(0.01))


@pytest.mark.parametrize(
    "build_with",
    [
        clipping_together,
        accumulating,
        averaging,
        pytest.param(looking_at_whole_weights, marks=pytest.mark.soak),
    ],
)
def test_every_optimizer_trains_with_divided_state(build_with, caplog):
    strategy = unison.ModelParallelStrategy(mesh={"batch": 4}, zero=3)
    assert_same_outcome(
        run_training_under(strategy, build_with, train), run_training(build_with, train)
    )
    says_so = "zero=3 divides the state, but not the update" in caplog.text
    assert says_so == (build_with is not clipping_together)


@pytest.mark.parametrize(("zero", "weights", "slots"), [(0, 1, 1), (1, 1, 4), (2, 1, 4), (3, 4, 4)])
def test_a_stage_of_zero_says_what_replicas_divide(zero, weights, slots):
    with unison.ModelParallelStrategy(mesh={"batch": 4}, zero=zero).scope():
        model = build()
    train(model, epochs=1)
    kernels = [weight for weight in model.trainable_variables if weight.shape[-1] == HIDDEN]
    kernels = [kernel for kernel in kernels if len(kernel.shape) == 2]
    (of_kernels,) = bytes_on_devices(kernels)
    assert of_kernels == 4 * (FEATURES + HIDDEN) * HIDDEN // weights
    shapes = [kernel.shape for kernel in kernels]
    of_slots = bytes_on_devices([v for v in model.optimizer.variables if v.shape in shapes])
    assert of_slots == {2 * 4 * (FEATURES + HIDDEN) * HIDDEN // slots}


def test_small_weights_stay_whole():
    with unison.ModelParallelStrategy(mesh={"batch": 4}, zero=3).scope():
        model = build()
    assert model.get_layer("up").bias.cell.layout is Layout.MIRRORED


# -- custom loops --------------------------------------------------------------------------


def test_a_custom_loop_computes_with_divided_weights():
    strategy = two_by_two()

    def in_a_loop(model):
        optimizer = model.optimizer
        losses = []

        def step(x, y):
            def loss(weights):
                logits, _ = model.stateless_call(weights, model.non_trainable_variables, x)
                each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
                return each.sum() / len(X)

            weights = [weight.value for weight in model.trainable_variables]
            value, gradients = jax.value_and_grad(loss)(weights)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        for _ in range(3):
            current = unison.get_strategy() if unison.has_strategy() else None
            chosen = current or (strategy if hasattr(model, "_unison_trainer") else None)
            if chosen is None:
                losses.append(float(step(X, Y)))
                continue
            (batch,) = chosen.experimental_distribute_dataset([(X, Y)])
            losses.append(float(chosen.reduce("SUM", chosen.run(step, batch))))
        return losses

    def build_plain():
        model = build()
        model.optimizer.build(model.trainable_variables)
        return model

    together = run_training_under(strategy, build_plain, in_a_loop)
    assert_same_outcome(together, run_training(build_plain, in_a_loop))


@pytest.mark.parametrize("zero", [0, 3])
def test_variables_made_of_a_tree_are_divided_by_their_paths(zero):
    tree = {"up": {"kernel": np.ones((FEATURES, HIDDEN), "float32")}, "scale": np.float32(2)}
    strategy = two_by_two({"up/kernel": (None, "model")}, zero)
    variables = strategy.create_variables(tree, aggregation=unison.VariableAggregation.MEAN)
    kernel = variables["up"]["kernel"]
    shards = {shard.data.shape for shard in kernel.cell.array.addressable_shards}
    assert shards == {(FEATURES // 2 if zero else FEATURES, HIDDEN // 2)}

    def step(x):
        kernel.assign(kernel + x)
        return (jnp.ones(FEATURES) @ kernel).sum()

    results = strategy.run(step, (unison.PerReplica([np.float32(1), np.float32(3)]),))
    np.testing.assert_array_equal(kernel.numpy(), np.full((FEATURES, HIDDEN), 3))
    assert [float(value) for value in results.values] == [3 * FEATURES * HIDDEN] * 2
    assert {s.data.shape for s in kernel.cell.array.addressable_shards} == shards


def test_a_step_says_how_an_activation_is_divided():
    def step(x):
        return jax.lax.with_sharding_constraint(x * 2, jax.P(None, "model")).sum()

    results = two_by_two().run(step, (jnp.ones((4, 8)),))
    assert [float(value) for value in results.values] == [64, 64]


# -- bad input -----------------------------------------------------------------------------


def test_a_rule_that_matches_nothing_is_named_once(caplog):
    strategy = two_by_two({**RULES, "attention": (None, "model")})
    with caplog.at_level(logging.WARNING, "unison"), strategy.scope():
        train(build(), epochs=1)
    (said,) = [record.getMessage() for record in caplog.records if "rule" in record.getMessage()]
    assert "'attention'" in said


def test_an_axis_that_does_not_divide_a_dimension_names_both():
    with (
        two_by_two({"kernel": (None, "model")}).scope(),
        pytest.raises(ValueError, match=r"dimension 1 of variable 'odd/kernel'.* by 2.*\(4, 3\)"),
    ):
        keras.layers.Dense(3, name="odd").build((None, 4))


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"kernel": (None, "modell")}, r"\['model'\]. Received: 'kernel'"),
        ({"kernel": ("batch", None)}, "zero="),
        ({"kernel": "model"}, "a tuple"),
        ({"kernel": ("model", "model")}, "each mesh axis once"),
        ({"(": (None,)}, "regular expression"),
    ],
)
def test_a_rule_that_no_mesh_can_follow_is_refused(rules, said):
    with pytest.raises(ValueError, match=said):
        two_by_two(rules)


def test_a_rule_with_too_many_entries_is_refused():
    rules = PartitionRules({"bias": (None, "model")}, {"model": 2})
    with pytest.raises(ValueError, match=r"'bias'.*\(4,\)"):
        rules.division_of("bias", (4,))


def test_the_first_rule_that_is_found_counts():
    rules = {"up/kernel": (None, "model"), "kernel": ("model",)}
    tree = {"up": {"kernel": np.ones((4, 4))}, "down": {"kernel": np.ones((4, 4))}}
    specs = partition_specs(tree, rules, {"model": 2})
    assert specs == {"up": {"kernel": jax.P(None, "model")}, "down": {"kernel": jax.P("model")}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": {"batch": 4, "model": 4}}, "4 devices.*takes 16"),
        ({"mesh": {"batch": 1, "model": 2}, "devices": 4}, "4 devices.*takes 2"),
        ({"mesh": {"replica": 2}}, "'batch'"),
        ({"mesh": {"model": 0}}, "sizes of the mesh axes"),
        ({"mesh": {"batch": 4}, "zero": 4}, "0 to 3"),
        ({"mesh": {}, "topology": "v5e:2x4", "devices": 4}, "both"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        unison.ModelParallelStrategy(**options)


@pytest.mark.parametrize(
    ("devices", "axes", "workers"),
    [
        ((2, 2), {}, 1),
        ((4, 8), {"model": 4}, 1),
        ((2, 2, 2, 2), {"stage": 2, "model": 2}, 2),
        ((4, 4), {"model": 8, "stage": 1}, 2),
        ((1, 1, 1, 1), {"model": 4}, 4),
    ],
)
def test_a_replica_has_devices_of_as_few_workers_as_it_needs(devices, axes, workers):
    assert _workers_per_replica(devices_of(devices), axes) == workers


@pytest.mark.parametrize(
    ("devices", "axes", "said"),
    [
        ((2, 2, 2), {"model": 3}, "workers with 2 devices, and replicas of 3"),
        ((1, 3), {"model": 4}, "workers with 1 and 3 devices, and replicas of 4"),
    ],
)
def test_a_replica_of_a_part_of_a_worker_is_refused(devices, axes, said):
    with pytest.raises(ValueError, match=said):
        _workers_per_replica(devices_of(devices), axes)


def devices_of(workers):
    """Devices of workers, of which each has so many."""
    return [
        SimpleNamespace(process_index=worker)
        for worker, count in enumerate(workers)
        for _ in range(count)
    ]


def test_a_job_whose_workers_may_change_is_refused(monkeypatch):
    monkeypatch.setenv("UNISON_ELASTIC", "{}")
    with pytest.raises(ValueError, match=r"fixed set of workers.*Leave --min-workers out"):
        unison.ModelParallelStrategy(mesh={"model": 2})


def test_a_mesh_without_a_batch_axis_has_replicas_on_all_devices():
    assert unison.ModelParallelStrategy(mesh={"model": 2}).num_replicas_in_sync == 2


@pytest.mark.parametrize("zero", range(4))
def test_weights_and_slots_take_the_bytes_that_were_predicted(zero):
    strategy = two_by_two(zero=zero)
    with strategy.scope():
        model = build()
    predicted = strategy.predicted_bytes(model.trainable_variables)
    model.optimizer.build(model.trainable_variables)
    assert bytes_on_devices(model.trainable_variables) == {predicted["weights"]}
    slots = [variable for variable in model.optimizer.variables if variable.shape]
    assert bytes_on_devices(slots) == {predicted["optimizer"]}


def test_state_of_an_optimizer_in_a_tree_is_divided_from_the_first_stage_on():
    strategy = unison.ModelParallelStrategy(mesh={"batch": 4}, zero=1)
    tree = {"kernel": np.ones((FEATURES, HIDDEN), "float32")}
    weights = strategy.create_variables(tree)
    moments = strategy.create_variables(tree, of_optimizer=True)
    assert bytes_on_devices(weights.values()) == {4 * FEATURES * HIDDEN}
    assert bytes_on_devices(moments.values()) == {FEATURES * HIDDEN}
