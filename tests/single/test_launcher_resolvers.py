"""The resolvers of launchers, with environments as those launchers set them.

They were recorded where the launcher could be run (torchrun, Open MPI, MPICH), and else taken from
the code or the documentation that the resolver's docstring names, without what has no part in it.
"""

import json
import os
import sys
import threading
import types
from typing import NamedTuple

import pytest

import unison
from unison.errors import DeadlineExceededError
from unison.runtime.cluster import check_cluster
from unison.runtime.cluster_resolvers import (
    AutomaticClusterResolver,
    JAXClusterResolver,
    LSFClusterResolver,
    MPIClusterResolver,
    RayTrainClusterResolver,
    SageMakerClusterResolver,
    TorchrunClusterResolver,
    VertexClusterResolver,
    ray_train,
    sagemaker,
)
from unison.runtime.cluster_resolvers.ranks import derived_port


class Found(NamedTuple):
    """What a resolver finds: its name, the first address, how many workers, and which is this."""

    resolver: str
    first: str
    workers: int
    index: int


#: torchrun 2.13 --standalone --nproc-per-node 2.
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "38513",
    "RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "a3587703-d4e3-446b-a5d5-30fd7dc84310",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
TORCHRUN_PORT = derived_port("38513 a3587703-d4e3-446b-a5d5-30fd7dc84310")

#: Kubeflow Trainer's torch runtime, in a pod whose command does not use torchrun.
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "mnist-node-0-0.mnist",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}

#: Kubeflow Trainer's jax-distributed.
KUBEFLOW_JAX = {
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "mnist-node-0-0.mnist:29500",
    "JAX_COORDINATOR_PORT": "29500",
    "JAX_DISTRIBUTED_BACKEND": "gloo",
    "JOB_COMPLETION_INDEX": "1",
}

#: A pod of a JobSet that XPK has created, for MaxText.
XPK = {
    "JAX_COORDINATOR_ADDRESS": "run-slice-job-0-0.run",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
    "PROCESSES_IN_JOB": "4",
    "JAX_PROCESS_COUNT": "8",
}

#: mpirun of Open MPI 5.0.11, on one machine.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-17161@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-vm-17161@0.0;tcp4://127.0.0.1:42049",
    "PRTE_LAUNCHED": "1",
}

#: mpiexec of MPICH 5.0.2, on one machine.
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "n2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "36415",
}

JSRUN = {
    "LSB_JOBID": "1234",
    "LSB_MCPU_HOSTS": "batch5 1 h36n03 42 h36n04 42",
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
}

SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_GPUS": "0",
}

VERTEX_CLUSTER = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": [
        "cmle-training-workerpool1-ab-0:2222",
        "cmle-training-workerpool1-ab-1:2222",
    ],
    "workerpool2": ["cmle-training-workerpool2-ab-0:2222"],
    "workerpool3": ["cmle-training-workerpool3-ab-0:2222"],
}


def vertex(pool, index):
    """Returns the variable of a replica."""
    task = {"type": pool, "index": index, "trial": ""}
    return {
        "CLUSTER_SPEC": json.dumps(
            {"cluster": VERTEX_CLUSTER, "environment": "cloud", "task": task, "job": "{}"}
        )
    }


