"""`unison run --ps --address`: workers and servers on the nodes of a Ray cluster."""

import contextlib
import logging

import pytest

from ray_cluster import NODES, ray_cluster, run
from unison.cli import main
from unison.runtime.launching import ray_nodes

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")

pytestmark = pytest.mark.timeout(240)

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


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with two CPUs each."""
    with ray_cluster() as made:
        yield made


@pytest.fixture
def program(tmp_path):
    (tmp_path / "beside.py").write_text(
        "import numpy as np\n\ndef batches():\n    while True:\n        yield np.ones(3, 'f4')\n"
    )
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_workers_and_servers_run_on_the_nodes_of_a_ray_cluster(cluster, program):
    options = ("--workers", 2, "--ps", 1, "--cpus-per-worker", 1)
    finished = run(cluster.address, *options, program)
    assert finished.returncode == 0, finished.stderr
    assert "[chief] total 60.0" in finished.stdout
    assert any(node in finished.stdout for node in NODES)


@contextlib.contextmanager
def taken(cluster, cpus):
    """CPUs of the cluster that another job has, which has come before."""
    from ray.util.placement_group import placement_group

    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        assert placement_group([{"CPU": 1}] * cpus).wait(60)
        yield
    finally:
        ray.shutdown()


def test_servers_for_which_a_cluster_has_no_room_end_the_job_with_an_error(
    cluster, program, monkeypatch, capsys
):
    monkeypatch.setattr(ray_nodes, "_SECONDS_FOR_ROOM", 0.5)
    with taken(cluster, 2):
        for servers, said in (
            (3, "Expected room for 5 workers"),  # there never is
            (1, "Others left after 0.5 s only"),  # not now
        ):
            options = ["--workers", "2", "--ps", str(servers), "--cpus-per-worker", "1"]
            code = main(["run", "--address", cluster.address, *options, str(program)])
            assert code == 2
            assert said in capsys.readouterr().err
