"""Resolvers read their clusters from Slurm, Kubernetes, Google's compute engine and each other."""

import io
import os
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import (
    AutomaticClusterResolver,
    CloudTPUClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesJobClusterResolver,
    OpenMPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    UnionClusterResolver,
    kubernetes_job,
)
from unison.runtime.cluster_resolvers.slurm import expand_hostlist, expand_tasks_per_node

STARTERS = ("SLURM_", "OMPI_", "PMIX_", "TPU_", "MEGASCALE_", "JOB_COMPLETION_INDEX", "TF_CONFIG")


@pytest.fixture
def alone(monkeypatch):
    """Nothing tells who has started this process."""
    for name in [name for name in os.environ if name.startswith(STARTERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    return monkeypatch


@pytest.fixture
def slurm(alone, monkeypatch):
    """Sets the variables of a job step; those that are not given are not there."""

    def set_step(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))

    return set_step


#: The second machine of the second slice of a JobSet on Google Kubernetes Engine.
MEGASCALE = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "job-slice-1-0.job,job-slice-1-1.job",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job",
}

THREE_TASKS = {
    "STEP_NUM_TASKS": 3,
    "STEP_NODELIST": "n[9-10]",
    "STEP_TASKS_PER_NODE": "2,1",
}


def test_the_tasks_of_a_step_are_workers_in_the_order_of_the_nodes(slurm):
    slurm(PROCID=2, **THREE_TASKS)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["n9:8888", "n9:8889", "n10:8888"]}
    assert resolver.get_task_info() == ("worker", 2)
    assert resolver.master() == "grpc://n10:8888"


def test_jobs_are_filled_in_the_order_of_their_names(slurm):
    slurm(PROCID=1, **THREE_TASKS)
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1}, port_base=10, rpc_layer=None)
    assert resolver.cluster_spec().as_dict() == {"ps": ["n9:10"], "worker": ["n9:11", "n10:10"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


@pytest.mark.parametrize("tasks", [2, {"a": 2, "b": 2}])
def test_the_tasks_of_nodes_can_be_given(slurm, tasks):
    slurm(PROCID=0, STEP_NUM_TASKS=4, STEP_NODELIST="a,b")
    cluster = SlurmClusterResolver(tasks_per_node=tasks).cluster_spec()
    assert cluster.as_dict() == {"worker": ["a:8888", "a:8889", "b:8888", "b:8889"]}


def test_a_task_sees_its_own_gpus(slurm, monkeypatch):
    slurm(PROCID=1, **THREE_TASKS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    resolver = SlurmClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 2}
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("visible", "own"), [("4,5,6,7", "6,7"), ("GPU-a,GPU-b", "GPU-b"), ("", "2,3")]
)
def test_a_task_sees_its_own_of_the_gpus_that_slurm_has_allocated(slurm, monkeypatch, visible, own):
    slurm(PROCID=1, **THREE_TASKS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    resolver = SlurmClusterResolver(gpus_per_node=None if visible else 4)
    resolver.cluster_spec()
    resolver.cluster_spec()  # a second time: the variable is its own by now
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_more_gpus_than_there_are_cannot_be_had(slurm):
    slurm(PROCID=0, **THREE_TASKS)
    with pytest.raises(RuntimeError, match=r"2 tasks of a node need 2 GPUs each. The node has: 3"):
        SlurmClusterResolver(gpus_per_node=3, gpus_per_task=2)


def test_the_jobs_must_have_as_many_tasks_as_the_step(slurm):
    slurm(PROCID=0, **THREE_TASKS)
    with pytest.raises(RuntimeError, match="have 2 tasks, and Slurm has started 3"):
        SlurmClusterResolver({"worker": 2})


def test_outside_a_step_the_missing_variable_is_named(slurm):
    with pytest.raises(RuntimeError, match=r"SLURM_PROCID is not set.*srun"):
        SlurmClusterResolver()


@pytest.mark.parametrize("text", ["n[1-2", "n]", ",n1", "n[a]", "n[1-2-3]"])
def test_a_list_of_nodes_that_is_none_is_quoted(text):
    with pytest.raises(ValueError, match="Received"):
        expand_hostlist(text)


def test_numbers_of_tasks_that_are_none_are_quoted():
    with pytest.raises(ValueError, match=r"3\(x2\),1. Received: '2\(2\)'"):
        expand_tasks_per_node("2(2)")


def pod(name, address, phase="Running"):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, host_ip=address)
    )


class Pods:
    """A client of Kubernetes that knows some pods by their label."""

    def __init__(self, by_label):
        self._by_label = by_label

    def list_pod_for_all_namespaces(self, label_selector):
        return SimpleNamespace(items=self._by_label[label_selector])


