"""Input workers on the nodes of a Ray cluster, which are lost and added while a program reads."""

import collections
import logging
import os
import signal
import sys

import numpy as np
import pytest

from ray_cluster import NODES, ray_cluster, with_ray
from subprocess_program import run_program
from unison.data import Dataset, service
from unison.data.service import DispatcherConfig, ShardingPolicy, WorkerConfig, ray_workers
from unison.errors import UnavailableError

pytestmark = [with_ray, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster():
    """A cluster, which this process joins."""
    import ray

    with ray_cluster() as cluster:
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()


@pytest.fixture
def address(cluster):
    return cluster.address


@pytest.fixture
def dispatcher():
    server = service.DispatchServer(DispatcherConfig(host=NODES[0]))
    yield server
    server.stop()


def configuration(dispatcher, **options):
    return WorkerConfig(dispatcher.target.split("://")[1], heartbeat_interval=0.2, **options)


def with_processes(dataset):
    """Numbers, and the processes that compute them, which takes a moment."""

    def own_process(number):  # sent as it is: the nodes cannot import this file
        import os
        import time

        time.sleep(0.005)
        return number, os.getpid()

    return dataset.map(own_process)


def read(dispatcher, dataset, mode):
    return iter(
        dataset.apply(service.distribute(mode, dispatcher.target, max_outstanding_requests=4))
    )


def test_workers_serve_on_every_node_and_end_with_their_block(address, dispatcher):
    with service.RayWorkers(configuration(dispatcher), address=address) as workers:
        assert sorted(each.split(":")[0] for each in workers.addresses) == sorted(NODES)
        found = list(read(dispatcher, with_processes(Dataset.range(400)), ShardingPolicy.DYNAMIC))
        assert sorted(int(number) for number, _ in found) == list(range(400))
        processes = {int(pid) for _, pid in found}
    assert len(processes) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in processes)


def test_a_worker_that_is_killed_is_started_again_while_a_program_reads(address, dispatcher):
    with service.RayWorkers(configuration(dispatcher), address=address, cpus=1) as workers:
        before = workers.addresses
        iterator = read(dispatcher, with_processes(Dataset.counter()), ShardingPolicy.OFF)
        found = collections.Counter()
        while len(found) < 2:
            found[int(next(iterator)[1])] += 1
        os.kill(next(iter(found)), signal.SIGKILL)
        while len(found) < 3:  # the one that replaces it is read from
            found[int(next(iterator)[1])] += 1
        assert len(set(workers.addresses) & set(before)) == 1
        del iterator


def test_workers_are_added_by_another_object_which_may_end_first(address, dispatcher):
    config = configuration(dispatcher)
    with service.RayWorkers(config, workers=1, cpus=1, address=address):
        iterator = read(dispatcher, with_processes(Dataset.counter()), ShardingPolicy.OFF)
        found = {int(next(iterator)[1])}
        with service.RayWorkers(config, workers=2, cpus=1, address=address):
            while len(found) < 3:
                found.add(int(next(iterator)[1]))
        last = [int(next(iterator)[0]) for _ in range(200)]
        assert np.all(np.diff(last[-20:]) == 1)  # of the first worker alone
        del iterator


def test_the_worker_of_a_lost_node_is_started_on_another_one(cluster, dispatcher):
    other = cluster.add_node(num_cpus=1, object_store_memory=80 << 20, node_ip_address="127.0.0.4")
    cluster.wait_for_nodes()
    config = configuration(dispatcher)
    with service.RayWorkers(config, workers=3, cpus=1, address=cluster.address) as workers:
        assert "127.0.0.4" in {each.split(":")[0] for each in workers.addresses}
        iterator = read(dispatcher, with_processes(Dataset.counter()), ShardingPolicy.OFF)
        found = {int(next(iterator)[1]) for _ in range(400)}
        assert len(found) == 3
        cluster.remove_node(other)
        while len(found) < 4:
            found.add(int(next(iterator)[1]))
        assert {each.split(":")[0] for each in workers.addresses} == set(NODES)
        del iterator


def test_what_does_not_fit_or_cannot_be_reached_is_refused(address, dispatcher, monkeypatch):
    with pytest.raises(ValueError, match="neither worker_address nor port"):
        service.RayWorkers(configuration(dispatcher, port=5050), address=address)
    with pytest.raises(UnavailableError, match="Expected room for 40 workers"):
        service.RayWorkers(configuration(dispatcher), workers=40, cpus=1, address=address)
    monkeypatch.setattr(ray_workers, "own_address", lambda host: None)
    with pytest.raises(ValueError, match=r"DispatcherConfig\(host=\.\.\.\)"):
        service.RayWorkers(WorkerConfig("localhost:5050"), address=address)


def test_a_folder_cannot_be_sent_to_a_cluster_that_was_joined_before(address, dispatcher):
    with pytest.raises(ValueError, match="working_dir"):
        service.RayWorkers(configuration(dispatcher), address=address, folder=".")


def test_workers_with_another_key_are_refused_at_once(address, dispatcher, monkeypatch):
    monkeypatch.setenv("UNISON_KEY", "cd" * 32)
    with pytest.raises(UnavailableError, match="UnauthenticatedError"):
        service.RayWorkers(configuration(dispatcher), workers=1, address=address)


PROGRAM = """
import sys
from unison.data import Dataset, service

sys.path.insert(0, sys.argv[3])  # where the function finds what it imports here, too
dispatcher = service.DispatchServer(service.DispatcherConfig(host=sys.argv[2]))
config = service.WorkerConfig(dispatcher.target.split("://")[1])
workers = service.RayWorkers(config, address=sys.argv[1], folder=sys.argv[3])
workers.stop() if sys.argv[4] == "stop" else None

def squared(number):
    from beside import square
    return square(number)

if sys.argv[4] == "end":
    dataset = Dataset.range(8).map(squared)
    read = dataset.apply(service.distribute("distributed_epoch", dispatcher.target))
    print(sorted(int(number) for number in read))
if sys.argv[4] == "left":
    import ray
    ray.shutdown()
    workers.stop()
"""


@pytest.mark.parametrize("end", ["end", "stop", "left"])
def test_a_program_sends_a_folder_and_ends_in_any_way(address, tmp_path, end):
    (tmp_path / "beside.py").write_text("square = lambda number: number * number")
    done = run_program(PROGRAM, address, NODES[0], tmp_path, end, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ("[0, 1, 4, 9, 16, 25, 36, 49]\n" if end == "end" else "")


def test_ray_is_an_extra(dispatcher, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'unison\[ray\]'"):
        service.RayWorkers(configuration(dispatcher))
