"""Steps planned for clusters that are not here: what is told, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
import unison.tf as tf
from subprocess_program import UNISON, run_program
from unison.data import Dataset
from unison.planning import (
    Calibration,
    Device,
    DoesNotFitError,
    Exchange,
    Link,
    StepMemory,
    StepPlan,
    UnknownHardwareError,
    Workload,
    calibration,
    cluster_named,
    collectives_of,
    plan_first_step,
    plan_fit,
    plan_run,
    preferred,
    read_calibration,
    step_time,
    target,
)
from unison.planning.clusters import described_devices
from unison.planning.communication import collective_seconds
from unison.planning.division import Division
from unison.planning.kernels import kernels_of
from unison.planning.options import Step, choices
from unison.planning.overlap import overlaps_of
from unison.planning.page import plans_page
from unison.program.control_flow import ControlFlowError
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver

pytestmark = pytest.mark.timeout(300)

FLOAT = 4
WIDTH = 512
WEIGHTS = WIDTH * WIDTH + WIDTH
CORE = Device("cpu", 32e6, 1e10, 1e11, 1e11, 1.0, is_measured=True)
MEASURED = Calibration(
    CORE, Link("measured", 1e9, 1e-5), cores=2, shared_link=Link("measured", 5e8, 1e-4)
)


FOUR_CORES = MEASURED._replace(cores=4)


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture(autouse=True, scope="module")
def without_gpu_compiler():
    """Plans GPUs by programs for CPUs, as where no GPU compiler is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unison.planning.gpu_compiler.library", lambda: None)
        described_devices.cache_clear()
        yield
    described_devices.cache_clear()


def planned(name: str, batch_of_each: int = 8, network: str | None = None) -> StepPlan:
    """A dense layer of 512 by 512 under Adam."""
    with target(name, network, MEASURED):
        strategy = unison.MirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
            model.compile(optimizer="adam", loss="mse")
        batch = batch_of_each * strategy.num_replicas_in_sync
        return plan_fit(model, shape(batch, WIDTH), shape(batch, WIDTH))


def test_every_device_and_link_says_where_its_numbers_are_from():
    tables = tomllib.loads(
        importlib.resources.files("unison.planning").joinpath("hardware.toml").read_text("utf-8")
    )
    for stated in (*tables["devices"].values(), *tables["links"].values()):
        assert stated["source"]
    for device in tables["devices"].values():
        assert device["reached_source"]
        assert device["kernel_source"]


# -- what a step takes ---------------------------------------------------------------------


def test_a_step_for_gpus_tells_memory_operations_and_its_one_sum():
    plan = planned("h100:2x8")
    assert (plan.num_devices, plan.num_replicas, plan.examples) == (16, 16, 128)
    assert plan.memory.state["trainable_variables"] == WEIGHTS * FLOAT
    assert plan.memory.batch == 8 * 2 * WIDTH * FLOAT
    products = 2 * 2 * 8 * WIDTH * WIDTH  # forward, and the gradient of the weights
    assert products <= plan.flops <= 2 * products
    (only,) = plan.collectives
    assert (only.kind, only.group_size) == ("all-reduce", 16)
    assert WEIGHTS * FLOAT <= only.bytes <= WEIGHTS * FLOAT + 16
    assert not plan.is_16_bit


def of_convolution(name: str) -> StepPlan:
    with target(name, None, MEASURED):
        strategy = unison.MirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Conv2D(32, 3)])
            model.compile("sgd", "mse")
        batch = 8 * strategy.num_replicas_in_sync
        return plan_fit(model, shape(batch, 28, 28, 1), shape(batch, 26, 26, 32))


def test_gpus_run_the_program_as_it_is_and_cpus_in_the_forms_that_are_fast_there():
    on_gpus, on_cpus = of_convolution("h100:2"), of_convolution("cpu:2")
    # The output, and the filter's gradient, which CPUs compute by patches.
    assert (on_gpus.hlo.count(" convolution("), on_cpus.hlo.count(" convolution(")) == (2, 1)


def test_devices_are_called_what_they_are():
    with target("h100:2x8"):
        names = unison.MirroredStrategy().extended.worker_devices
    assert names[1].endswith("device:GPU:1")


def test_a_plan_takes_the_rates_of_its_own_network():
    with target("h100:2x8", "ethernet-1g-tcp"):
        slow = unison.MirroredStrategy()
    with target("h100:2x8"):
        fast = unison.MirroredStrategy()
    networks = [
        plan_run(strategy, lambda x: x + 1, (shape(4, 4),)).cluster.network.name
        for strategy in (slow, fast)
    ]
    assert networks == ["ethernet-1g-tcp", "infiniband-8x400g"]