def test_pods_are_tasks_in_the_order_of_selectors_and_names():
    client = Pods(
        {"a": [pod("a2", "10.0.0.2"), pod("a1", "10.0.0.1")], "b": [pod("b", "10.0.0.3")]}
    )
    resolver = KubernetesClusterResolver({"worker": ["a", "b"]}, 99, override_client=client)
    expected = {"worker": ["10.0.0.1:99", "10.0.0.2:99", "10.0.0.3:99"]}
    assert resolver.cluster_spec().as_dict() == expected
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "grpc://10.0.0.3:99"


def test_a_pod_that_does_not_run_is_named():
    client = Pods({"job-name=tensorflow": [pod("late", "10.0.0.1", "Pending")]})
    with pytest.raises(RuntimeError, match=r"'late' must be running. Its phase: Pending"):
        KubernetesClusterResolver(override_client=client).cluster_spec()


def test_kubernetes_takes_its_package():
    with pytest.raises(ImportError, match=r"pip install 'unison\[k8s\]'"):
        KubernetesClusterResolver()


class Request:
    def __init__(self, response):
        self._response = response

    def execute(self):
        return self._response


class Compute:
    """Google's compute API with three instances, which it lists in two pages."""

    def __init__(self):
        self.addresses = {"one": "10.0.0.3", "two": "10.0.0.1", "three": "10.0.0.2"}

    def instanceGroups(self):  # noqa: N802
        return self

    def instances(self):
        return self

    def listInstances(self, project, zone, instanceGroup, body, orderBy):  # noqa: N802, N803
        assert (project, zone, instanceGroup) == ("project", "zone", "group")
        assert body == {"instanceState": "RUNNING"}
        return Request({"items": [{"instance": "https://x/one"}, {"instance": "https://x/two"}]})

    def listInstances_next(self, previous_request, previous_response):  # noqa: N802
        last_page = {"items": [{"instance": "https://x/three"}]}
        return None if previous_response == last_page else Request(last_page)

    def get(self, project, zone, instance):
        return Request({"networkInterfaces": [{"networkIP": self.addresses[instance]}]})


def test_instances_are_tasks_in_the_order_of_their_addresses():
    resolver = GCEClusterResolver("project", "zone", "group", 80, task_id=1, service=Compute())
    expected = {"worker": ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]}
    assert resolver.cluster_spec().as_dict() == expected
    assert resolver.master() == "grpc://10.0.0.2:80"


def test_google_takes_its_package():
    with pytest.raises(ImportError, match="pip install google-api-python-client"):
        GCEClusterResolver("project", "zone", "group", 80)


def simple(cluster, **task):
    return SimpleClusterResolver(ClusterSpec(cluster), **task)


def test_a_union_joins_jobs_and_asks_the_first_for_the_rest():
    first = simple({"worker": ["a:1"]}, task_type="worker", task_id=0, num_accelerators={"GPU": 2})
    union = UnionClusterResolver(first, simple({"worker": ["b:1"], "ps": ["c:1"]}))
    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
    assert (union.task_type, union.task_id) == ("worker", 0)
    assert union.num_accelerators() == {"GPU": 2}
    assert UnionClusterResolver(first, task_id=3).task_id == 3


def test_a_union_of_indexed_tasks_takes_each_index_once():
    indexed = simple({"worker": {2: "c:1"}})
    union = UnionClusterResolver(simple({"worker": ["a:1"]}), indexed)
    assert union.cluster_spec().as_dict() == {"worker": {0: "a:1", 2: "c:1"}}
    with pytest.raises(KeyError, match=r"Tasks \[2\] of job 'worker'"):
        UnionClusterResolver(indexed, indexed).cluster_spec()


def test_a_union_takes_resolvers():
    with pytest.raises(ValueError, match="at least one"):
        UnionClusterResolver()
    with pytest.raises(TypeError, match="Expected cluster resolvers"):
        UnionClusterResolver({"worker": ["a:1"]})


def set_mpi(monkeypatch, rank, size, local_rank=None, local_size=None, **others):
    given = {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank if local_rank is None else local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": size if local_size is None else local_size,
        "PMIX_NAMESPACE": "380502017",
        **others,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


def test_the_ranks_of_one_machine_meet_at_the_loopback_address(alone):
    set_mpi(alone, 1, 3)
    resolver = OpenMPIClusterResolver(port=5000)
    expected = {"worker": ["127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5002"]}
    assert resolver.cluster_spec().as_dict() == expected
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_the_ports_of_ranks_follow_from_their_job(alone):
    set_mpi(alone, 0, 2)
    first = OpenMPIClusterResolver().cluster_spec()
    set_mpi(alone, 1, 2)
    assert OpenMPIClusterResolver().cluster_spec() == first
    alone.setenv("PMIX_NAMESPACE", "another")
    assert OpenMPIClusterResolver().cluster_spec() != first


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1"),
        ("1314521088.0;tcp6://[fe80::b9b,2620::2]:43370", "[fe80::b9b]"),
    ],
)
def test_the_ranks_of_several_machines_meet_at_that_of_mpirun(alone, uri, host):
    set_mpi(alone, 1, 2, 0, 1, OMPI_MCA_orte_hnp_uri=uri)
    addresses = OpenMPIClusterResolver(port=5000).cluster_spec().as_dict()["worker"]
    assert addresses == [f"{host}:5000", "rank-1:5001"]


