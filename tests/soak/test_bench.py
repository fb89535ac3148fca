"""`unison bench` on a Ray cluster, and two equal runs of a model."""

import json
import subprocess
import sys

import pytest

from ray_cluster import ray_cluster

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PROGRAM = """
import numpy as np
import unison
from beside import SIZE

strategy = unison.MultiWorkerMirroredStrategy()
batches = unison.data.Dataset.from_tensor_slices(np.ones((64, SIZE), np.float32)).batch(16)

def step(x):
    return unison.get_replica_context().all_reduce("sum", x.sum())

for batch in strategy.experimental_distribute_dataset(batches.repeat()):
    strategy.run(step, args=(batch,))
"""


def bench(output, *arguments):
    command = [sys.executable, "-m", "unison", "bench", "-o", output, *arguments]
    subprocess.run([*map(str, command)], check=True, timeout=800)
    return output / "results.json"


def test_a_program_is_measured_on_a_ray_cluster(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("SIZE = 8")
    few = ["--rounds", 1, "--steps", 20, "--warmup", 5]
    with ray_cluster() as cluster:
        where = ["--address", cluster.address, "--workers", "2", *few]
        path = bench(tmp_path / "output", *where, tmp_path / "program.py")
    (point,) = json.loads(path.read_text())["points"]
    (record,) = point["rounds"]
    assert (record["replicas"], record["examples"]) == (2, 16)
    assert record["alone"] > 0


def test_a_model_can_be_compared_with_itself(tmp_path):
    runs = [bench(tmp_path / name, "--devices", "1,2", "mlp") for name in ("one", "other")]
    compare = [sys.executable, "-m", "unison", "bench", "compare", *map(str, runs)]
    compared = subprocess.run(compare, check=True, timeout=60, capture_output=True, text=True)
    assert "2 devices, batch 512" in compared.stdout