def test_more_gpus_than_a_machine_has_are_several_machines():
    cluster = cluster_named("h100:64")
    assert (cluster.machines, cluster.per_machine) == (8, 8)
    assert planned("h100:16").scaling()[-1].sent.network > 0
    with pytest.raises(UnknownHardwareError, match="'h100:12'") as raised:
        cluster_named("h100:12")
    assert '"h100:2x8"' in str(raised.value)
    assert cluster_named("h100:6").machines == 1


def test_whole_machines_are_among_the_sizes_that_are_looked_at():
    assert cluster_named("a100:4x6").sizes() == [1, 2, 4, 6, 12, 24]
    assert cluster_named("a100:3x8").sizes() == [1, 2, 4, 8, 16, 24]


def test_processes_that_share_cores_share_the_memory():
    cluster = cluster_named("cpu:8", calibration=MEASURED)
    assert cluster.device.memory * 8 == CORE.memory * MEASURED.cores
    assert cluster.of(2).device.memory == CORE.memory
    assert cluster.of(4).device.memory == CORE.memory / 2


def test_devices_share_the_work_whatever_their_number():
    one, many = planned("a100:1"), planned("a100:64x8")
    assert one.collectives == []
    assert many.flops == pytest.approx(one.flops, rel=0.1)  # XLA counts sums as well
    assert many.memory.batch == one.memory.batch


def test_16_bit_products_are_seen_and_faster():
    with target("a100:2"):
        strategy = unison.MirroredStrategy()
        step = lambda x: (x.astype("bfloat16") @ x.T.astype("bfloat16")).sum()  # noqa: E731
        half = plan_run(strategy, step, (shape(512, 256),))
        full = plan_run(strategy, lambda x: (x @ x.T).sum(), (shape(512, 256),))
    assert (half.is_16_bit, full.is_16_bit) == (True, False)
    assert half.peak_seconds()["arithmetic"] < full.peak_seconds()["arithmetic"]


def test_more_devices_wait_longer_and_a_slow_network_longest():
    plan = planned("h100:4x8")
    times = plan.scaling()
    assert [one.devices for one in times] == [1, 2, 4, 8, 16, 32]
    assert times[0].efficiency == 1
    waiting = [one.waiting for one in times]
    assert waiting == sorted(waiting)
    assert times[3].sent.network == 0 < times[4].sent.network
    slow = planned("h100:4x8", network="ethernet-1g-tcp").scaling()
    assert slow[3] == times[3]
    assert slow[-1].waiting > 10 * times[-1].waiting


