"""Models larger than one server's memory, and tables that are much larger than a batch.

The limit of a server is `RLIMIT_DATA`: what a process may allocate (the heap, anonymous maps,
stacks). It is set when JAX has started, to what is in use then and an allowance on top of it. What
it does not count is memory that processes share, so the pages that a server has at most are
measured beside it.
"""

import contextlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import unison
from parameter_server_threads import free_addresses, until
from peak_memory import most_bytes
from subprocess_program import SOURCE
from unison.errors import ResourceExhaustedError
from unison.parameter_server import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    ParameterServerStrategy,
    read_rows,
)
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver

KEY = "ef" * 32
SECONDS = 120
MEBIBYTE = 1 << 20

#: A process of a cluster; the argument is how much more a server may allocate. Its standard output
#: has the number of bytes in memory before it serves.
SERVING = """
import re, resource, sys, threading
import jax, scipy.linalg  # which programs load when they are compiled
from unison.parameter_server.serving import main

threading.stack_size(1 << 20)
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
of_process = dict(re.findall(r"(Vm\\w+):\\s+(\\d+) kB", open("/proc/self/status").read()))
if len(sys.argv) > 1:
    limit = 1024 * int(of_process["VmData"]) + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(1024 * int(of_process["VmRSS"]), flush=True)
main([])
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("UNISON_KEY", KEY)


@pytest.fixture
def start():
    """Starts a cluster; gives its strategy and its servers, with what each had at first."""
    with contextlib.ExitStack() as ending:

        def started(workers, servers, allowance=None):
            addresses = free_addresses(1 + workers + servers)
            # Where no worker is started, one is expected.
            spec = ClusterSpec({"worker": addresses[: workers or 1], "ps": addresses[-servers:]})
            tasks = [("ps", n) for n in range(servers)] + [("worker", n) for n in range(workers)]
            processes = []
            for job, index in tasks:
                limit = [str(allowance)] if allowance and job == "ps" else []
                config = {"cluster": spec.as_dict(), "task": {"type": job, "index": index}}
                process = subprocess.Popen(
                    [sys.executable, "-c", SERVING, *limit],
                    env={
                        **os.environ,
                        "TF_CONFIG": json.dumps(config),
                        "JAX_PLATFORMS": "cpu",
                        "NPROC": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                        "PYTHONPATH": os.environ.get("PYTHONPATH", str(SOURCE)),
                    },
                    stdout=subprocess.PIPE,
                    text=True,
                )
                ending.callback(end, process)
                processes.append(process)
            at_first = [int(process.stdout.readline()) for process in processes]
            strategy = ParameterServerStrategy(
                SimpleClusterResolver(spec), FixedShardsPartitioner(servers), SECONDS
            )
            return strategy, list(zip(processes, at_first, strict=True))[:servers]

        yield started


def end(process):
    process.kill()
    process.wait(SECONDS)
    process.stdout.close()


#: Calls before those that are counted. Numbers of calls are a part of messages: those that are
#: counted have two digits.
CALLS_BEFORE = 9


def counting_steps(coordinator, strategy, rows, width, ids, steps):
    """Trains a table, and dense weights beside it; returns both, and the bytes of the steps."""
    with strategy.scope():
        table = unison.Variable(np.zeros((rows, width), np.float32))
        weights = unison.Variable(np.zeros((width, 8), np.float32))

    def loss(values, own):
        return values[0][own].sum() + values[1].sum()

    def step(x):
        def replica(own):
            gradients = jax.grad(loss)([table.value(), weights.value()], own)
            for variable, gradient in zip((table, weights), gradients, strict=True):
                variable.assign_add(gradient)

        strategy.run(replica, args=(x,))

    def moved():
        """The bytes between workers and servers; what the coordinator asks to know it is not."""
        asking = sum(own.sent_bytes + own.received_bytes for own in strategy.store._connections)
        answers = strategy.store.ask_all("status").values()
        return sum(own["sent_bytes"] + own["received_bytes"] for own in answers) - asking

    workers = coordinator._dispatcher.workers
    until(lambda: not any(worker.is_lost for worker in workers), "workers come")
    for _ in range(CALLS_BEFORE):
        coordinator.schedule(step, args=(ids,))
    coordinator.join()
    assert all(worker.waited_seconds for worker in workers)  # each knows all servers
    before = moved()
    for _ in range(steps):
        coordinator.schedule(step, args=(ids,))
        coordinator.join()
    return table, weights, moved() - before


def test_a_model_larger_than_a_servers_memory_trains_on_several(start):
    rows, width, allowance = 1 << 20, 96, 256 * MEBIBYTE
    size = 4 * rows * width
    assert size > allowance
    strategy, servers = start(workers=1, servers=4, allowance=allowance)
    coordinator = ClusterCoordinator(strategy)
    ids = np.linspace(0, rows - 1, 1000).astype(np.int32)
    table, weights, _ = counting_steps(coordinator, strategy, rows, width, ids, steps=5)
    assert np.all(read_rows(table, ids) == CALLS_BEFORE + 5)
    assert np.all(read_rows(table, ids[1:] - 1) == 0)
    assert np.all(weights.numpy() == CALLS_BEFORE + 5)
    for process, at_first in servers:
        assert process.poll() is None
        assert most_bytes(process) - at_first < size / 2
    coordinator.end()


def test_a_model_larger_than_the_one_servers_memory_is_refused_with_its_shape(start):
    rows, width, allowance = 1 << 20, 96, 256 * MEBIBYTE
    strategy, ((server, _),) = start(workers=0, servers=1, allowance=allowance)
    with strategy.scope():
        with pytest.raises(ResourceExhaustedError) as refused:
            unison.Variable(np.zeros((rows, width), np.float32))
        said = str(refused.value)
        assert "Parameter server 0" in said
        assert "Out of memory: float32[1048576, 96], 402,653,184 bytes" in said
        assert "RLIMIT_DATA" in said
        # It goes on with what there is memory for.
        smaller = unison.Variable(np.ones((rows // 8, width), np.float32))
    assert smaller.numpy().sum() == rows // 8 * width
    assert server.poll() is None
    strategy.store.farewell()


@pytest.mark.soak  # 1.3 GB on the servers, and as much in the coordinator
@pytest.mark.timeout(300)
def test_a_step_moves_as_many_bytes_whatever_the_table_has(start):
    width, steps = 32, 20
    small = np.sort(np.random.default_rng(0).permutation(10_000)[:2000]).astype(np.int32)
    moved = {}
    for rows in (10_000, 10_000_000):
        strategy, servers = start(workers=2, servers=2)
        coordinator = ClusterCoordinator(strategy)
        ids = small * (rows // 10_000)  # as many on each server
        table, _, moved[rows] = counting_steps(coordinator, strategy, rows, width, ids, steps)
        assert np.all(read_rows(table, ids) == CALLS_BEFORE + steps)
        for process, at_first in servers:
            assert most_bytes(process) - at_first < 4 * rows * width / 2 + 200 * MEBIBYTE
        coordinator.end()
    assert moved[10_000_000] == moved[10_000]
    # Of each row, what it is and how it changes, with its number and what messages say.
    a_step = moved[10_000_000] / steps
    assert 2 * 4 * len(small) * width < a_step < 3 * 4 * len(small) * width
