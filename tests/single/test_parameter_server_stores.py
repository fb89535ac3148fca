"""Variables that several jobs share, on servers that outlive them; all of it in this process."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import unison
from parameter_server_threads import free_addresses
from unison.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from unison.parameter_server import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    ParameterServerStrategy,
    Server,
    VariableStore,
)
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver


@pytest.fixture
def start():
    """A function that starts a job with a worker on two servers that outlive it."""
    servers = free_addresses(2)
    lasting = [
        Server({"ps": servers}, "ps", index, is_lasting=True) for index in range(len(servers))
    ]
    ended = []

    def started(order=1, **options):
        (worker,) = free_addresses(1)
        cluster = ClusterSpec({"worker": [worker], "ps": servers[::order]})
        ended.append(Server(cluster, "worker", 0).stop)
        strategy = ParameterServerStrategy(
            SimpleClusterResolver(cluster), timeout_seconds=10, **options
        )
        coordinator = ClusterCoordinator(strategy)
        ended.append(coordinator.end)
        return strategy, coordinator

    yield started
    for end in (*reversed(ended), *(server.stop for server in lasting)):
        end()


def variable(strategy, value=0.0, rights="update", store="numbers", **options):
    with strategy.scope(), VariableStore(store, rights):
        return unison.Variable(value, name="shared", **options)


def test_the_first_job_creates_and_the_others_attach(start):
    (first, first_coordinator), (second, second_coordinator) = start(), start()
    own = variable(first, np.arange(3, dtype=np.float32))
    other = variable(second, np.full(3, 100, np.float32))
    np.testing.assert_array_equal(other.numpy(), [0, 1, 2])
    for coordinator, shared in ((first_coordinator, own), (second_coordinator, other)):
        for _ in range(10):
            coordinator.schedule(lambda shared=shared: shared.assign_add(jnp.ones(3)))
    first_coordinator.join()
    second_coordinator.join()
    np.testing.assert_array_equal(own.numpy(), [20, 21, 22])
    np.testing.assert_array_equal(other.numpy(), [20, 21, 22])


def test_variables_outside_a_store_are_the_jobs_own_and_end_with_it(start):
    (first, coordinator), (second, _) = start(), start()
    for strategy in (first, second):
        with strategy.scope():
            own = unison.Variable(1.0)
        own.assign_add(1.0)
        assert float(own) == 2.0
    shared = variable(first, 5.0)
    shared.assign(6.0)
    coordinator.end()
    third, _ = start()
    assert float(variable(third, 0.0)) == 6.0
    assert third.store.ask_all("status")[0]["variables"] == 0


def test_many_jobs_that_begin_at_once_get_one_variable(start):
    jobs = [start()[0] for _ in range(3)]
    found = [None] * len(jobs)
    ready = threading.Barrier(len(jobs))

    def create(index):
        ready.wait()
        found[index] = variable(jobs[index], np.full((4, 2), index, np.float32))

    threads = [threading.Thread(target=create, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    values = [shared.numpy() for shared in found]
    assert values[0][0, 0] in (0, 1, 2)
    for value in values:
        np.testing.assert_array_equal(value, np.full((4, 2), values[0][0, 0]))


def test_who_may_only_read_is_refused_by_the_server(start):
    (writer, _), (reader, coordinator) = start(), start()
    own = variable(writer, 1.0)
    seen = variable(reader, 0.0, rights="read")
    own.assign(4.0)
    value = coordinator.schedule(lambda: seen.value() * 2)
    assert float(value.fetch()) == 8.0
    with pytest.raises(PermissionDeniedError, match=r"may not update.*'read'"):
        seen.assign(3.0)
    coordinator.schedule(lambda: seen.assign_add(1.0))
    with pytest.raises(PermissionDeniedError, match="rights='update'"):
        coordinator.join()
    with pytest.raises(PermissionDeniedError, match="may not update"):
        VariableStore("numbers", rights="read").delete(reader)
    assert float(own) == 4.0


def test_a_table_is_shared_with_its_shards_and_rows(start):
    jobs = [start(variable_partitioner=FixedShardsPartitioner(2)) for _ in range(2)]
    tables = [variable(strategy, np.zeros((6, 2), np.float32)) for strategy, _ in jobs]

    def add(table, ids):
        table.scatter_add(unison.IndexedSlices(jnp.ones((2, 2)), ids))

    for (_, coordinator), table, rows in zip(jobs, tables, ([0, 4], [4, 5]), strict=True):
        coordinator.schedule(lambda ids, table=table: add(table, ids), args=(np.array(rows),))
        coordinator.join()
    np.testing.assert_array_equal(tables[0].numpy()[:, 0], [1, 0, 0, 0, 2, 1])
    np.testing.assert_array_equal(tables[1].numpy(), tables[0].numpy())


def test_jobs_must_agree_on_what_they_share(start):
    (first, _), (second, _) = start(), start()
    variable(first, np.zeros(3, np.float32))
    with pytest.raises(InvalidArgumentError, match=r"is float32\[3\].*Received: float32\[4\]"):
        variable(second, np.zeros(4, np.float32))
    reordered, _ = start(order=-1)
    with pytest.raises(FailedPreconditionError, match="in the same order"):
        variable(reordered, np.zeros(3, np.float32))


def test_a_reader_waits_for_what_is_not_there(start):
    reader, _ = start()
    reader.store.patience = 0.3
    with pytest.raises(DeadlineExceededError, match="has no variable 'shared'"):
        variable(reader, 0.0, rights="read")


def test_a_deleted_store_is_created_anew(start):
    strategy, _ = start()
    variable(strategy, 1.0).assign(5.0)
    VariableStore("numbers").delete(strategy)
    assert float(variable(strategy, 1.0)) == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"), [(("a/b",), "letters, digits"), (("a", "write"), "Expected one of")]
)
def test_stores_without_a_proper_name_or_rights_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        VariableStore(*arguments)


def test_shared_variables_come_back_from_the_servers_snapshots(start, tmp_path, monkeypatch):
    monkeypatch.setenv("UNISON_PS_CHECKPOINTS", str(tmp_path))
    monkeypatch.setenv("UNISON_PS_CHECKPOINT_SECONDS", "0.1")
    found = []
    (ps,) = free_addresses(1)
    for _ in range(2):
        server = Server({"ps": [ps]}, "ps", 0, is_lasting=True)
        cluster = ClusterSpec({"worker": free_addresses(1), "ps": [ps]})
        strategy = ParameterServerStrategy(SimpleClusterResolver(cluster), timeout_seconds=10)
        shared = variable(strategy, np.zeros(2, np.float32))
        found.append(shared.numpy()[0])
        shared.assign(np.full(2, 7, np.float32))
        strategy.store.farewell()
        server._jobs.write_snapshot()
        server.stop()
    assert found == [0.0, 7.0]
