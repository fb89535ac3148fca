"""Training steps compiled for TPU slices that are not here: what they take, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from subprocess_program import UNISON, run_program
from unison.data import Dataset
from unison.planning import (
    DoesNotFitError,
    NothingToPlanError,
    collectives_of,
    plan_first_step,
    plan_fit,
    plan_run,
)
from unison.runtime.planned import NotRunHereError
from unison.runtime.tpu.slices import describe_slice
from unison.runtime.tpu.topology import DeviceAssignment, topology_of

pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
pytestmark = pytest.mark.timeout(600)  # XLA compiles on one core; the machine may be busy

FLOAT = 4


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def digits_model(optimizer: str | keras.optimizers.Optimizer = "adam") -> keras.Model:
    """The network of the articles."""
    model = keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


WEIGHTS_OF_DIGITS = 784 * 128 + 128 + 128 * 10 + 10


def digits(batch: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return shape(batch, 28, 28), shape(batch, dtype="int32")


def transformer() -> keras.Model:
    """Two causal blocks over 32 tokens of a vocabulary of 512."""
    tokens = keras.Input((32,), dtype="int32")
    hidden = keras.layers.Embedding(512, 64)(tokens)
    for _ in range(2):
        seen = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.MultiHeadAttention(4, 16)(seen, seen, use_causal_mask=True)
        seen = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.Dense(64)(keras.layers.Dense(256, activation="gelu")(seen))
    model = keras.Model(tokens, keras.layers.Dense(512)(hidden))
    model.compile(
        optimizer="adamw", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def made_in(strategy: unison.Strategy, build) -> keras.Model:
    with strategy.scope():
        return build()


# -- what a step takes ---------------------------------------------------------------------


@pytest.mark.parametrize(("target", "devices"), [("v5e:2x4", 8), ("v5e:16x16", 256)])
def test_the_articles_model_sends_all_gradients_and_metrics_in_one_all_reduce(target, devices):
    strategy = unison.TPUStrategy(topology=target)
    plan = plan_fit(made_in(strategy, digits_model), *digits(64 * devices))
    assert (plan.target, plan.num_chips, plan.num_replicas) == (target, devices, devices)
    metrics = 4  # totals and counts of loss and accuracy
    (only,) = plan.collectives
    assert only.kind == "all-reduce"
    assert only.bytes == (WEIGHTS_OF_DIGITS + metrics) * FLOAT
    weights = 4  # kernels and biases
    assert (only.tensors, only.group_size, only.runs) == (weights + metrics, devices, 1)
    assert only.sent_bytes == round(2 * (devices - 1) / devices * only.bytes)
    assert plan.memory.state["trainable_variables"] == WEIGHTS_OF_DIGITS * FLOAT
    slots = 2 * WEIGHTS_OF_DIGITS * FLOAT
    assert slots <= plan.memory.state["optimizer_variables"] <= slots + 16
    assert plan.memory.batch == 64 * (784 + 1) * FLOAT
    assert plan.memory.gradients == WEIGHTS_OF_DIGITS * FLOAT
    assert plan.flops > 6 * 64 * 784 * 128 * 0.6


@pytest.mark.soak
@pytest.mark.parametrize(
    ("target", "devices"),
    [("v5e:2x4", 8), pytest.param("v5e:8x8", 64, marks=pytest.mark.soak)],
)
def test_a_resnet_trains_with_one_all_reduce_and_fits_a_chip(target, devices):
    strategy = unison.TPUStrategy(topology=target)

    def build() -> keras.Model:
        model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3))
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
        return model

    model = made_in(strategy, build)
    plan = plan_fit(model, shape(8 * devices, 32, 32, 3), shape(8 * devices, dtype="int32"))
    weights = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert weights == 25_583_592
    assert [(one.kind, one.runs, one.group_size) for one in plan.collectives] == [
        ("all-reduce", 1, devices)
    ]
    assert plan.collectives[0].bytes - weights * FLOAT < 64
    assert plan.memory.state["trainable_variables"] == weights * FLOAT
    assert weights * FLOAT < plan.memory.temporaries < plan.memory.total < 15 * 2**30
    # The moving statistics are each replica's own: a device keeps one copy.
    assert plan.memory.state["non_trainable_variables"] == 53_120 * FLOAT


@pytest.mark.parametrize(("target", "devices"), [("v5e:2x4", 8), ("v5e:4x4", 16)])
def test_a_transformer_sends_its_gradients_in_one_all_reduce(target, devices):
    model = made_in(unison.TPUStrategy(topology=target), transformer)
    tokens = shape(4 * devices, 32, dtype="int32")
    plan = plan_fit(model, tokens, tokens)
    weights = model.count_params() * FLOAT
    assert [(one.kind, one.runs, one.group_size) for one in plan.collectives] == [
        ("all-reduce", 1, devices)
    ]
    assert weights <= plan.collectives[0].bytes <= weights + 64


@pytest.mark.soak
def test_gradients_are_summed_beside_products_up_to_bytes_per_pack():
    """By default, libtpu sums nearly all of them at once, while the core waits."""
    layers, width = 12, 2048
    strategy = unison.TPUStrategy(
        topology="v5e:2x4",
        communication_options=unison.CommunicationOptions(bytes_per_pack=2**22),
    )
    with strategy.scope():
        hidden = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(layers)]
        model = keras.Sequential([keras.Input((width,)), *hidden])
        model.compile("sgd", "mse")
    x = shape(8 * 256, width)
    planned = plan_fit(model, x, x, thorough=True)
    large = [one for one in planned.collectives if one.bytes > 64]
    assert {one.bytes for one in large} == {width**2 * FLOAT}  # each gradient by itself
    assert sum(one.runs for one in large) == layers
    assert planned.hidden_share >= 0.8


def test_a_sharded_update_scatters_gradients_and_divides_the_optimizers_state():
    strategy = unison.TPUStrategy(topology="v5e:2x4", sharded_update=True)

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024)])
        model.compile(optimizer="adam", loss="mse")
        return model

    plan = plan_fit(made_in(strategy, build), shape(64, 512), shape(64, 1024))
    kernel, bias = 512 * 1024 * FLOAT, 1024 * FLOAT
    of_kind = {one.kind: one for one in plan.collectives}
    assert of_kind["reduce-scatter"].bytes == of_kind["all-gather"].bytes == kernel
    assert of_kind["all-reduce"].bytes < 2 * bias
    slots = 2 * (kernel / 8 + bias)
    assert slots <= plan.memory.state["optimizer_variables"] <= slots + 16


def test_an_optimizer_that_needs_whole_weights_says_that_its_update_is_not_sharded(caplog):
    strategy = unison.TPUStrategy(topology="v5e:2x2", sharded_update=True)
    averaging = keras.optimizers.Adam(use_ema=True)
    model = made_in(strategy, lambda: digits_model(averaging))
    plan = plan_fit(model, *digits(64))
    assert {one.kind for one in plan.collectives} == {"all-reduce"}
    assert "sharded_update=True has no effect on optimizer 'Adam'" in caplog.text


def test_bfloat16_computes_in_16_bits_and_keeps_weights_of_32():
    strategy = unison.TPUStrategy(topology="v5e:2x2")
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = made_in(strategy, digits_model)
        plan = plan_fit(model, *digits(64))
    finally:
        keras.config.set_dtype_policy("float32")
    assert "bf16[" in plan.hlo
    assert plan.memory.state["trainable_variables"] == WEIGHTS_OF_DIGITS * FLOAT


def test_a_custom_loop_is_compiled_as_strategy_run_would():
    strategy = unison.TPUStrategy(topology="v5e:2x4")
    with strategy.scope():
        weights = unison.Variable(
            np.ones((256, 128), "float32"), aggregation=unison.VariableAggregation.MEAN
        )

    def step(x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights.read_value())
        total = unison.get_replica_context().all_reduce("SUM", gradient)
        weights.assign_sub(0.1 * total)

    plan = plan_run(strategy, step, (shape(32, 256),))
    assert plan.memory.state == {"variables": 256 * 128 * FLOAT}
    assert plan.memory.batch == 32 * 256 * FLOAT
    assert {one.kind for one in plan.collectives} == {"all-reduce"}


@pytest.mark.parametrize(("target", "replicas"), [("v5e:2x2", 4), ("v5e:1x1", 1)])
def test_a_loop_over_a_distributed_dataset_is_planned_at_its_first_step(target, replicas):
    def train() -> None:
        strategy = unison.TPUStrategy(topology=target)
        batches = Dataset.from_tensor_slices(np.zeros((100, 16), "float32")).batch(24)
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(lambda x: unison.get_replica_context().all_reduce("SUM", x), (batch,))

    plan = plan_first_step(train)
    assert plan.num_replicas == replicas
    assert plan.memory.batch == 24 // replicas * 16 * FLOAT
    assert [one.kind for one in plan.collectives] == ["all-reduce"] * (replicas > 1)


def test_cores_of_one_replica_divide_what_is_split():
    cores = topology_of(describe_slice("v5e:2x4").devices)
    assignment = DeviceAssignment.build(cores, [2, 1, 1, 1], num_replicas=4)
    strategy = unison.TPUStrategy(experimental_device_assignment=assignment, topology="v5e:2x4")
    assert strategy.num_replicas_in_sync == 4

    def step(x):
        halves = strategy.experimental_split_to_logical_devices(x, [1, 2])
        return jnp.sum(halves * 2)

    plan = plan_run(strategy, step, (shape(8, 1024),))
    assert plan.num_devices == 8
    (only,) = plan.collectives
    assert (only.kind, only.bytes, only.group_size) == ("all-reduce", FLOAT, 2)


def test_the_cores_of_a_replica_are_on_one_machine():
    cores = topology_of(describe_slice("v5e:2x4").devices)
    assignment = DeviceAssignment.build(cores, [2, 4, 1, 1], num_replicas=1)
    with pytest.raises(ValueError, match="Expected the cores of a replica on one machine"):
        unison.TPUStrategy(experimental_device_assignment=assignment, topology="v5e:2x4")


# -- what is refused -----------------------------------------------------------------------


def test_a_strategy_with_a_topology_refuses_to_run():
    strategy = unison.TPUStrategy(topology="v5e:2x4")
    model = made_in(strategy, digits_model)
    x, y = np.zeros((64, 28, 28), "float32"), np.zeros(64, "int32")
    for run in (
        lambda: model.fit(x, y, verbose=0),
        lambda: strategy.run(lambda: 3.0),
    ):
        with pytest.raises(NotRunHereError, match="devices of v5e:2x4") as raised:
            run()
        assert "unison plan" in str(raised.value)


def test_what_does_not_fit_says_by_how_much_and_what_would_help():
    strategy = unison.TPUStrategy(topology="v5e:2x2")
    model = made_in(strategy, transformer)
    tokens = shape(2**18, 32, dtype="int32")
    with pytest.raises(DoesNotFitError, match=r"into the 15\.\d GiB of a device of v5e:2x2") as no:
        plan_fit(model, tokens, tokens)
    assert no.value.needed > no.value.available
    divided = "less by ModelParallelStrategy(mesh={'batch': 4}, zero=3)"
    for mend in ("a global batch of about", "times as many chips", "mixed_bfloat16", divided):
        assert mend in str(no.value)


def test_a_plan_of_devices_that_are_here_is_refused(two_replicas):
    with pytest.raises(NothingToPlanError, match="devices are not here"):
        plan_run(two_replicas, lambda: 3.0)
    with pytest.raises(NothingToPlanError, match="a program that ended without one"):
        plan_first_step(lambda: None)


def test_central_storage_is_not_planned():
    from unison.runtime import devices

    with (
        devices.planned_for(describe_slice("v5e:2x2").devices),
        pytest.raises(ValueError, match="variables in central storage"),
    ):
        unison.CentralStorageStrategy()


# -- values --------------------------------------------------------------------------------


def test_small_variables_keep_their_values_and_large_ones_take_no_memory():
    strategy = unison.TPUStrategy(topology="v5e:16x16")
    with strategy.scope():
        rate = unison.Variable(0.25)
        own = unison.Variable(
            2.0,
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=unison.VariableAggregation.SUM,
        )
        large = unison.Variable(np.ones((512, 512), "float32"))
    rate.assign(0.5)
    assert (float(rate), float(own)) == (0.5, 512.0)
    assert not large.numpy().any()


def test_devices_of_a_slice_have_tensorflows_names():
    names = unison.TPUStrategy(topology="v5e:2x4").extended.worker_devices
    assert names[0] == "/job:worker/replica:0/task:0/device:TPU:0"
    assert names[5] == "/job:worker/replica:0/task:1/device:TPU:1"


# -- the text of a program ------------------------------------------------------------------

PROGRAM = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %inner = f32[16]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%condition (state: (s32[], f32[16])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %loop = (s32[], f32[16]) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %gather = (bf16[4,2]{1,0}, bf16[32,2]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %scatter = f32[2]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %swap = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}
}
"""  # noqa: E501


