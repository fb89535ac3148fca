"""`unison run --ps --address`: workers and servers on the nodes of a Ray cluster."""

import pytest

from ray_cluster import NODES, ray_cluster, run

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")

PROGRAM = """
import unison
from beside import batches
from unison.parameter_server import ClusterCoordinator

strategy = unison.ParameterServerStrategy()
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    total = unison.Variable(0.0)
iterator = iter(coordinator.create_per_worker_dataset(batches))


def step(own):
    strategy.run(lambda x: total.assign_add(x.sum()), args=(next(own),))


for _ in range(20):
    coordinator.schedule(step, args=(iterator,))
coordinator.join()
print("total", float(total), *strategy.worker_addresses)
"""


@pytest.mark.timeout(240)
def test_workers_and_servers_run_on_the_nodes_of_a_ray_cluster(tmp_path):
    (tmp_path / "beside.py").write_text(
        "import numpy as np\n\ndef batches():\n    while True:\n        yield np.ones(3, 'f4')\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    with ray_cluster() as cluster:
        finished = run(
            cluster.address,
            *("--workers", 2, "--ps", 1, "--cpus-per-worker", 1),
            tmp_path / "program.py",
        )
    assert finished.returncode == 0, finished.stderr
    assert "[chief] total 60.0" in finished.stdout
    assert any(node in finished.stdout for node in NODES)
