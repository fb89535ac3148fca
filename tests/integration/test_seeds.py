"""The samples of the seeds run after their import line is changed, and give what they say.

They are read from `../shared/seeds` beside the checkout (see `seed_samples`), each in a process of
its own with two logical devices. What each must give is TensorFlow's documented behaviour, and
where TensorFlow refuses, the article's.
"""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from seed_samples import SEEDS, read_sample, reindent
from subprocess_program import (
    FEW_OPTIMIZATIONS,
    UNISON,
    environment_of_program,
    imported_by,
    kill_group,
    run_program,
)

MNIST = SEEDS.parent / "data" / "mnist.npz"

SUM_OF_UPDATES = ("000", (23, 35))
COPIES_OF_THEIR_OWN = ("002", (20, 21), (26, 28), (32, 37), (42, 44))
MIRRORED_FIT = ("003", (12, 30))
MULTI_WORKER_FIT = ("003", (35, 54))
# Each with the values of `w` below after its one step, alone and on two replicas.
AGGREGATION_METHODS = {
    "ADD_N": (("001", (27, 30)), [1.96, -0.98], [1.92, -0.96]),
    "DEFAULT": (("001", (32, 35)), [1.999, -0.999], [1.999, -0.999]),
    "TREE": (("001", (37, 40)), [1.974702, -0.982459], [1.970391, -0.974702]),
}
# With the model and the data of the program before it.
TPU_FIT = ("003", (35, 45), (48, 51), (59, 65))

with_seeds = pytest.mark.skipif(
    not SEEDS.is_dir(), reason=f"the seeds are not beside this checkout: no folder {SEEDS}"
)
with_mnist = pytest.mark.skipif(
    not MNIST.is_file(), reason=f"the data is not beside this checkout: no file {MNIST}"
)


def run_on_two_devices(program: str):
    finished = run_program(
        program,
        env={"UNISON_CPU_DEVICES": "2", "KERAS_BACKEND": "jax", **FEW_OPTIMIZATIONS},
        timeout=100,
        imported=imported_by(program),
    )
    assert finished.returncode == 0, finished.stderr
    return finished


@with_seeds
def test_a_sum_variable_takes_the_update_of_every_replica():
    finished = run_on_two_devices(read_sample(*SUM_OF_UPDATES) + "print(float(variable))\n")
    assert finished.stdout.split() == ["3.0"]


@with_seeds
def test_every_replica_prints_the_value_before_and_after_its_update():
    finished = run_on_two_devices(read_sample(*SUM_OF_UPDATES))
    printed = sorted(line for line in finished.stderr.splitlines() if line.startswith("Value"))
    assert printed == ["Value after update: 3"] * 2 + ["Value before update: 1"] * 2


@with_seeds
def test_a_variable_without_aggregation_counts_on_every_replica():
    finished = run_on_two_devices(
        read_sample(*COPIES_OF_THEIR_OWN) + "print([int(copy) for copy in result.values])\n"
    )
    assert finished.stdout.count("Epoch:") == 3
    assert finished.stdout.splitlines()[-1] == "[3, 3]"


@with_seeds
def test_a_variable_without_aggregation_is_warned_about_once_with_the_remedy():
    finished = run_on_two_devices(read_sample(*COPIES_OF_THEIR_OWN))
    warnings = [line for line in finished.stderr.splitlines() if "has no aggregation" in line]
    assert len(warnings) == 1
    assert "create it with aggregation=SUM, MEAN or ONLY_FIRST_REPLICA" in warnings[0]


# What the samples of 001 lack: a loss, which is a function as TensorFlow 2 wants it.
LOSS = """
import unison.tf as tf

strategy = {strategy}
with strategy.scope():
    w = tf.Variable([2.0, -1.0])

def loss():
    return tf.reduce_sum(w * w)
"""


def values_of_w(program):
    saying = "print([float(value) for value in w.numpy()])\n"
    return json.loads(run_on_two_devices(program + saying).stdout)


@with_seeds
@pytest.mark.parametrize("method", AGGREGATION_METHODS)
def test_an_optimizer_takes_an_aggregation_method_outside_a_strategy(method):
    sample, expected, _ = AGGREGATION_METHODS[method]
    loss = LOSS.format(strategy="tf.distribute.get_strategy()")
    assert values_of_w(loss + read_sample(*sample)) == pytest.approx(expected, rel=1e-5)


@with_seeds
@pytest.mark.parametrize("method", AGGREGATION_METHODS)
def test_an_optimizer_sums_the_gradients_of_the_replicas_by_an_aggregation_method(method):
    sample, _, expected = AGGREGATION_METHODS[method]
    importing, making, *stepping = read_sample(*sample).splitlines(keepends=True)
    step = "def step():\n" + textwrap.indent("".join(stepping), "    ") + "strategy.run(step)\n"
    loss = LOSS.format(strategy="tf.distribute.MirroredStrategy()")
    program = importing + loss + making + step
    assert values_of_w(program) == pytest.approx(expected, rel=1e-5)


# The article's images are 28 x 28 and its networks take 784 numbers; a part of them will do.
LOADING = f"""
import json, keras, numpy as np

def load_data():
    with np.load({str(MNIST)!r}) as data:
        train = data["x_train"][:20_000].reshape(-1, 784), data["y_train"][:20_000]
        test = data["x_test"].reshape(-1, 784), data["y_test"]
    return train, test

keras.datasets.mnist.load_data = load_data
keras.utils.set_random_seed(1)
"""