def test_a_batch_that_is_told_to_fit_does_and_twice_as_many_do_not():
    of_few = of_many = planned("cpu:2").largest_batch()
    for _ in range(3):  # the larger the planned batch, the closer
        of_many = planned("cpu:2", of_many // 2).largest_batch()
    assert of_few < of_many
    assert 0.8 * CORE.memory < planned("cpu:2", of_many // 2).memory.total <= CORE.memory
    with pytest.raises(DoesNotFitError, match=r"into the 30\.5 MiB") as raised:
        planned("cpu:2", of_many)
    assert raised.value.needed > raised.value.available
    assert "a global batch of about" in str(raised.value)
    (parts,) = re.findall(r"gradient_accumulation_steps=(\d+)", str(raised.value))
    assert int(parts) in (2, 3)


def adam_of_one_layer(strategy, width, batch=8):
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
        model.compile(optimizer="adam", loss="mse")
    return plan_fit(model, shape(batch, width), shape(batch, width))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_batch_that_is_told_to_fit_does_where_replicas_divide_the_weights(zero):
    with target("cpu:4", None, FOUR_CORES):
        strategy = unison.ModelParallelStrategy(mesh={"batch": 4}, zero=zero)
        largest = adam_of_one_layer(strategy, 1024).largest_batch()
        assert largest > 8
        assert adam_of_one_layer(strategy, 1024, largest).memory.total <= CORE.memory


def test_what_does_not_fit_with_one_example_each_is_told_of_no_smaller_batch():
    with target("cpu:4", None, FOUR_CORES), pytest.raises(DoesNotFitError) as raised:
        adam_of_one_layer(unison.MirroredStrategy(), 1500, batch=4)
    assert "ModelParallelStrategy" in str(raised.value)
    for impossible in ("a global batch of about", "gradient_accumulation_steps", "times as many"):
        assert impossible not in str(raised.value)


@pytest.mark.parametrize(("width", "zero"), [(1500, 1), (1900, 3)])
def test_what_does_not_fit_names_the_least_that_replicas_have_to_divide(width, zero):
    with target("cpu:4", None, FOUR_CORES):
        with pytest.raises(DoesNotFitError) as raised:
            adam_of_one_layer(unison.MirroredStrategy(), width)
        divided = {1: 2, 3: 3}[zero] * width * (width + 1) * FLOAT * 3 / 4 / 2**20
        mend = f"{divided:.1f} MiB less by ModelParallelStrategy(mesh={{'batch': 4}}, zero={zero})"
        assert mend in str(raised.value)
        plan = adam_of_one_layer(unison.ModelParallelStrategy(mesh={"batch": 4}, zero=zero), width)
    assert plan.memory.total < raised.value.available < raised.value.needed


def test_weights_that_are_divided_already_are_no_mend():
    with target("cpu:4", None, FOUR_CORES), pytest.raises(DoesNotFitError) as raised:
        adam_of_one_layer(unison.ModelParallelStrategy(mesh={"batch": 4}, zero=3), 4096)
    assert "zero=" not in str(raised.value)


def test_a_tpu_slice_is_a_machine_whose_links_go_everywhere():
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
    plan = planned("v5e:2x2")
    times = plan.scaling()
    assert [one.devices for one in times] == [1, 2, 4]
    assert times[-1].sent.network == 0 < times[-1].sent.inside
    assert plan.as_dict()["device"]["name"] == "v5e"


def test_a_tpu_of_unstated_rates_has_memory_and_collectives_but_no_times():
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
    plan = planned("v2:2x2")
    assert plan.memory.total > 0 < len(plan.collectives)
    assert plan.peak_seconds() == {}
    assert plan.largest_batch() is None
    assert "scaling" not in plan.as_dict()
    assert "v2:2x2" in plans_page([plan.as_dict()])
    for asked in (plan.scaling, plan.choices):
        with pytest.raises(ValueError, match=r"Received: 'v2:2x2'"):
            asked()


def test_the_batch_of_a_custom_loop_is_known():
    def train() -> None:
        strategy = unison.MirroredStrategy()
        batches = Dataset.from_tensor_slices(np.zeros((100, 16), "float32")).batch(24)
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(lambda x: x * 2, (batch,))

    with target("h100:4"):
        plan = plan_first_step(train)
    assert plan.examples == 24
    assert plan.largest_batch() > 24


def test_gradients_and_activations_are_told_apart():
    memory = planned("h100:2", 4096).memory
    assert memory.gradients == WEIGHTS * FLOAT
    assert memory.activations == memory.temporaries - memory.gradients > 0
    assert StepMemory({}, 0, 10, 4, 0, 0).activations == 0


def test_a_step_that_sums_in_buckets_is_seen_as_one():
    with target("h100:8"):
        strategy = unison.MirroredStrategy()

    def step(x: jax.Array) -> jax.Array:
        context = unison.get_replica_context()
        for _ in range(3):  # each waits for the one before, so that XLA cannot combine them
            x = context.all_reduce("SUM", x) * 0.5
        return context.all_reduce("SUM", x[0, 0])

    plan = plan_run(strategy, step, (shape(64, 256),))
    assert plan.exchange.bucket_bytes == 64 * 256 * FLOAT
    assert plan.workload.gradient_bytes == (3 * 64 * 256 + 1) * FLOAT


# -- several devices a replica --------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "size", "span"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4, 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 5),
        ("replica_groups=[2,4]<=[8]", 4, 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 5),
        ("replica_groups={}", 8, 8),
        ("replica_groups=mesh['data'=2,'model'=4] {'model'}", 4, 4),
        ("replica_groups=mesh['data'=2,'model'=4] {'data'}", 2, 5),
        ("replica_groups=mesh['data'=2,'model'=4] {'data','model'}", 8, 8),
        ("replica_groups=mesh['data'=2,'model'=4] {'model':(2)2}", 2, 2),
        ("replica_groups=mesh['data'=2,'model'=4] {'model':(1)2}", 2, 3),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 2, 5),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,3,1,2,4,7,5,6) {'b'}", 2, 4),
    ],
)
def test_who_takes_part_in_a_collective_is_read_from_its_groups(groups, size, span):
    hlo = f"""HloModule step, num_partitions=8

ENTRY %main (x: f32[8]) -> f32[8] {{
  ROOT %sum = f32[8]{{0}} all-reduce(%x), {groups}, to_apply=%add
}}
"""
    assert collectives_of(hlo) == [("all-reduce", 8 * FLOAT, 1, size, 1, span)]


def test_a_permutation_reaches_as_far_as_its_farthest_pair():
    hlo = """HloModule step, num_partitions=8

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %moved = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}
"""
    (only,) = collectives_of(hlo)
    assert only.span == 4
    machine = cluster_named("h100:4")
    link = machine.inside
    expected = 8.4e-6 + link.latency + 8 * FLOAT / link.rate
    assert collective_seconds(only, machine) == pytest.approx(expected)


