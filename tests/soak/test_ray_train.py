"""Workers of Ray Train's JaxTrainer train together, and not each alone.

Needs more than the other tests: `pip install "ray[train]>=2.60"`.
"""

import json
import os
import subprocess
import sys

import pytest

from subprocess_program import environment_of_program

pytest.importorskip("ray.train.v2.jax", reason="ray[train] is not installed", exc_type=ImportError)

LIMIT = 200

pytestmark = [pytest.mark.soak, pytest.mark.timeout(LIMIT + 20)]

PROGRAM = """
import json, os, pathlib, sys
import ray, ray.data
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

def train(config):
    import jax, keras
    import numpy as np
    import ray.train
    import unison

    folder = pathlib.Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    if config["how"] == "mirrored":
        try:
            unison.MirroredStrategy()
        except RuntimeError as error:
            (folder / f"worker-{rank}").write_text(json.dumps({"error": str(error)}))
        return
    strategies = [unison.MultiWorkerMirroredStrategy() for _ in range(2)]
    keras.utils.set_random_seed(1)
    with strategies[-1].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    class Killed(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            mark = folder / "killed"
            if config["how"] == "killed" and rank == 1 and batch == 2 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)

    if config["how"] == "split":
        from unison.data import Dataset

        split = ray.train.get_dataset_shard("train")
        seen = []

        def example(row):
            seen.append(int(row["id"]))
            number = np.float32([row["id"]]) / 64
            return np.tile(number, 4), number

        def of_worker(context):
            size = context.get_per_replica_batch_size(16)
            return Dataset.from_source(split).map(example).batch(size)

        data = strategies[-1].distribute_datasets_from_function(of_worker)
        model.evaluate(data, verbose=0)  # builds the model: it takes a batch more
        seen.clear()
        done = model.fit(data, epochs=2, verbose=0)
        told = {"loss": done.history["loss"], "seen": seen}
        (folder / f"worker-{rank}").write_text(json.dumps(told))
        return

    x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    done = model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=[Killed()])
    told = {
        "loss": done.history["loss"],
        "processes": jax.process_count(),
        "replicas": strategies[-1].num_replicas_in_sync,
        "environment": strategies[0].cluster_resolver.environment,
    }
    (folder / f"worker-{rank}").write_text(json.dumps(told))

if __name__ == "__main__":
    folder, how = sys.argv[1:]
    environment = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "UNISON_CPU_DEVICES": "1"}
    environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    ray.init(num_cpus=4, include_dashboard=False)
    rows = ray.data.range(64, override_num_blocks=8) if how == "split" else None
    # Asked for GPUs, it connects the workers itself, also where JAX_PLATFORMS has it use CPUs.
    JaxTrainer(
        train,
        train_loop_config={"folder": folder, "how": how},
        jax_config=JaxConfig(use_gpu=how == "connected by Ray"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        datasets={"train": rows} if rows is not None else None,
        run_config=RunConfig(
            storage_path=folder,
            failure_config=FailureConfig(max_failures=int(how == "killed")),
            worker_runtime_env={"env_vars": environment},
        ),
    ).fit()
"""


@pytest.fixture
def reports(tmp_path):
    """A function that runs the program, and returns what its workers report."""

    def run(how):
        program = tmp_path / "train.py"
        program.write_text(PROGRAM)
        environment = environment_of_program({"RAY_TRAIN_V2_ENABLED": "1"})
        environment.pop("UNISON_KEY", None)
        done = subprocess.run(
            [sys.executable, program, tmp_path, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
            env=environment | {"HOME": os.fspath(tmp_path)},
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return [json.loads((tmp_path / f"worker-{rank}").read_text()) for rank in (0, 1)]

    return run


@pytest.mark.parametrize(
    ("how", "environment"),
    [("alone", "ray-train"), ("connected by Ray", "jax"), ("killed", "ray-train")],
)
def test_the_workers_train_together(reports, how, environment):
    first, second = reports(how)
    assert first == second
    assert first["processes"] == 2
    assert first["replicas"] == 2
    assert first["environment"] == environment
    assert first["loss"][-1] < first["loss"][0]


def test_a_split_of_a_ray_dataset_reaches_each_worker(reports):
    first, second = reports("split")
    assert first["loss"] == second["loss"]
    assert first["loss"][-1] < first["loss"][0]
    assert set(first["seen"]).isdisjoint(second["seen"])
    assert sorted(first["seen"] + second["seen"]) == sorted([*range(64)] * 2)


def test_a_strategy_that_ignores_the_others_is_refused(reports):
    for rank, told in enumerate(reports("mirrored")):
        assert f"process {rank} of 2, according to Ray Train" in told["error"]