@with_seeds
@with_mnist
def test_the_mnist_network_trains_on_two_replicas():
    sample = read_sample(*MIRRORED_FIT).replace("epochs=10", "epochs=1, verbose=0")
    saying = "print(json.dumps(model.history.history))\n"
    lines = run_on_two_devices(LOADING + sample + saying).stdout.splitlines()
    assert lines[0] == "Number of devices: 2"
    assert json.loads(lines[-1])["val_accuracy"][-1] > 0.93


@with_seeds
@with_mnist
def test_the_multi_worker_program_trains_in_a_cluster_of_one():
    sample = read_sample(*MULTI_WORKER_FIT).replace("epochs=3", "epochs=1, verbose=0")
    saying = "print(json.dumps([global_batch_size, multi_worker_model.history.history]))\n"
    batch_size, history = json.loads(run_on_two_devices(LOADING + sample + saying).stdout)
    assert batch_size == 128
    assert history["accuracy"][-1] > 0.8


@with_seeds
@with_mnist
def test_the_multi_worker_program_trains_on_two_workers(tmp_path):
    sample = read_sample(*MULTI_WORKER_FIT).replace("epochs=3", "epochs=1, verbose=0")
    saying = "print(json.dumps([global_batch_size, multi_worker_model.history.history]))\n"
    program = tmp_path / "program.py"
    program.write_text(LOADING + sample + saying)
    unison_run = [sys.executable, "-m", "unison", "run", "-n", "2", "--devices-per-worker", "1"]
    finished = subprocess.run(
        [*unison_run, str(program)],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    said = dict(re.findall(r"^\[worker (\d)\] (\[.*\])$", finished.stdout, re.MULTILINE))
    first, second = (json.loads(said[worker]) for worker in "01")
    assert first == second
    batch_size, history = first
    assert batch_size == 128
    assert history["accuracy"][-1] > 0.8


@pytest.mark.soak
@with_seeds
@with_mnist
@pytest.mark.timeout(300)
def test_the_multi_worker_program_trains_alike_from_two_shells_and_in_one_process(tmp_path):
    sample = read_sample(*MULTI_WORKER_FIT).replace("epochs=3", "epochs=1, verbose=0")
    saying = """
weights = [float(np.abs(np.asarray(w)).sum()) for w in multi_worker_model.get_weights()]
print(json.dumps([global_batch_size, multi_worker_model.history.history, weights]))
"""
    loading = LOADING.replace("20_000", "2_000")
    program = tmp_path / "program.py"
    program.write_text(loading + sample + saying)
    words = ("run", "-n", 2, "--env", "tf-config", program)
    printed = run_program(UNISON, *words, imported=("jax", "unison"))
    assert printed.returncode == 0, printed.stderr
    exports = printed.stdout.split("# worker 1")
    environment = environment_of_program({"KERAS_BACKEND": "jax", "UNISON_CPU_DEVICES": "1"})
    shells = [
        subprocess.Popen(
            ["sh", "-c", f"{exported}\nexec {sys.executable} {program}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for exported in exports
    ]
    try:
        outputs = [shell.communicate(timeout=110) for shell in shells]
    finally:
        for shell in shells:
            kill_group(shell.pid)
    assert [shell.returncode for shell in shells] == [0, 0], outputs
    first, second = (json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs)
    assert first == second

    alone = run_on_two_devices(loading + sample + saying)
    batch_size, history, weights = json.loads(alone.stdout.splitlines()[-1])
    assert first[0] == batch_size == 128
    for name, values in history.items():
        assert first[1][name] == pytest.approx(values, rel=1e-4), name
    assert first[2] == pytest.approx(weights, rel=1e-4)


def test_lost_indentation_is_found_again():
    lost = """
        with scope():
        kept = first(1,
        2)
        # A comment.
        @decorated
        def outer(x):
        def inner():
        y = [
        x,
        ]
        return y
        z = inner()
        return z
        for step in range(3):
        outer(step)
    """
    found = """\
    with scope():
        kept = first(1,
            2)
    # A comment.
    @decorated
    def outer(x):
        def inner():
            y = [
                x,
                ]
            return y
        z = inner()
        return z
    for step in range(3):
        outer(step)
    """
    lines = [line for line in textwrap.dedent(lost).splitlines() if line]
    assert reindent(lines) == textwrap.dedent(found)


@with_seeds
@with_mnist
def test_the_tpu_program_says_without_a_tpu_how_to_compile_for_one():
    program = "global_batch_size = 512\n" + LOADING + read_sample(*TPU_FIT)
    finished = run_program(
        program, env={"KERAS_BACKEND": "jax"}, timeout=100, imported=imported_by(program)
    )
    assert finished.returncode == 1
    error = finished.stderr.splitlines()[-1]
    assert "NoTPUError: Expected a TPU on this machine" in error
    assert "unison plan --target v5e:2x4 SCRIPT" in error


@with_seeds
@with_mnist
def test_the_tpu_program_is_compiled_for_a_tpu(tmp_path):
    pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
    program, plan = tmp_path / "program.py", tmp_path / "plan.json"
    program.write_text("global_batch_size = 512\n" + LOADING + read_sample(*TPU_FIT))
    arguments = ("plan", "--target", "v5e:2x4", "--json", plan, program)
    finished = run_program(UNISON, *arguments, timeout=110, imported=("jax", "unison"))
    assert finished.returncode == 0, finished.stderr
    told = json.loads(plan.read_text())
    assert (told["num_replicas"], told["memory"]["batch"]) == (8, 64 * (784 * 4 + 1))
    assert [(one["kind"], one["runs"]) for one in told["collectives"]] == [("all-reduce", 1)]