ENVIRONMENTS = {
    "torchrun": (
        TORCHRUN,
        Found("TorchrunClusterResolver", f"localhost:{TORCHRUN_PORT}", 2, 1),
    ),
    "kubeflow-pytorch-job": (
        {
            "MASTER_ADDR": "job-master-0",
            "MASTER_PORT": "23456",
            "WORLD_SIZE": "3",
            "RANK": "2",
            "PYTHONUNBUFFERED": "1",
            "PET_NNODES": "3",
        },
        Found("TorchrunClusterResolver", "job-master-0:23456", 3, 2),
    ),
    "kubeflow-trainer-torch": (
        PET,
        Found("TorchrunClusterResolver", "mnist-node-0-0.mnist:29400", 2, 1),
    ),
    "torchrun-in-sagemaker": (
        TORCHRUN | SAGEMAKER,
        Found("TorchrunClusterResolver", f"localhost:{TORCHRUN_PORT}", 2, 1),
    ),
    "kubeflow-trainer-jax": (
        KUBEFLOW_JAX,
        Found("JAXClusterResolver", "mnist-node-0-0.mnist:29500", 2, 1),
    ),
    "kubeflow-jax-job": (
        {
            "PYTHONUNBUFFERED": "1",
            "COORDINATOR_PORT": "6666",
            "COORDINATOR_ADDRESS": "jaxjob-simple-worker-0",
            "NUM_PROCESSES": "2",
            "PROCESS_ID": "1",
        },
        Found("JAXClusterResolver", "jaxjob-simple-worker-0:6666", 2, 1),
    ),
    "maxtext-in-a-jobset": (
        XPK,
        Found("JAXClusterResolver", "run-slice-job-0-0.run:1234", 8, 6),
    ),
    "maxtext-on-gpus": (
        {
            "JAX_COORDINATOR_IP": "10.0.0.1",
            "JAX_COORDINATOR_PORT": "3389",
            "NNODES": "2",
            "NODE_RANK": "1",
        },
        Found("JAXClusterResolver", "10.0.0.1:3389", 2, 1),
    ),
    "an-address-for-mpirun": (
        MPICH | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:5000"},
        Found("JAXClusterResolver", "[fd00::1]:5000", 2, 1),
    ),
    "open-mpi": (
        OPEN_MPI,
        Found("OpenMPIClusterResolver", f"127.0.0.1:{derived_port('prterun-vm-17161@1')}", 2, 1),
    ),
    "open-mpi-of-several-machines-in-slurm": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_JOB_NODELIST": "n[9-10]"},
        Found("OpenMPIClusterResolver", f"n9:{derived_port('prterun-vm-17161@1')}", 2, 1),
    ),
    "mpich": (
        MPICH,
        Found(
            "MPIClusterResolver", f"127.0.0.1:{derived_port('MPI (MPICH, Intel MPI)    ')}", 2, 1
        ),
    ),
    "horovodrun-in-lsf": (
        HOROVOD | {"LSB_MCPU_HOSTS": "n1 2 n2 2", "LSB_JOBID": "9"},
        Found("MPIClusterResolver", f"n1:{derived_port('Horovod 10.0.0.1 36415   9 ')}", 4, 3),
    ),
    "flux": (
        {
            "FLUX_JOB_ID": "f1",
            "FLUX_JOB_NNODES": "1",
            "FLUX_JOB_SIZE": "2",
            "FLUX_TASK_RANK": "1",
            "FLUX_TASK_LOCAL_ID": "1",
        },
        Found("MPIClusterResolver", f"127.0.0.1:{derived_port('Flux f1    ')}", 2, 1),
    ),
    "jsrun": (
        JSRUN,
        Found("LSFClusterResolver", f"h36n03:{derived_port('LSF 1234')}", 12, 7),
    ),
    "sagemaker": (SAGEMAKER, Found("SageMakerClusterResolver", "algo-1:7777", 2, 1)),
    "vertex": (
        vertex("workerpool1", 1),
        Found("VertexClusterResolver", "cmle-training-workerpool0-ab-0:2222", 3, 2),
    ),
}

#: The beginnings of the names of all variables above.
PREFIXES = ("TF_CONFIG", "SLURM_", "TPU_", "MEGASCALE_", "PBS_", "MV2_", "NODE_RANK", "NNODES")
NAMES = {name for environment, _ in ENVIRONMENTS.values() for name in environment}