def test_where_rank_0_is_not_known_it_must_be_given(alone):
    set_mpi(alone, 1, 2, 0, 1)
    with pytest.raises(RuntimeError, match=r"Pass the address.*host="):
        OpenMPIClusterResolver()
    cluster = OpenMPIClusterResolver(host="first", port=5000).cluster_spec()
    assert cluster.task_address("worker", 0) == "first:5000"


def test_the_ranks_of_a_machine_share_its_gpus(alone):
    set_mpi(alone, 3, 4, 1, 2, OMPI_MCA_orte_hnp_uri="1.0;tcp://10.0.0.1:1")
    alone.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    OpenMPIClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_outside_of_mpirun_the_missing_variable_is_named(alone):
    with pytest.raises(RuntimeError, match=r"OMPI_COMM_WORLD_RANK is not set.*mpirun"):
        OpenMPIClusterResolver()


def test_the_machines_of_a_tpu_slice_are_workers(alone):
    alone.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1")
    alone.setenv("TPU_WORKER_ID", "1")
    resolver = CloudTPUClusterResolver(port=9)
    assert resolver.cluster_spec().as_dict() == {"worker": ["t-0:9", "t-1:9"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    alone.setenv("TPU_PROCESS_ADDRESSES", "u-0:8471,u-1:8471")
    assert CloudTPUClusterResolver().cluster_spec().task_address("worker", 1) == "u-1:8476"


@pytest.mark.parametrize("machines", ["10.0.0.1,10.0.0.2", "a:0:10.0.0.1,b:1:10.0.0.2"])
def test_the_machines_of_a_tpu_slice_are_asked_for(alone, machines):
    told = {"agent-worker-number": "1", "worker-network-endpoints": machines}

    def answer(request, timeout):
        assert request.headers == {"Metadata-flavor": "Google"}
        return io.BytesIO(told[request.full_url.rpartition("/")[2]].encode())

    alone.setattr(urllib.request, "urlopen", answer)
    resolver = CloudTPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}
    assert resolver.task_id == 1


def test_the_machines_of_all_slices_are_workers(alone):
    for name, value in MEGASCALE.items():
        alone.setenv(name, value)
    resolver = CloudTPUClusterResolver(port=9)
    hosts = ["job-slice-0-0.job", "slice-0-host-1", "slice-1-host-0", "slice-1-host-1"]
    assert resolver.cluster_spec().as_dict() == {"worker": [f"{host}:9" for host in hosts]}
    assert resolver.task_id == 3


def test_the_slices_of_queued_resources_are_asked_for(alone):
    alone.delenv("TPU_SKIP_MDS_QUERY")
    told = {
        "agent-worker-number": "1",
        "worker-network-endpoints": "10.0.0.3,10.0.0.4",
        "tpu-env": "ACCELERATOR_TYPE: 'v5e-16'\nMEGASCALE_NUM_SLICES: '2'\n"
        "MEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'\n",
    }
    alone.setattr(
        urllib.request,
        "urlopen",
        lambda request, timeout: io.BytesIO(
            told[request.full_url.rpartition("/")[2]].encode(),
        ),
    )
    resolver = CloudTPUClusterResolver(port=9)
    assert resolver.cluster_spec().task_address("worker", 0) == "10.0.0.1:9"
    assert (resolver.cluster_spec().num_tasks("worker"), resolver.task_id) == (4, 3)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("MEGASCALE_SLICE_ID", None, RuntimeError, "Expected MEGASCALE_SLICE_ID, as there are 2"),
        ("MEGASCALE_SLICE_ID", "2", ValueError, "MEGASCALE_SLICE_ID to be below 2"),
        ("MEGASCALE_NUM_SLICES", "two", ValueError, "a number in MEGASCALE_NUM_SLICES"),
        ("MEGASCALE_COORDINATOR_ADDRESS", None, RuntimeError, "MEGASCALE_COORDINATOR_ADDRESS"),
        ("TPU_WORKER_ID", "2", ValueError, "from 0 to 1. Received: 2"),
        ("TPU_WORKER_ID", "one", ValueError, "a number in TPU_WORKER_ID"),
    ],
)
def test_a_slice_that_is_described_wrongly_is_refused(alone, name, value, error, message):
    for each, given in (MEGASCALE | {name: value}).items():
        if given is not None:
            alone.setenv(each, given)
    with pytest.raises(error, match=message):
        CloudTPUClusterResolver()