def test_replicas_sum_gradients_and_their_devices_wait_for_activations():
    hidden = 1024
    rules = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
    with target("h100:2x4"):
        strategy = unison.ModelParallelStrategy(mesh={"batch": 2, "model": 4}, rules=rules)
        with strategy.scope():
            up = keras.layers.Dense(hidden, name="up")
            down = keras.layers.Dense(WIDTH, name="down")
            model = keras.Sequential([keras.Input((WIDTH,)), up, down])
            model.compile("sgd", "mse")
        plan = plan_fit(model, shape(64, WIDTH), shape(64, WIDTH))
    within = [one for one in plan.collectives if one.span <= 4]
    assert {one.group_size for one in within} == {4}
    assert max(one.bytes for one in within) == 32 * WIDTH * FLOAT
    gradients = (2 * WIDTH * hidden // 4 + hidden // 4 + WIDTH) * FLOAT
    assert plan.workload.gradient_bytes == pytest.approx(gradients, abs=64)
    computing = dataclasses.replace(plan, collectives=[]).workload.seconds
    waited = sum(collective_seconds(one, plan.cluster) for one in within)
    assert plan.workload.seconds == pytest.approx(computing + waited)
    alone, both = plan.scaling()
    assert (alone.devices, both.devices) == (4, 8)
    assert alone.waiting == 0 < both.waiting
    assert both.sent.network == pytest.approx(4 * plan.workload.gradient_bytes)


def test_the_devices_of_replicas_share_their_machines_network():
    cluster = cluster_named("h100:4x8")
    of_two, of_sixteen = cluster.of_replicas(2), cluster.of_replicas(16)
    assert (of_two.machines, of_two.per_machine) == (4, 4)
    assert of_two.network.rate == cluster.network.rate / 2
    assert (of_sixteen.machines, of_sixteen.per_machine) == (2, 1)
    assert of_sixteen.network.rate == cluster.network.rate / 8
    assert cluster.of_replicas(1) == cluster


# -- ways to run it -------------------------------------------------------------------------


def test_fewer_bytes_are_preferred_only_where_they_are_exact():
    plan = planned("h100:2x8", network="ethernet-1g-tcp")
    ways = {way.name: way for way in plan.choices()}
    assert ways["int8 on the wire"].seconds < ways["as it is"].seconds / 3
    assert preferred(plan.choices()).is_exact


def test_a_sharded_update_keeps_a_part_of_the_optimizers_state():
    plan = planned("h100:8")
    ways = {way.name: way for way in plan.choices()}
    saved = ways["as it is"].memory - ways["sharded update"].memory
    slots = plan.memory.state["optimizer_variables"]
    assert saved == pytest.approx(slots * 7 / 8, rel=0.01)


@pytest.mark.parametrize(("zero", "offered"), [(1, {3}), (2, {3}), (3, set())])
def test_what_replicas_divide_already_is_not_offered_again(zero, offered):
    with target("h100:4"):
        strategy = unison.ModelParallelStrategy(mesh={"batch": 2, "model": 2}, zero=zero)
        plan = adam_of_one_layer(strategy, WIDTH)
    assert plan.division == ({"batch": 2, "model": 2}, zero, False)
    ways = {way.name: way.how for way in plan.choices()}
    assert not any("with_compression" in how for how in ways.values())
    found = {"sharded update": 1, "divided weights": 3}
    assert {stage for name, stage in found.items() if name in ways} == offered
    if offered:
        how = "ModelParallelStrategy(mesh={'batch': 2, 'model': 2}, zero=3)"
        assert ways["divided weights"] == how


def test_an_update_that_is_sharded_by_a_strategy_of_its_own_is_not_offered_again():
    with target("h100:4"):
        plan = adam_of_one_layer(unison.TPUStrategy(sharded_update=True), WIDTH)
    names = [way.name for way in plan.choices()]
    assert "sharded update" not in names
    assert "divided weights" in names


def test_how_to_run_it_says_all_that_is_to_be_set():
    workload, memory = Workload(0.01, 1e8), StepMemory({}, 0, 0, 0, 0, 0)
    step = Step(workload, memory, Exchange(), Division({"batch": 32}))
    ways = {way.name: way.how for way in choices(step, cluster_named("h100:4x8"))}
    (buckets,) = [name for name in ways if name.startswith("buckets") and name.endswith("tree")]
    options = "communication_options=CommunicationOptions(bytes_per_pack="
    for name in (buckets, "int8 on the wire"):
        assert options in ways[name]
        assert ways[name].endswith("NCCL_ALGO=Tree")
    assert ways["int8 on the wire"].startswith("with_compression(optimizer, int8())")


@pytest.mark.parametrize(
    "division", [Division({"batch": 16, "model": 2}), Division({"batch": 32}, stage=1)]
)
def test_buckets_are_offered_only_to_replicas_that_keep_everything(division):
    step = Step(Workload(0.01, 1e8), StepMemory({}, 0, 0, 0, 0, 0), Exchange(), division)
    ways = choices(step, cluster_named("h100:4x8"))
    assert not any("bytes_per_pack" in way.how for way in ways)


def test_divided_weights_take_less_memory_and_more_time():
    plan = planned("h100:8")
    ways = {way.name: way for way in plan.choices()}
    sharded, divided = ways["sharded update"], ways["divided weights"]
    weights = plan.memory.state["trainable_variables"]
    assert sharded.memory - divided.memory == pytest.approx(weights * 7 / 8, rel=0.01)
    assert divided.seconds > sharded.seconds
    assert divided.how == "ModelParallelStrategy(mesh={'batch': 8}, zero=3)"


def test_what_fits_is_preferred_to_what_is_fast():
    plan = planned("h100:2")
    as_it_is, *others = plan.choices()
    too_large = [as_it_is._replace(fits=False, seconds=1e-9), *others]
    assert preferred(too_large).fits


def test_one_device_has_nothing_to_send():
    assert [way.name for way in planned("h100:1").choices()] == ["as it is"]


def test_a_batch_in_parts_takes_less_memory_and_sums_more_often():
    plan = planned("h100:8", 2**13)
    ways = {way.name: way for way in plan.choices()}
    as_it_is, in_parts = ways["as it is"], ways["batch in 2 parts"]
    saved = as_it_is.memory - in_parts.memory
    of_batch = plan.memory.batch + plan.memory.temporaries - plan.memory.gradients
    assert saved > 0
    assert saved == pytest.approx(of_batch / 2 - plan.memory.gradients, rel=0.01)
    waiting = as_it_is.seconds * (1 - as_it_is.efficiency)
    assert in_parts.seconds - as_it_is.seconds == pytest.approx(waiting, rel=0.01)


def test_a_small_batch_in_parts_starts_all_kernels_for_each():
    plan = planned("h100:8", 1024)
    ways = {way.name: way for way in plan.choices()}
    assert plan.workload.seconds == plan.workload.least
    parts = ways["batch in 2 parts"].seconds / ways["as it is"].seconds
    assert parts == pytest.approx(2, rel=0.01)


# -- the model ------------------------------------------------------------------------------


def test_a_small_step_takes_as_long_as_its_kernels_take_to_start():
    plan = planned("h100:1", 1)
    assert 5 < plan.kernels < 100
    assert plan.workload.seconds == pytest.approx(plan.kernels * 1e-6)


LOOP = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inside (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %exp = f32[8]{0} exponential(%p)
  ROOT %negated = f32[8]{0} negate(%exp)
}

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%carry), index=0
  %array = f32[8]{0:T(256)} get-tuple-element(%carry), index=1
  %new = f32[8]{0:T(256)} fusion(%array), kind=kLoop, calls=%inside
  ROOT %both = (s32[], f32[8]{0:T(256)}) tuple(%count, %new)
}