@pytest.fixture
def started(monkeypatch):
    """Makes the environment of this process that of a launcher."""
    for name in [*NAMES, *(name for name in os.environ if name.startswith(PREFIXES))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def start(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return start


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_the_job_of_a_launcher_is_found(launcher, started):
    environment, expected = ENVIRONMENTS[launcher]
    started(environment)
    resolver = AutomaticClusterResolver()
    cluster = resolver.cluster_spec()
    check_cluster(cluster, resolver.task_type, resolver.task_id)
    first = cluster.task_address("worker", 0)
    found = (type(resolver.found).__name__, first, cluster.num_tasks("worker"), resolver.task_id)
    assert Found(*found) == expected


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_the_first_process_finds_the_same_cluster(launcher, started):
    environment, _ = ENVIRONMENTS[launcher]
    if launcher in ("sagemaker", "vertex"):
        first = {"SM_CURRENT_HOST": "algo-1"} | vertex("workerpool0", 0)
        first = {name: first[name] for name in first.keys() & environment.keys()}
    else:
        local = ("LOCAL_RANK", "LOCALRANKID", "LOCAL_ID")
        places = ("RANK", "PROCESS_ID", "JOB_INDEX", "JOB_COMPLETION_INDEX", *local)
        first = {name: "0" for name in environment if name.endswith(places)}
    started(environment)
    cluster = AutomaticClusterResolver().cluster_spec()
    started(first)
    resolver = AutomaticClusterResolver()
    assert (resolver.cluster_spec(), resolver.task_id) == (cluster, 0)


def test_the_processes_of_a_machine_share_its_gpus(started):
    started(TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    TorchrunClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_the_devices_of_jax_are_not_divided_again(started):
    started(TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5", "JAX_LOCAL_DEVICE_IDS": "1"})
    TorchrunClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


class WorkerOfRayTrain:
    """Ray's modules as a worker sees them; the real ones are in `tests/soak/test_ray_train.py`."""

    def __init__(self, rank, patch, told=None, gpus=()):
        self.rank, self.told, self.gpus = rank, told, gpus
        names = ("ray", "ray.train", "ray.train.collective")
        ray, train, collective = (types.ModuleType(name) for name in names)
        ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        ray.get_gpu_ids = lambda: self.gpus
        train.get_context = lambda: self
        collective.broadcast_from_rank_zero = self.broadcast
        for module in (ray, train, collective):
            patch.setitem(sys.modules, module.__name__, module)

    def get_world_rank(self):
        return self.rank

    def get_world_size(self):
        return 2

    def get_local_rank(self):
        return 0

    def get_local_world_size(self):
        return 1

    def broadcast(self, told):
        self.told = self.told or told
        return self.told


def test_the_first_worker_of_ray_train_tells_the_others_where_to_meet(started, monkeypatch):
    started({"UNISON_KEY": ""})
    worker = WorkerOfRayTrain(0, monkeypatch)
    first = AutomaticClusterResolver()
    assert isinstance(first.found, RayTrainClusterResolver)
    own_key = os.environ["UNISON_KEY"]
    assert own_key == worker.told["key"]
    started({"UNISON_KEY": ""})
    WorkerOfRayTrain(1, monkeypatch, worker.told)
    second = AutomaticClusterResolver()
    assert (first.task_id, second.task_id) == (0, 1)
    assert first.cluster_spec() == second.cluster_spec()
    assert first.cluster_spec().task_address("worker", 0).startswith("127.0.0.1:")
    assert os.environ["UNISON_KEY"] == own_key


def test_ray_train_is_asked_before_the_variables_that_it_sets_for_torch(started, monkeypatch):
    started(TORCHRUN)
    WorkerOfRayTrain(1, monkeypatch, {"host": "10.0.0.1", "port": 5000, "key": "ab" * 32})
    found = AutomaticClusterResolver()
    assert found.environment == "ray-train"
    assert found.cluster_spec().task_address("worker", 0) == "10.0.0.1:5000"


def test_a_worker_of_ray_train_takes_the_gpus_that_ray_has_given_to_it(started, monkeypatch):
    started({"CUDA_VISIBLE_DEVICES": "0,1"})  # TorchTrainer's, for both workers of a node
    WorkerOfRayTrain(1, monkeypatch, {"host": "10.0.0.1", "port": 5000, "key": None}, [1])
    AutomaticClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_users_key_is_not_told_to_ray(started, monkeypatch):
    started({"UNISON_KEY": "cd" * 32})
    worker = WorkerOfRayTrain(0, monkeypatch)
    RayTrainClusterResolver()
    assert worker.told["key"] is None
    assert os.environ["UNISON_KEY"] == "cd" * 32


def test_a_worker_of_ray_train_does_not_wait_for_ever(started, monkeypatch):
    started({})
    worker = WorkerOfRayTrain(1, monkeypatch)
    ended = threading.Event()
    worker.broadcast = lambda told: ended.wait(60)
    sys.modules["ray.train.collective"].broadcast_from_rank_zero = worker.broadcast
    monkeypatch.setattr(ray_train, "_TIMEOUT", 0.1)
    try:
        with pytest.raises(DeadlineExceededError, match=r"Not all workers .* within 0\.1 s"):
            AutomaticClusterResolver()
    finally:
        ended.set()


def test_a_strategy_that_ignores_the_workers_of_ray_train_is_refused(started, monkeypatch):
    started({})
    WorkerOfRayTrain(1, monkeypatch)
    with pytest.raises(RuntimeError, match="in process 1 of 2, according to Ray Train"):
        unison.MirroredStrategy()


def test_the_first_version_of_ray_train_is_refused(started, monkeypatch):
    started({})
    WorkerOfRayTrain(1, monkeypatch)
    monkeypatch.delitem(sys.modules, "ray.train.collective")
    monkeypatch.setattr(sys.modules["ray.train"], "__path__", [], raising=False)
    with pytest.raises(RuntimeError, match=r"RAY_TRAIN_V2_ENABLED=1.*ModuleNotFoundError"):
        AutomaticClusterResolver()


def test_outside_of_ray_trains_workers_its_resolver_is_refused(started, monkeypatch):
    started({})
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    assert not RayTrainClusterResolver.is_here()
    with pytest.raises(RuntimeError, match="Expected a worker of Ray Train"):
        RayTrainClusterResolver()


def test_the_hosts_of_sagemaker_are_in_a_file(started, monkeypatch, tmp_path):
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(sagemaker, "_CONFIG", file)
    assert not SageMakerClusterResolver.is_here()
    file.write_text(json.dumps({"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}))
    assert SageMakerClusterResolver.is_here()
    assert SageMakerClusterResolver().task_id == 1


def test_the_launch_node_of_lsf_computes_nothing(started, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("batch\n10.10.10.0\n10.10.10.0\n10.10.10.1\n")
    started(JSRUN | {"LSB_DJOB_RANKFILE": str(hosts)})
    assert LSFClusterResolver(port=5).cluster_spec().task_address("worker", 0) == "10.10.10.0:5"


def test_a_replica_of_the_fourth_pool_of_vertex_is_an_evaluator(started):
    started(vertex("workerpool3", 0))
    resolver = VertexClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("evaluator", 0)
    assert resolver.cluster_spec().num_tasks("worker") == 3


WRONG = {
    "not-torchrun": (TorchrunClusterResolver, {}, RuntimeError, "RANK is not set: torchrun"),
    "torchrun-rank": (
        TorchrunClusterResolver,
        TORCHRUN | {"RANK": "2"},
        ValueError,
        "from 0 to 1, as torchrun has started 2. Received: 2",
    ),
    "torchrun-port": (
        TorchrunClusterResolver,
        TORCHRUN | {"MASTER_PORT": "http"},
        ValueError,
        "Expected a number in MASTER_PORT, which torchrun sets. Received: 'http'",
    ),
    "torchrun-large-port": (
        TorchrunClusterResolver,
        TORCHRUN | {"MASTER_PORT": "70000", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        ValueError,
        "Expected a port from 1 to 65535 from torchrun. Received: 70000",
    ),
    "torchrun-address": (
        TorchrunClusterResolver,
        TORCHRUN | {"MASTER_ADDR": ""},
        RuntimeError,
        "MASTER_ADDR is not set",
    ),
    "jax-nowhere": (JAXClusterResolver, {}, RuntimeError, "to have been called, or an address"),
    "jax-address": (
        JAXClusterResolver,
        KUBEFLOW_JAX | {"JAX_COORDINATOR_ADDRESS": "fd00::1:5000"},
        ValueError,
        "Expected host:port in JAX_COORDINATOR_ADDRESS. Received: 'fd00::1:5000'",
    ),
    "jax-count": (
        JAXClusterResolver,
        KUBEFLOW_JAX | {"JAX_NUM_PROCESSES": ""},
        RuntimeError,
        "Expected JAX_NUM_PROCESSES or JAX_PROCESS_COUNT or NNODES, beside the address",
    ),
    "jax-address-only": (
        JAXClusterResolver,
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        RuntimeError,
        "and JAX_PROCESS_ID or NODE_RANK.*Received: JAX_COORDINATOR_ADDRESS=a:1",
    ),
    "jax-index": (
        JAXClusterResolver,
        KUBEFLOW_JAX | {"JAX_PROCESS_ID": "-1"},
        ValueError,
        "Expected a number in JAX_PROCESS_ID",
    ),
    "not-mpi": (MPIClusterResolver, {}, RuntimeError, "no MPI launcher has started this process"),
    "mpich-of-several-machines": (
        MPIClusterResolver,
        MPICH | {"MPI_LOCALNRANKS": "1"},
        RuntimeError,
        "does not provide the address of rank 0.*Set JAX_COORDINATOR_ADDRESS",
    ),
    "mpich-size": (
        MPIClusterResolver,
        MPICH | {"PMI_SIZE": "two"},
        ValueError,
        "Expected a number in PMI_SIZE",
    ),
    "not-jsrun": (LSFClusterResolver, {}, RuntimeError, "JSM_NAMESPACE_RANK is not set: jsrun"),
    "jsrun-hosts": (
        LSFClusterResolver,
        JSRUN | {"LSB_MCPU_HOSTS": "a b"},
        ValueError,
        "hosts and numbers of slots in LSB_MCPU_HOSTS, such as 'a 4 b 4'. Received: 'a b'",
    ),
    "jsrun-without-hosts": (
        LSFClusterResolver,
        JSRUN | {"LSB_MCPU_HOSTS": ""},
        RuntimeError,
        "LSB_DJOB_RANKFILE or LSB_MCPU_HOSTS",
    ),
    "not-sagemaker": (SageMakerClusterResolver, {}, RuntimeError, "SM_HOSTS is not set"),
    "sagemaker-json": (
        SageMakerClusterResolver,
        SAGEMAKER | {"SM_HOSTS": "algo-1,algo-2"},
        ValueError,
        "Expected JSON in SM_HOSTS",
    ),
    "sagemaker-host": (
        SageMakerClusterResolver,
        SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"},
        ValueError,
        "one of them in SM_CURRENT_HOST",
    ),
    "not-vertex": (VertexClusterResolver, {}, RuntimeError, "CLUSTER_SPEC is not set"),
    "vertex-json": (
        VertexClusterResolver,
        {"CLUSTER_SPEC": "{"},
        ValueError,
        "Expected CLUSTER_SPEC to be JSON such as",
    ),
    "vertex-index": (
        VertexClusterResolver,
        vertex("workerpool1", 2),
        ValueError,
        "the task is not in the cluster",
    ),
    "vertex-reduction-server": (
        VertexClusterResolver,
        vertex("workerpool2", 0),
        RuntimeError,
        "Received: 'workerpool2'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_description_that_is_wrong_is_refused(case, started):
    resolver, environment, error, message = WRONG[case]
    started(environment)
    with pytest.raises(error, match=message):
        resolver()


def test_another_programs_variable_of_the_same_name_is_no_job(started):
    started({"CLUSTER_SPEC": "prod", "NNODES": "3", "WORLD_SIZE": "2", "RANK": "0"})
    assert AutomaticClusterResolver().found is None
