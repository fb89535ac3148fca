"""Clusters as a process finds them, and `MultiWorkerMirroredStrategy` in a cluster of one."""

import json
import os

import jax
import pytest

import unison
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import SimpleClusterResolver, TFConfigClusterResolver
from unison.strategies import MultiWorkerMirroredStrategy


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def set_config(monkeypatch, cluster, **task):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def test_without_a_cluster_it_mirrors_on_the_devices_of_this_process():
    strategy = MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == unison.MirroredStrategy().num_replicas_in_sync
    with strategy.scope():
        count = unison.Variable(0, aggregation=unison.VariableAggregation.SUM)
    strategy.run(lambda: count.assign_add(1))
    assert int(count) == strategy.num_replicas_in_sync


def test_a_cluster_of_one_worker_is_no_more(monkeypatch):
    set_config(monkeypatch, {"worker": ["localhost:12345"]}, type="worker", index=0)
    resolver = MultiWorkerMirroredStrategy().cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


def test_a_process_of_no_training_task_is_refused_by_name(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    set_config(monkeypatch, cluster, type="ps", index=0)
    with pytest.raises(ValueError, match=r"'chief', 0.*'worker', 0.* which train together"):
        MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("jobs", [{}, {"evaluator": ["c:1"]}])
def test_an_evaluator_waits_for_nobody(monkeypatch, jobs):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], **jobs}
    set_config(monkeypatch, cluster, type="evaluator", index=0)
    strategy = MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == unison.MirroredStrategy().num_replicas_in_sync
    assert strategy.cluster_resolver.is_chief
    assert strategy.extended.should_checkpoint


def test_a_process_whose_backend_runs_cannot_join(monkeypatch):
    set_config(monkeypatch, {"chief": ["a:1"], "worker": ["b:1"]}, type="worker", index=0)
    jax.devices()
    with pytest.raises(RuntimeError, match="Create the strategy before the first JAX computation"):
        MultiWorkerMirroredStrategy()


def test_outside_a_cluster_the_resolver_knows_no_task():
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.cluster_spec().as_dict() == {}


def test_arguments_override_the_task(monkeypatch):
    set_config(monkeypatch, {"worker": ["a:1", "b:2"]}, type="worker", index=0)
    resolver = TFConfigClusterResolver(task_id=1, rpc_layer="grpc")
    assert resolver.task_id == 1
    assert resolver.master() == "grpc://b:2"


def test_the_only_task_has_no_master_unless_one_is_named(monkeypatch):
    set_config(monkeypatch, {"worker": ["a:1"]}, type="worker", index=0)
    assert TFConfigClusterResolver().master("worker", 0) == ""
    config = json.loads(os.environ["TF_CONFIG"])
    monkeypatch.setenv("TF_CONFIG", json.dumps(config | {"session_master": "grpc://x:1"}))
    assert TFConfigClusterResolver().master() == "grpc://x:1"


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": []}', '{"task": 3}'])
def test_a_malformed_configuration_is_quoted(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG must be JSON") as caught:
        TFConfigClusterResolver()
    assert repr(text) in str(caught.value)


def test_a_program_may_describe_its_cluster():
    cluster = ClusterSpec({"worker": ["a:1", "b:2"]})
    resolver = SimpleClusterResolver(
        cluster, task_type="worker", task_id=1, num_accelerators={"GPU": 2}
    )
    assert resolver.cluster_spec() == cluster
    assert resolver.master() == ""
    assert resolver.master("worker", 0) == "a:1"
    assert resolver.num_accelerators() == {"GPU": 2}


def test_a_cluster_must_be_a_cluster_spec():
    with pytest.raises(TypeError, match="ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})