%condition (carry: (s32[], f32[8])) -> pred[] {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%carry), index=0
  %limit = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0:T(256)}) tuple(%zero, %x)
  %loop = (s32[], f32[8]{0:T(256)}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %result = f32[8]{0} get-tuple-element(%loop), index=1
  %begun = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%result), calls=%inside
  %ended = f32[8]{0} async-done(%begun)
  ROOT %total = f32[] reduce(%ended, %zero), dimensions={0}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "known", ['"known_trip_count":{"n":"5"}', ""], ids=["told", "by the limit"]
)
def test_kernels_are_counted_as_often_as_loops_run_them(known):
    hlo = LOOP.replace('"known_trip_count":{"n":"5"}', known)
    # Five times the fusion and the comparison; what was begun; and the sum.
    assert kernels_of(hlo) == 5 * 2 + 1 + 1


def test_buckets_hide_what_fits_behind_the_backward_pass():
    cluster = cluster_named("a100:8")
    workload = Workload(1.0, 1e9)
    at_the_end = step_time(workload, cluster)
    in_buckets = step_time(workload, cluster, Exchange(bucket_bytes=1e8))
    assert in_buckets.waiting == pytest.approx(at_the_end.waiting / 10, rel=0.1)


def test_on_shared_cores_processes_take_turns_and_hide_nothing():
    workload = Workload(1.0, 1e9)
    times = {
        n: step_time(workload, cluster_named(f"cpu:{n}", calibration=MEASURED), Exchange(1e8))
        for n in (1, 2, 4)
    }
    assert [times[n].computing for n in (1, 2, 4)] == [1, 1, 2]
    assert times[4].efficiency == pytest.approx(1 / times[4].seconds)
    assert times[2].waiting == pytest.approx(1.0, rel=0.01)
    assert times[4].waiting == pytest.approx(2 * 1.5 * 2, rel=0.01)  # over the shared link
    part = cluster_named("cpu:4", calibration=MEASURED).of(2)
    assert step_time(workload, part).waiting == pytest.approx(times[2].waiting)


