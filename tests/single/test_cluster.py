"""Descriptions of clusters: what is wrong with one is said in one error, with the mend."""

import json

import pytest

from unison.runtime.cluster import ClusterSpec, check_cluster
from unison.runtime.cluster_resolvers import SimpleClusterResolver, TFConfigClusterResolver
from unison.strategies import MultiWorkerMirroredStrategy

TWO = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "TF_CONFIG must be JSON"),
        pytest.param("[" * 100_000, "TF_CONFIG must be JSON", id="nested"),
        ("[]", "TF_CONFIG must be JSON"),
        ({"cluster": []}, "TF_CONFIG must be JSON"),
        ({"task": 3}, "TF_CONFIG must be JSON"),
        ({"task": {"type": "worker", "index": 0}}, "Received a task without a cluster"),
        ({"cluster": TWO, "task": {"type": 1, "index": 0}}, "Received: task type '1'"),
        ({"cluster": TWO, "task": {"type": [], "index": 0}}, r"a task whose type is \[\]"),
        ({"cluster": TWO, "task": {"type": "worker", "index": "x"}}, "a task whose index is 'x'"),
        ({"cluster": TWO, "task": {"type": "worker", "index": 0.5}}, "a task whose index is 0.5"),
        ({"cluster": TWO, "task": {"type": "worker", "index": -1}}, "a task whose index is -1"),
        ({"cluster": TWO, "task": {"type": "worker", "index": True}}, "a task whose index is True"),
        ({"cluster": {"worker": "a:1"}}, "TF_CONFIG: The tasks of job 'worker' must be a list"),
        ({"cluster": {"worker": [1]}}, "TF_CONFIG: The address of a task of job 'worker' must be"),
        ({"cluster": {"worker": {"x": "a:1"}}}, "'worker' must be an integer. Received: 'x'"),
        ({"cluster": TWO}, "Received: task type None. Correct `task` in TF_CONFIG"),
        ({"cluster": TWO, "task": {"type": "worker"}}, "task type 'worker', index None. Correct"),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": 2}},
            "'worker', index 2. Correct",
        ),
        ({"cluster": TWO, "task": {"type": "chief", "index": 0}}, "type 'chief', index 0. Correct"),
        ({"cluster": TWO, "task": {"type": "boss", "index": 0}}, "task type 'boss'. Correct"),
        ({"cluster": {"worker": []}}, "at least one task of job 'worker'. Received: none"),
        ({"cluster": {"boss": ["a:1"]}}, "the jobs to be some of .* Received: 'boss'. Correct"),
        ({"cluster": {"chief": ["a:1", "b:1"]}}, "at most one task of job 'chief'. Received: 2"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "worker 0 and worker 1 have: 'a:1'. Correct"),
        ({"cluster": {"chief": ["a:1"], "worker": ["a:1"]}}, "chief 0 and worker 0 have: 'a:1'"),
    ],
)
def test_a_defect_of_the_configuration_is_named(monkeypatch, config, said):
    monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ValueError, match=said):
        MultiWorkerMirroredStrategy()


@pytest.mark.parametrize(
    "address", ["a", "a:", ":1", "a:b", "a:0", "a:65536", "::1:80", "http://a:1", "a b:1", ""]
)
def test_an_address_has_a_host_and_a_port(address):
    said = r"address of worker 1 to be host:port, with a port from 1 to 65535. Received"
    with pytest.raises(ValueError, match=said) as caught:
        check_cluster(ClusterSpec({"worker": ["a:1", address]}), "worker", 0)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[::1]:80", "a-b.c_d:9"])
def test_names_and_addresses_of_both_kinds_are_taken(address):
    check_cluster(ClusterSpec({"worker": [address, "other:1"]}), "worker", 0)


def test_a_cluster_has_no_protocol_buffer_and_says_what_to_use():
    cluster = ClusterSpec({"worker": ["localhost:1"]})
    with pytest.raises(NotImplementedError, match=r"as_dict\(\).*ClusterSpec\("):
        cluster.as_cluster_def()


def test_a_type_of_task_that_is_a_number_is_read_as_text(monkeypatch):
    config = {"cluster": {"7": ["localhost:1"]}, "task": {"type": 7, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert TFConfigClusterResolver().task_type == "7"


@pytest.mark.parametrize("kind", [1.5, True, ["worker"]])
def test_another_type_of_task_is_an_error(monkeypatch, kind):
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": kind, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="task whose type is"):
        TFConfigClusterResolver()


def test_an_index_may_be_text(monkeypatch):
    config = {"cluster": TWO, "task": {"type": "worker", "index": "1"}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert TFConfigClusterResolver().task_id == 1


@pytest.mark.parametrize(
    ("task_type", "task_id", "jobs", "is_chief"),
    [
        (None, None, [], True),
        ("worker", 0, ["worker"], True),
        ("worker", 1, ["worker"], False),
        ("worker", 0, ["chief", "worker"], False),
        ("chief", 0, ["chief", "worker"], True),
        ("evaluator", 0, ["chief", "worker"], True),
        ("ps", 0, ["chief", "ps"], False),
    ],
)
def test_one_process_is_the_chief(task_type, task_id, jobs, is_chief):
    cluster = ClusterSpec({job: [f"{job}:{index}" for index in (1, 2)] for job in jobs})
    resolver = SimpleClusterResolver(cluster, task_type=task_type, task_id=task_id)
    assert resolver.is_chief is is_chief