def test_elsewhere_there_is_no_tpu_slice(alone):
    def answer(request, timeout):
        raise urllib.error.URLError("no such host")

    alone.setattr(urllib.request, "urlopen", answer)
    with pytest.raises(RuntimeError, match="does not belong to a Cloud TPU slice"):
        CloudTPUClusterResolver()
    assert not CloudTPUClusterResolver.is_here()


@pytest.fixture
def pod_of_a_job(alone):
    alone.setenv("JOB_COMPLETION_INDEX", "2")
    alone.setattr(socket, "getfqdn", lambda: "train-2.mnist.default.svc.cluster.local")
    return alone


def test_the_pods_of_an_indexed_job_are_workers(pod_of_a_job):
    resolver = KubernetesJobClusterResolver(workers=3, port=9)
    service = "mnist.default.svc.cluster.local"
    expected = [f"train-{index}.{service}:9" for index in range(3)]
    assert resolver.cluster_spec().as_dict() == {"worker": expected}
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)


def test_kubernetes_tells_how_many_pods_a_job_has(pod_of_a_job, tmp_path):
    class Jobs:
        def read_namespaced_job(self, name, namespace):
            assert (name, namespace) == ("train", "default")
            return SimpleNamespace(spec=SimpleNamespace(completions=4))

    (tmp_path / "namespace").write_text("default\n")
    pod_of_a_job.setattr(kubernetes_job, "_NAMESPACE", tmp_path / "namespace")
    assert (
        KubernetesJobClusterResolver(override_client=Jobs()).cluster_spec().num_tasks("worker") == 4
    )
    with pytest.raises(ImportError, match=r"pip install 'unison\[k8s\]', or pass workers"):
        KubernetesJobClusterResolver()


def test_the_pods_of_a_replicated_job_are_workers_of_one_cluster(alone, tmp_path):
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-replicas": "2",
        "jobset.sigs.k8s.io/job-index": "1",
    }

    class Jobs:
        def read_namespaced_job(self, name, namespace):
            assert name == "set-workers-1"
            metadata = SimpleNamespace(labels=labels)
            return SimpleNamespace(metadata=metadata, spec=SimpleNamespace(completions=2))

    (tmp_path / "namespace").write_text("default\n")
    alone.setattr(kubernetes_job, "_NAMESPACE", tmp_path / "namespace")
    alone.setenv("JOB_COMPLETION_INDEX", "0")
    alone.setattr(socket, "getfqdn", lambda: "set-workers-1-0.set.default.svc.cluster.local")
    resolver = KubernetesJobClusterResolver(override_client=Jobs(), port=9)
    service = "set.default.svc.cluster.local"
    assert resolver.cluster_spec().as_dict()["worker"] == [
        f"set-workers-{job}-{pod}.{service}:9" for job in range(2) for pod in range(2)
    ]
    assert resolver.task_id == 2
    labels["jobset.sigs.k8s.io/job-index"] = "one"
    with pytest.raises(ValueError, match="Expected numbers in the labels of job 'set-workers-1'"):
        KubernetesJobClusterResolver(override_client=Jobs())


def test_a_job_needs_indices_and_a_service(alone):
    with pytest.raises(RuntimeError, match="completionMode: Indexed"):
        KubernetesJobClusterResolver(workers=2)
    alone.setenv("JOB_COMPLETION_INDEX", "0")
    alone.setattr(socket, "getfqdn", lambda: "train-0")
    with pytest.raises(RuntimeError, match="headless service as its subdomain"):
        KubernetesJobClusterResolver(workers=2)


def test_a_process_that_nothing_has_started_trains_alone(alone):
    resolver = AutomaticClusterResolver()
    assert resolver.found is None
    assert resolver.cluster_spec().as_dict() == {}
    assert resolver.is_chief


def test_what_has_started_a_process_is_found(alone):
    def found():
        resolver = AutomaticClusterResolver()
        return type(resolver.found).__name__, resolver.task_id

    alone.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1")
    alone.setenv("TPU_WORKER_ID", "1")
    assert found() == ("CloudTPUClusterResolver", 1)
    for name, value in {**THREE_TASKS, "PROCID": 2}.items():
        alone.setenv(f"SLURM_{name}", str(value))
    assert found() == ("SlurmClusterResolver", 2)
    set_mpi(alone, 3, 4)
    assert found() == ("OpenMPIClusterResolver", 3)
    alone.setenv(
        "TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    )
    assert found() == ("TFConfigClusterResolver", 0)
