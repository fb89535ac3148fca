"""Processes that `jax.distributed.initialize` has connected, as other launchers call it."""

import pytest

from worker_processes import run_workers

pytestmark = pytest.mark.slow

PROGRAM = """
import os

import unison
from unison.runtime import liveness, process_group
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver

if GIVEN["started"]:
    jax.devices()
try:
    unison.MirroredStrategy()
except RuntimeError as error:
    refusal = str(error)
if GIVEN["described"]:  # none of the addresses is used, as they are connected
    cluster = ClusterSpec({"worker": [f"localhost:{port + 1}" for port in range(COUNT)]})
    strategy = unison.MultiWorkerMirroredStrategy(
        SimpleClusterResolver(cluster, "", "worker", INDEX)
    )
else:
    strategy = unison.MultiWorkerMirroredStrategy()
total = strategy.reduce("SUM", strategy.run(lambda: jax.numpy.ones(())), axis=None)
told = {
    "refusal": refusal,
    "replicas": strategy.num_replicas_in_sync,
    "total": float(total),
    "names": list(liveness.current().names),
    "agreed": process_group.all_gather_json(INDEX, "a test"),
    "process": os.getpid(),
    # A process that trains with the others may have strategies beside: its own, and another one.
    "own": unison.MirroredStrategy().num_replicas_in_sync,
    "second": unison.MultiWorkerMirroredStrategy().num_replicas_in_sync,
}
report(told)
"""

LOST = """
import os, signal, time

import unison
from unison.errors import UnavailableError

strategy = unison.MultiWorkerMirroredStrategy()
total = lambda: strategy.reduce("SUM", strategy.run(lambda: jax.numpy.ones(())), axis=None)
total().block_until_ready()
report(os.getpid())
if INDEX == 1:
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 30
try:
    while time.monotonic() < end:
        total().block_until_ready()
except UnavailableError as error:
    print("LOST", error, file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module", params=["before", "after", "described"])
def told(request):
    """What two processes report, which adopt their job before or after JAX has started."""
    given = {"started": request.param == "after", "described": request.param == "described"}
    return [told for told, _ in run_workers(PROGRAM, 2, given, timeout=120)]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_strategy_that_would_ignore_the_other_one_is_refused(told, worker):
    message = told[worker]["refusal"]
    assert f"process {worker} of 2, according to jax.distributed.initialize" in message
    assert "Use MultiWorkerMirroredStrategy, which finds them" in message


def test_they_train_together(told):
    assert [each["replicas"] for each in told] == [2, 2]
    assert [each["total"] for each in told] == [2.0, 2.0]


def test_they_agree_and_know_each_other_by_process(told):
    assert [each["agreed"] for each in told] == [[0, 1], [0, 1]]
    for names in (each["names"] for each in told):
        for index, name in enumerate(names):
            assert name.startswith(f"worker {index} (process {told[index]['process']} on ")


def test_beside_them_a_strategy_may_be_one_workers_own(told):
    assert [each["own"] for each in told] == [1, 1]


def test_they_may_have_several_strategies(told):
    assert [each["second"] for each in told] == [2, 2]


def test_a_process_that_is_lost_is_named():
    (_, survivor), (process, _) = run_workers(LOST, 2, timeout=120)
    assert f"LOST worker 1 (process {process} on " in survivor
    assert "has died: its connection was closed without notice" in survivor