def test_collectives_are_read_from_loops_groups_and_pairs_of_start_and_done():
    found = {one.kind: one for one in collectives_of(PROGRAM)}
    assert found["all-reduce"] == ("all-reduce", 64, 1, 2, 5, 2)
    assert found["all-reduce"].sent_bytes == 5 * 64
    assert found["all-gather"] == ("all-gather", 32 * 2 * 2, 1, 8, 1, 8)
    assert found["reduce-scatter"] == ("reduce-scatter", 2 * FLOAT * 4, 1, 4, 1, 4)
    assert found["collective-permute"].bytes == 3 * FLOAT


# -- the command ---------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
import unison.tf as tf

strategy = {strategy}
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8)])
    model.compile(optimizer="sgd", loss="mse")
batch = int(sys.argv[1]) * strategy.num_replicas_in_sync
x = np.zeros((4 * batch, 16), "float32")
model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :8])).batch(batch), verbose=0)
print("trained")
"""
ON_A_TPU = "tf.distribute.TPUStrategy(tf.distribute.cluster_resolver.TPUClusterResolver(tpu='x'))"


def planned(tmp_path: Path, strategy: str, *options: str):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(strategy=strategy))
    arguments = ["plan", "--json", str(tmp_path / "plan.json"), *options, str(script), "3"]
    return run_program(UNISON, *arguments, timeout=300, imported=("jax", "unison"))


def test_a_program_with_another_strategy_is_planned_all_the_same(tmp_path):
    finished = planned(tmp_path, "tf.distribute.MirroredStrategy()", "--target", "v5e:2x2")
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["num_replicas"] == 4


def test_a_program_for_a_tpu_is_planned_for_several_slices_and_not_trained(tmp_path):
    finished = planned(tmp_path, ON_A_TPU, "--target", "v5e:2x2", "--target", "v5e:2x4")
    assert finished.returncode == 0, finished.stderr
    assert "trained" not in finished.stdout
    small, large = json.loads((tmp_path / "plan.json").read_text())
    assert (small["num_replicas"], large["num_replicas"]) == (4, 8)
    assert small["memory"]["batch"] == 3 * (16 + 8) * FLOAT
    for told in ("v5e:2x2", "v5e:2x4", "all-reduce", "trainable variables", "at peak rate"):
        assert told in finished.stdout


def test_a_slice_that_is_none_ends_the_command_with_the_slices_there_are(tmp_path):
    finished = planned(tmp_path, "tf.distribute.MirroredStrategy()", "--target", "v5e:7x7")
    assert finished.returncode == 2
    assert "Received: 'v5e:7x7'" in finished.stderr
    assert "4x4" in finished.stderr


def test_a_program_without_a_step_is_told_so(tmp_path):
    finished = planned(tmp_path, "print('bye') or sys.exit(0)", "--target", "v5e:2x2")
    assert finished.returncode == 2
    assert "a program that ended without one" in finished.stderr