def test_measured_times_add_up_and_stated_ones_overlap():
    assert CORE.compute_seconds(1e11, 1e10) == 2
    assert CORE._replace(is_measured=False).compute_seconds(1e11, 1e10) == 1


def test_what_stays_in_a_cache_is_read_at_its_rate():
    core = CORE._replace(cache_rates=((1e3, 4e10), (1e5, 2e10), (1e7, 1e10)))
    seconds = [core.compute_seconds(0, 1.2e11, bytes_in_use=size) for size in (1, 1e3, 1e4, 1e9)]
    assert seconds == pytest.approx([3, 3, 4, 12])
    assert core.compute_seconds(0, 4e10) == 4
    plan = planned("cpu:4")
    cached = core._replace(cache_rates=((plan.memory.total, 1e11), (plan.memory.total * 2, 1e10)))
    own, turn_taking = (
        plan.workload_on(cluster_named(name, calibration=MEASURED._replace(device=cached)))
        for name in ("cpu:2", "cpu:4")
    )
    assert own.seconds < turn_taking.seconds == pytest.approx(plan.workload.seconds)


# -- programs for other devices -------------------------------------------------------------


def test_workers_are_not_waited_for_where_a_step_is_planned():
    addresses = ClusterSpec({"worker": ["10.0.0.1:1", "10.0.0.2:1"]})
    resolver = SimpleClusterResolver(addresses, task_type="worker", task_id=0)
    with target("h100:2x8"):
        strategies = [
            unison.MultiWorkerMirroredStrategy(resolver),
            unison.ModelParallelStrategy(mesh={"model": 2}, cluster_resolver=resolver),
        ]
    assert [strategy.num_replicas_in_sync for strategy in strategies] == [16, 8]


def test_a_target_takes_the_place_of_a_topology():
    with target("h100:4"):
        strategies = [
            unison.TPUStrategy(topology="v5e:2x4"),
            unison.ModelParallelStrategy(mesh={"model": 2}, topology="v5e:2x4"),
        ]
        plans = [plan_run(one, lambda x: x + 1, (shape(4, 4),)) for one in strategies]
    assert [plan.target for plan in plans] == ["h100:4", "h100:4"]
    assert [plan.num_replicas for plan in plans] == [4, 2]


def test_the_program_of_a_tpu_is_planned_for_gpus():
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    with target("h100:8"):
        tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        pairs = tf.tpu.experimental.DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=4)
        strategy = tf.distribute.TPUStrategy(resolver)
        of_pairs = tf.distribute.TPUStrategy(resolver, pairs)
    assert topology.mesh_shape.tolist() == [8, 1, 1, 1]
    assert (strategy.num_replicas_in_sync, of_pairs.num_replicas_in_sync) == (8, 4)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["b100:8", "h100", "h100:0", "h100:8x", "v5e:7x7"])
def test_a_target_that_is_none_lists_those_there_are(name):
    with pytest.raises(ValueError, match="Expected") as raised, target(name):
        pass
    assert repr(name) in str(raised.value)
    assert "0" in name[-1] or "v5e" in str(raised.value)


def test_an_unknown_network_names_those_there_are():
    with pytest.raises(UnknownHardwareError, match="'ethernet-25g-tcp'") as raised:
        cluster_named("h100:2x8", "ethernet-25g")
    assert "infiniband-8x400g" in str(raised.value)


def test_machines_that_were_measured_alone_need_a_network():
    with pytest.raises(UnknownHardwareError, match=r"--network LINK, one of .*ethernet-10g"):
        cluster_named("cpu:2x4", calibration=MEASURED)
    cluster = cluster_named("cpu:2x4", "ethernet-10g-tcp", MEASURED)
    assert cluster.slowest_rate == MEASURED.shared_link.rate
    assert cluster.network.name == "ethernet-10g-tcp"


def test_cpus_that_were_not_measured_say_how_to_measure():
    with pytest.raises(UnknownHardwareError, match="--calibrate FILE"):
        cluster_named("cpu:4")


