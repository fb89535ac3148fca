"""Steps planned for clusters that are not here: what is told, and what is refused."""

from __future__ import annotations

import importlib.resources
import json
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import pytest

import unison
from subprocess_program import run_program
from unison.planning import (
    Calibration,
    Device,
    DoesNotFitError,
    Exchange,
    Link,
    StepPlan,
    UnknownHardwareError,
    Workload,
    cluster_named,
    plan_fit,
    plan_run,
    preferred,
    read_calibration,
    step_time,
    target,
)
from unison.planning.page import plans_page
from unison.program.control_flow import ControlFlowError

pytestmark = pytest.mark.timeout(300)

FLOAT = 4
WIDTH = 512
WEIGHTS = WIDTH * WIDTH + WIDTH
CORE = Device("cpu", 32e6, 1e10, 1e11, 1e11, 1.0, is_measured=True)
MEASURED = Calibration(CORE, Link("measured", 1e9, 1e-5), cores=2)


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


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
    assert all(device["reached_source"] for device in tables["devices"].values())


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
    of_few = planned("cpu:2").largest_batch()
    of_many = planned("cpu:2", of_few // 2).largest_batch()
    assert of_few < of_many  # the larger the planned batch, the closer
    assert 0.8 * CORE.memory < planned("cpu:2", of_many // 2).memory.total <= CORE.memory
    with pytest.raises(DoesNotFitError, match=r"into the 30\.5 MiB") as raised:
        planned("cpu:2", of_many)
    assert raised.value.needed > raised.value.available
    assert "a global batch of about" in str(raised.value)
    assert "gradient_accumulation_steps=2" in str(raised.value)


def adam_of_one_layer(strategy, width):
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
        model.compile(optimizer="adam", loss="mse")
    return plan_fit(model, shape(8, width), shape(8, width))


@pytest.mark.parametrize(("width", "zero"), [(1500, 1), (1900, 3)])
def test_what_does_not_fit_names_the_least_that_replicas_have_to_divide(width, zero):
    with target("cpu:4", None, MEASURED):
        with pytest.raises(DoesNotFitError) as raised:
            adam_of_one_layer(unison.MirroredStrategy(), width)
        divided = {1: 2, 3: 3}[zero] * width * (width + 1) * FLOAT * 3 / 4 / 2**20
        mend = f"{divided:.1f} MiB less by ModelParallelStrategy(mesh={{'batch': 4}}, zero={zero})"
        assert mend in str(raised.value)
        plan = adam_of_one_layer(unison.ModelParallelStrategy(mesh={"batch": 4}, zero=zero), width)
    assert plan.memory.total < raised.value.available < raised.value.needed


def test_weights_that_are_divided_already_are_no_mend():
    with target("cpu:4", None, MEASURED), pytest.raises(DoesNotFitError) as raised:
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
    plan = planned("v3:2x2")
    assert plan.memory.total > 0 < len(plan.collectives)
    assert plan.peak_seconds() == {}
    assert plan.largest_batch() is None
    assert "scaling" not in plan.as_dict()
    assert "v3:2x2" in plans_page([plan.as_dict()])
    for asked in (plan.scaling, plan.choices):
        with pytest.raises(ValueError, match=r"Received: 'v3:2x2'"):
            asked()


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
    plan = planned("h100:8", 4096)
    ways = {way.name: way for way in plan.choices()}
    as_it_is, in_parts = ways["as it is"], ways["batch in 2 parts"]
    saved = as_it_is.memory - in_parts.memory
    of_batch = plan.memory.batch + plan.memory.temporaries - plan.memory.gradients
    assert saved > 0
    assert saved == pytest.approx(of_batch / 2 - plan.memory.gradients, rel=0.01)
    waiting = as_it_is.seconds * (1 - as_it_is.efficiency)
    assert in_parts.seconds - as_it_is.seconds == pytest.approx(waiting, rel=0.01)


# -- the model ------------------------------------------------------------------------------


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
    assert times[2].waiting == pytest.approx(1.0, rel=0.01)
    assert times[4].waiting == pytest.approx(2 * 1.5, rel=0.01)


def test_measured_times_add_up_and_stated_ones_overlap():
    assert CORE.compute_seconds(1e11, 1e10) == 2
    assert CORE._replace(is_measured=False).compute_seconds(1e11, 1e10) == 1


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["b200:8", "h100", "h100:0", "h100:8x", "v5e:7x7"])
def test_a_target_that_is_none_lists_those_there_are(name):
    with pytest.raises(ValueError, match="Expected") as raised, target(name):
        pass
    assert repr(name) in str(raised.value)
    assert "0" in name[-1] or "v5e" in str(raised.value)


def test_an_unknown_network_names_those_there_are():
    with pytest.raises(UnknownHardwareError, match="'ethernet-25g-tcp'") as raised:
        cluster_named("h100:2x8", "ethernet-25g")
    assert "infiniband-8x400g" in str(raised.value)


def test_cpus_that_were_not_measured_say_how_to_measure():
    with pytest.raises(UnknownHardwareError, match="--calibrate FILE"):
        cluster_named("cpu:4")


def test_a_step_that_looks_at_values_names_its_line():
    def step(x: jax.Array) -> jax.Array:
        return x if float(jnp.sum(x)) > 0 else -x

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
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["plan", "--no-color", *options, str(script)]
    return run_program(
        f"import sys; from unison.cli import main; sys.exit(main({arguments!r}))", timeout=240
    )


def test_the_command_writes_a_table_json_and_a_page(tmp_path):
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
    for words in ("p100:2x4", "all-reduce", "waiting", "as it is", "A global batch of"):
        assert words in finished.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Expected --target"),
        (["--target", "b200:8"], "Received: 'b200:8'"),
        (["--target", "cpu:2"], "--calibrate FILE"),
        (["--target", "h100:8", "--network", "rope"], "Received: 'rope'"),
    ],
)
def test_the_command_says_what_it_expected(tmp_path, options, message, capsys):
    from unison.cli import main

    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["plan", *options, str(script)]) == 2
    assert message in capsys.readouterr().err
