"""A process that was started as one of several trains alone only where it was told to.

The environments are as the launchers set them, without what has no part in it.
"""

import json

import jax
import pytest

import unison
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers import (
    AutomaticClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from unison.runtime.cluster_resolvers.launchers import launched_among_others

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "5",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}

#: What a task of `srun -n 4` finds.
STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NAME": "train.sh",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
}

#: One process, its environment, and: what has started it, of how many, and as which.
SEVERAL = {
    "torchrun": (TORCHRUN, ("torchrun", 8, 5)),
    "kubeflow-pytorch": (
        {"MASTER_ADDR": "job-master-0", "WORLD_SIZE": "3", "RANK": "0", "PET_NNODES": "3"},
        ("torchrun", 3, 0),
    ),
    "jax": (
        {
            "JAX_COORDINATOR_ADDRESS": "job-0.job:1234",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
        },
        ("JAX's variables", 2, 1),
    ),
    "jax-without-numbers": (
        {"JAX_COORDINATOR_ADDRESS": "job-0.job:1234"},
        ("JAX's variables", None, None),
    ),
    "open-mpi": (
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "PMIX_RANK": "3",
            "PMIX_NAMESPACE": "prterun-1",
        },
        ("Open MPI", 4, 3),
    ),
    "open-mpi-in-a-step-of-one-task": (
        STEP
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
        | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        ("Open MPI", 4, 0),
    ),
    "mpich": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ("MPI (MPICH, Intel MPI)", 2, 1),
    ),
    "mvapich": (
        {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
        ("MVAPICH", 2, 0),
    ),
    "pmix": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}, ("MPI (PMIx)", None, 1)),
    "horovod": (
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "0"},
        ("Horovod", 4, 0),
    ),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "4"}, ("jsrun", 6, 4)),
    "flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, ("Flux", 2, 1)),
    "srun": (STEP, ("srun", 4, 2)),
    "tf-config": (
        {
            "TF_CONFIG": json.dumps(
                {"cluster": CLUSTER | {"ps": ["d:1"]}, "task": {"type": "worker", "index": "1"}}
            )
        },
        ("TF_CONFIG", 3, 2),
    ),
    "tf-config-without-a-task": (
        {"TF_CONFIG": json.dumps({"cluster": CLUSTER})},
        ("TF_CONFIG", 3, None),
    ),
    "sagemaker": (
        {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"},
        ("SageMaker", 2, 1),
    ),
    "vertex": (
        {
            "CLUSTER_SPEC": json.dumps(
                {
                    "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]},
                    "environment": "cloud",
                    "task": {"type": "workerpool1", "index": 0},
                }
            )
        },
        ("Vertex AI", 3, None),
    ),
    "cloud-tpu": (
        {"TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3", "TPU_WORKER_ID": "3"},
        ("a Cloud TPU slice", 4, 3),
    ),
    "slices": (
        {
            "TPU_WORKER_HOSTNAMES": "t-0,t-1",
            "TPU_WORKER_ID": "1",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
        },
        ("a Cloud TPU slice", 4, 3),
    ),
    "kubeflow-jax-job": (
        {"COORDINATOR_ADDRESS": "job-worker-0", "NUM_PROCESSES": "2", "PROCESS_ID": "1"},
        ("Kubeflow's JAXJob", 2, 1),
    ),
    "kubeflow-trainer-without-torchrun": (
        {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_NNODES": "2", "PET_NODE_RANK": "1"},
        ("torchrun", 2, 1),
    ),
    "indexed-job": ({"JOB_COMPLETION_INDEX": "2"}, ("an indexed Kubernetes job", None, 2)),
}


@pytest.mark.parametrize("launcher", SEVERAL)
def test_a_process_knows_by_what_it_was_started_among_others(launcher):
    environment, expected = SEVERAL[launcher]
    found = launched_among_others(environment)
    assert (found.launcher, found.count, found.place) == expected
    assert found.variables.items() <= environment.items()


#: `sbatch --ntasks=4`: the script itself runs once.
BATCH_SCRIPT = {
    name: value for name, value in STEP.items() if "STEP" not in name and "SRUN" not in name
} | {"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)", "ENVIRONMENT": "BATCH"}

ALONE = {
    "nothing": {},
    "a-batch-script-of-several-tasks": BATCH_SCRIPT,
    "the-shell-of-salloc": BATCH_SCRIPT | {"SLURM_JOB_NAME": "interactive"},
    "the-shell-of-salloc-in-a-step": STEP
    | {"SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
    "srun-pty-bash": STEP | {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "0"},
    "a-step-of-one-task": STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "an-element-of-a-job-array": BATCH_SCRIPT | {"SLURM_ARRAY_TASK_ID": "7"},
    "torchrun-of-one": TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    "names-that-could-be-anybodys": {"RANK": "3", "WORLD_SIZE": "8"},
    "mpirun-of-one": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "jax-of-one": {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1"},
    "slots-of-lsf": {"LSB_DJOB_NUMPROC": "8", "LSB_JOBID": "4"},
    "an-evaluator": {
        "TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}})
    },
    "a-cluster-of-one": {
        "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}})
    },
    "no-json": {"TF_CONFIG": "{", "SM_HOSTS": "[", "CLUSTER_SPEC": "here"},
    "other-json": {"TF_CONFIG": "[1, 2]", "SM_HOSTS": "3", "CLUSTER_SPEC": '{"cluster": 2}'},
    "sagemaker-of-one": {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    "vertex-of-one": {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:2222"]}}'},
    "a-tpu-of-one-machine": {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    "the-first-pod-of-an-indexed-job": {"JOB_COMPLETION_INDEX": "0"},
    "pytest-xdist": {"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "4"},
    "numbers-that-are-none": TORCHRUN | {"WORLD_SIZE": "many"},
}


@pytest.mark.parametrize("case", ALONE)
def test_where_nothing_says_so_for_certain_a_process_is_alone(case):
    assert launched_among_others(ALONE[case]) is None


#: A launcher that states neither the number of processes nor the address of the first.
UNKNOWN = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}

IGNORING = {
    "MirroredStrategy": unison.MirroredStrategy,
    "MultiWorkerMirroredStrategy": unison.MultiWorkerMirroredStrategy,
    "CentralStorageStrategy": unison.CentralStorageStrategy,
    "ModelParallelStrategy": lambda: unison.ModelParallelStrategy(mesh={"batch": 2, "model": 2}),
}


@pytest.fixture
def environment(monkeypatch):
    """Sets environment variables, for the test."""
    monkeypatch.delenv("UNISON_ALONE", raising=False)

    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("name", IGNORING)
def test_a_strategy_that_would_ignore_the_others_is_refused_by_what_was_found(name, environment):
    environment(UNKNOWN)
    with pytest.raises(RuntimeError) as refused:
        IGNORING[name]()
    message = str(refused.value)
    assert message.startswith("Expected a strategy that trains with the other processes")
    assert f"Received: {name}" in message
    assert "process 1 of several, according to MPI (PMIx) (PMIX_RANK=1)" in message
    remedy = "set JAX_COORDINATOR_ADDRESS" if "Worker" in name else "Use MultiWorkerMirrored"
    assert remedy in message
    assert "UNISON_ALONE=1" in message


def test_a_worker_of_a_fixed_job_is_told_of_the_strategy_for_several(environment):
    task = {"type": "worker", "index": 0}
    environment({"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": task})})
    with pytest.raises(RuntimeError, match="Use MultiWorkerMirroredStrategy, which finds"):
        unison.MirroredStrategy()


def test_a_worker_of_an_elastic_job_is_told_of_the_strategy_for_several(environment):
    environment({"UNISON_ELASTIC": "{}"})
    with pytest.raises(RuntimeError, match="one of several, according to unison run --min-workers"):
        unison.MirroredStrategy()


def test_devices_that_are_named_do_not_say_that_there_are_no_others(environment):
    environment(STEP)
    with pytest.raises(RuntimeError, match="process 2 of 4, according to srun"):
        unison.MirroredStrategy(["CPU:0"])


@pytest.mark.parametrize(
    ("resolver", "variables"),
    [(AutomaticClusterResolver, "UNKNOWN"), (TFConfigClusterResolver, "TORCHRUN")],
)
def test_a_resolver_that_knows_no_others_does_not_say_that_there_are_none(
    resolver, variables, environment
):
    environment(globals()[variables])
    with pytest.raises(RuntimeError, match=r"process (5 of 8|1 of several)"):
        unison.MultiWorkerMirroredStrategy(resolver())


def test_the_job_of_a_launcher_is_joined(environment):
    environment(TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    # JAX has started in this process: it is too late to join, but the job was found.
    with pytest.raises(RuntimeError, match="A process joins its cluster before JAX starts"):
        unison.MultiWorkerMirroredStrategy()


def test_a_long_variable_is_shown_in_part(environment):
    hosts = {"worker": [f"machine-{index}.example.org:2222" for index in range(100)]}
    environment({"TF_CONFIG": json.dumps({"cluster": hosts})})
    with pytest.raises(RuntimeError) as refused:
        unison.MirroredStrategy()
    assert len(str(refused.value)) < 1000


# -- by itself on purpose --------------------------------------------------------------------


@pytest.mark.parametrize("name", IGNORING)
def test_a_variable_says_that_each_process_trains_its_own_model(name, environment):
    environment({**TORCHRUN, "UNISON_ALONE": "1"})
    assert IGNORING[name]().num_replicas_in_sync > 1


def test_the_variable_takes_no_other_word(environment):
    environment({"UNISON_ALONE": "yes"})
    with pytest.raises(ValueError, match="Expected 0 or 1 for the variable UNISON_ALONE"):
        unison.MirroredStrategy()


def test_one_device_is_what_one_device_strategy_says(environment):
    environment(TORCHRUN)
    assert unison.OneDeviceStrategy("CPU:0").num_replicas_in_sync == 1


@pytest.mark.parametrize("cluster", [{}, {"worker": ["localhost:1"]}])
def test_a_cluster_that_the_program_describes_says_who_there_is(cluster, environment):
    environment(TORCHRUN)
    task = {"task_type": "worker", "task_id": 0} if cluster else {}
    resolver = SimpleClusterResolver(ClusterSpec(cluster), **task)
    strategy = unison.MultiWorkerMirroredStrategy(resolver)
    assert strategy.num_replicas_in_sync == jax.device_count()


def test_an_evaluator_of_any_launcher_is_alone(environment):
    environment(STEP)

    class Resolver(AutomaticClusterResolver):
        def __init__(self):
            self.task_type, self.task_id, self.found = "evaluator", 0, None

    strategy = unison.MultiWorkerMirroredStrategy(Resolver())
    assert strategy.num_replicas_in_sync == jax.device_count()


def test_a_strategy_for_devices_to_compile_for_takes_part_in_no_job(environment):
    environment(TORCHRUN)
    strategy = unison.TPUStrategy(topology="v5e:2x4")
    assert strategy.num_replicas_in_sync == 8