def test_a_step_that_looks_at_values_names_its_line():
    def step(x: jax.Array) -> jax.Array:
        return x[: len([row for row in x if jnp.sum(row) > 0])]

    def loss(true: jax.Array, predicted: jax.Array) -> jax.Array:
        return predicted - true if float(jnp.sum(predicted)) > 0 else predicted

    with target("h100:2"):
        strategy = unison.MirroredStrategy()
        with pytest.raises(ControlFlowError, match=r"test_plans\.py:\d+") as raised:
            plan_run(strategy, step, (shape(4, 4),))
        assert "jax.lax.cond" in str(raised.value)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(loss=loss)
        with pytest.raises(ControlFlowError, match=r"test_plans\.py:\d+"):
            plan_fit(model, shape(4, 4), shape(4, 1))


def test_a_calibration_is_kept_in_a_file_and_another_file_is_refused(tmp_path):
    path = tmp_path / "here.json"
    MEASURED.write(str(path))
    assert read_calibration(str(path)) == MEASURED
    path.write_text('{"device": {}}')
    with pytest.raises(ValueError, match="--calibrate FILE"):
        read_calibration(str(path))
    with pytest.raises(ValueError, match="FileNotFoundError"):
        read_calibration(str(tmp_path / "none.json"))


# -- what is written ------------------------------------------------------------------------


def test_the_page_has_its_plots_inside_and_asks_for_nothing():
    page = plans_page([planned("h100:2x8").as_dict(), planned("p100:2x4").as_dict()])
    assert page.count("<svg") == 3
    assert "h100:2x8" in page
    assert "p100:2x4" in page
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")


SCRIPT = """
import numpy as np
import unison.tf as tf

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8)])
    model.compile(optimizer="sgd", loss="mse")
batch = 4 * strategy.num_replicas_in_sync
x = np.zeros((4 * batch, 16), "float32")
model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :8])).batch(batch), verbose=0)
"""


def run_plan(tmp_path: Path, *options: str):
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ["plan", "--no-color", *options, "-m", "train"]
    return run_program(UNISON, *arguments, folder=tmp_path, timeout=240, imported=("jax", "unison"))


def test_the_command_plans_a_module_and_writes_a_table_json_and_a_page(tmp_path):
    json_file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    outputs = ["--json", str(json_file), "--html", str(page)]
    finished = run_plan(
        tmp_path, "--target", "p100:2x4", "--network", "ethernet-25g-rdma", *outputs
    )
    assert finished.returncode == 0, finished.stderr
    told = json.loads(json_file.read_text())
    assert told["num_replicas"] == 8
    assert [one["devices"] for one in told["scaling"]] == [1, 2, 4, 8]
    assert told["links"][1]["name"] == "ethernet-25g-rdma"
    assert told["preferred"] in {way["name"] for way in told["choices"]}
    assert "<svg" in page.read_text()
    for words in ("p100:2x4", "all-reduce", "activations", "as it is", "A global batch of"):
        assert words in finished.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Expected --target"),
        (["--target", "b100:8"], "Received: 'b100:8'"),
        (["--target", "cpu:2"], "--calibrate FILE"),
        (["--target", "h100:8", "--network", "rope"], "Received: 'rope'"),
        (["--target", "h100:8", "--json", "/nowhere/plan.json"], "Received: '/nowhere/plan.json'"),
        (["--target", "h100:8", "--html", "/"], "Expected a file that can be written"),
        (["--calibrate", "/nowhere/here.json"], "Expected a file that can be written"),
    ],
)
def test_the_command_says_what_it_expected(tmp_path, options, message, capsys):
    from unison.cli import main

    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["plan", *options, str(script)]) == 2
    assert message in capsys.readouterr().err


def test_sums_that_seem_to_take_no_time_are_as_fast_as_caches_at_most(monkeypatch):
    """Where others use the cores, a step with a sum may take no longer than one without."""
    noise = dict.fromkeys((2**14, 2**19, 2**24), 1e-6)
    rates = {2**22: 2e10, 2**26: 4e9}
    measured = {"_measure": (1e11, rates, noise), "_measure_sums": noise}

    def launch(function, workers, timeout):
        return [measured[function.__name__]] * workers

    monkeypatch.setattr(calibration, "launch", launch)
    found = calibration.calibrate()
    for link in (found.link, found.shared_link):
        assert link.rate <= 1.01 * 2e10  # it is fitted to three sums
        assert link.latency > 0


