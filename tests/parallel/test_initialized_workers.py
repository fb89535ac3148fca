"""Processes that `jax.distributed.initialize` has connected, as other launchers call it."""

import pytest

from worker_processes import run_workers

PROGRAM = """
import unison
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver

def refused(strategy):
    try:
        strategy()
    except RuntimeError as error:
        return str(error)

told = [refused(unison.MultiWorkerMirroredStrategy), refused(unison.MirroredStrategy)]
# Who they are may be said: none of the addresses is used, as they are connected.
cluster = ClusterSpec({"worker": [f"localhost:{port + 1}" for port in range(COUNT)]})
strategy = unison.MultiWorkerMirroredStrategy(SimpleClusterResolver(cluster, "", "worker", INDEX))
told.append(strategy.num_replicas_in_sync)
# A process that trains with the others may have a strategy of its own beside.
told.append(unison.MirroredStrategy().num_replicas_in_sync)
report(told)
"""


@pytest.fixture(scope="module")
def told():
    return [told for told, _ in run_workers(PROGRAM, 2)]


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("strategy", ["MultiWorkerMirroredStrategy", "MirroredStrategy"])
def test_a_strategy_that_would_ignore_the_other_one_is_refused(told, strategy, worker):
    message = told[worker][strategy == "MirroredStrategy"]
    assert f"process {worker} of 2, according to jax.distributed.initialize" in message
    assert strategy in message


def test_they_train_together_where_the_program_says_who_they_are(told):
    assert [replicas for _, _, replicas, _ in told] == [2, 2]


def test_beside_them_a_strategy_may_be_one_workers_own(told):
    assert [replicas for _, _, _, replicas in told] == [1, 1]