@pytest.mark.parametrize(
    ("type_", "kind", "expected"),
    [
        ("((f32[64]{0}), f32[8]{0})", "reduce-scatter", 64),
        ("((f32[64]{0}, f32[16]{0}), (f32[8]{0}, f32[2]{0}))", "reduce-scatter", 80),
        ("(f32[8]{0}, f32[64]{0})", "all-gather", 64),
        ("((f32[64]{0}), f32[64]{0})", "all-to-all", 64),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[])", "collective-permute", 8),
        ("((f32[8]{0}, f32[2]{0}), (f32[8]{0}, f32[2]{0}))", "collective-permute", 10),
        ("(f32[8]{0}, f32[2]{0})", "all-reduce", 10),
        ("((f32[64]{0}), f32[64]{0})", "all-reduce", 64),
        ("((f32[8]{0}, f32[2]{0}), (f32[8]{0}, f32[2]{0}))", "all-reduce", 10),
    ],
)
def test_the_bytes_of_a_collective_with_a_start_are_those_of_its_results(type_, kind, expected):
    hlo = (
        "HloModule step, is_scheduled=true, num_partitions=8\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        f"  %start = {type_} {kind}-start(%p), replica_groups={{}}\n"
        "}\n"
    )
    (only,) = collectives_of(hlo)
    assert (only.kind, only.bytes) == (kind, expected * FLOAT)


#: An all-gather that a TPU runs beside other kernels: fusions start it, continue it while they
#: compute a product, and wait for its end.
FUSED_ALL_GATHER = """HloModule step, is_scheduled=true, num_partitions=8
%fused_computation.1 (p0: bf16[256,2048]) -> (bf16[256,2048], bf16[2048,2048]) {
  %all-gather.1 = bf16[2048,2048]{1,0} all-gather(%p0), replica_groups={{0,1,2,3,4,5,6,7}}
}
%async_collective_fusion.2 (p0: bf16[256,2048], p1: bf16[2048,2048]) -> f32[256,2048] {
  %all-gather.2 = bf16[2048,2048]{1,0} all-gather(%p0), replica_groups={{0,1,2,3,4,5,6,7}}
  %dot.1 = f32[256,2048]{1,0} dot(%p2, %p3)
}
%fused_computation.3 (p0: bf16[256,2048], p1: bf16[2048,2048]) -> bf16[2048,2048] {
  %all-gather.3 = bf16[2048,2048]{1,0} all-gather(%p0), replica_groups={{0,1,2,3,4,5,6,7}}
}
ENTRY %main (x: bf16[256,2048], w: bf16[2048,2048]) -> f32[256,2048] {
  %x = bf16[256,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(1)
  %async-collective-start.1 = (bf16[256,2048], bf16[2048,2048]) fusion(%x), \
calls=%fused_computation.1
  %part = bf16[256,2048] get-tuple-element(%async-collective-start.1), index=0
  %whole = bf16[2048,2048] get-tuple-element(%async-collective-start.1), index=1
  %before = f32[256,2048] fusion(%x, %w), kind=kOutput, calls=%fused_computation.4
  %product = (f32[256,2048], bf16[256,2048], bf16[2048,2048]) fusion(%before, %w, %part, %whole), \
calls=%async_collective_fusion.2
  %result = f32[256,2048] get-tuple-element(%product), index=0
  %waiting = bf16[2048,2048] get-tuple-element(%product), index=2
  %async-collective-done.1 = bf16[2048,2048] fusion(%waiting), calls=%fused_computation.3
  ROOT %after = f32[256,2048] fusion(%async-collective-done.1, %result), calls=%fused_computation.5
}
"""


def test_a_collective_in_several_fusions_of_a_tpu_is_one():
    gathered = 2048 * 2048 * 2
    (only,) = collectives_of(FUSED_ALL_GATHER)
    assert (only.kind, only.bytes, only.runs) == ("all-gather", gathered, 1)
    (overlap,) = overlaps_of(FUSED_ALL_GATHER)
    assert overlap.collective.bytes == gathered
    assert overlap.kernels == 2  # before the product, and the product; not the one after
    read, written = 256 * 2048 * 2, 256 * 2048 * FLOAT
    # The operands and results of both, without those of the all-gather.
    assert overlap.work == (read + gathered + written) + (2 * written + gathered)
    assert overlap.is_hidden


@pytest.mark.parametrize(("is_sync", "kernels"), [("false", 1), ("true", 0)])
def test_a_start_that_is_synchronous_hides_behind_nothing(is_sync, kernels):
    """XLA writes a start and an end on GPUs also where the device waits for a collective."""
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{is_sync}}}}}'
    hlo = (
        "HloModule step, is_scheduled=true, num_partitions=8\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        f"  %start = f32[8]{{0}} all-reduce-start(%p), replica_groups={{}}, {config}\n"
        "  %product = f32[8]{0} fusion(%p), kind=kLoop, calls=%computation\n"
        "  ROOT %done = f32[8]{0} all-reduce-done(%start)\n"
        "}\n"
    )
    (overlap,) = overlaps_of(hlo)
    assert (overlap.kernels, overlap.is_hidden) == (kernels, kernels == 1)
