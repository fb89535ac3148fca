"""What `unison run --env` prints for Kubernetes, JobSet, Kubeflow and KubeRay, and of GPUs."""

import copy
import shlex

import pytest
import yaml

from unison.cli import main

PLACES = ("kubernetes", "jobset", "kubeflow", "kuberay")
OPTIONS = (
    (),
    ("--nodes", "4", "--gpus", "8"),
    ("-n", "3", "--restarts", "2", "--no-monitor", "--devices-per-worker", "2"),
)


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Returns `printed(place, *options)`: the documents of the manifest for a program."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    program = tmp_path / "Train it.py"
    program.touch()

    def print_for(place, *options):
        assert main(["run", "--env", place, *options, str(program), "--epochs", "a 'b'"]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return print_for


def pods_of(place, documents):
    """The specs of the pods of workers, and how many there are of each."""
    [job] = [document for document in documents if document["kind"] != "Service"]
    spec = job["spec"]
    if place == "jobset":
        [replicated] = spec["replicatedJobs"]
        assert replicated["replicas"] == 1
        spec = replicated["template"]["spec"]
    if place in ("kubernetes", "jobset"):
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"]
        return spec["template"]["spec"], spec["parallelism"]
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    return group["template"]["spec"], group["replicas"]


@pytest.mark.parametrize("place", ["kubernetes", "jobset", "kuberay"])
def test_each_pod_is_a_worker_with_all_of_its_gpus(printed, place):
    pod, count = pods_of(place, printed(place, "--nodes", "4", "--gpus", "8"))
    assert count == 4
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    if place != "kuberay":
        assert pod["volumes"] == [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        assert container["volumeMounts"][0]["mountPath"] == "/dev/shm"
    pod, count = pods_of(place, printed(place))
    assert count == 2
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]
    assert "volumes" not in pod


def test_the_pods_of_a_jobset_describe_the_job_as_jax_does(printed):
    [job] = printed("jobset", "--nodes", "4")
    name = job["metadata"]["name"]
    pod, _ = pods_of("jobset", [job])
    environment = {each["name"]: each for each in pod["containers"][0]["env"]}
    # The name of a pod: of the JobSet, its job and that one's index, and the pod's; and a service.
    address = environment["JAX_COORDINATOR_ADDRESS"]["value"]
    assert address == f"{name}-worker-0-0.{name}:8470"
    assert environment["JAX_NUM_PROCESSES"]["value"] == "4"
    index = environment["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert job["spec"]["network"]["enableDNSHostnames"] is True


def test_a_jobset_starts_again_what_is_lost_and_not_what_fails(printed):
    [job] = printed("jobset", "--restarts", "3")
    policy = job["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    [rule] = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    of_job = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert of_job["backoffLimit"] == 0
    [_, failed] = of_job["podFailurePolicy"]["rules"]
    assert failed["action"] == "FailJob"
    assert not {0, 1, 2} & set(failed["onExitCodes"]["values"])
    assert {42, 75, 137, 143} <= set(failed["onExitCodes"]["values"])


@pytest.mark.parametrize("place", ["kubernetes", "jobset"])
def test_what_fails_starts_again_if_asked_for(printed, place):
    options = ["--restarts", "3", "--restarts-on-error"]
    [job] = [document for document in printed(place, *options) if document["kind"] != "Service"]
    of_job = job["spec"]
    if place == "jobset":
        assert of_job["failurePolicy"] == {"maxRestarts": 3}
        of_job = of_job["replicatedJobs"][0]["template"]["spec"]
    assert [rule["action"] for rule in of_job["podFailurePolicy"]["rules"]] == ["Ignore"]
    [cluster] = printed("kuberay", *options)
    assert "--restarts 3 --restarts-on-error " in cluster["spec"]["entrypoint"]


def test_kubeflow_starts_the_program_on_each_node(printed):
    [job] = printed("kubeflow", "--nodes", "4", "--gpus", "8")
    assert job["spec"]["runtimeRef"] == {"name": "jax-distributed"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["command"][-2:]) == (4, ["--epochs", "a 'b'"])
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "UNISON_MONITOR", "value": "1"} in trainer["env"]


def test_kuberay_starts_the_workers_on_its_own_cluster(printed):
    [job] = printed("kuberay", "--nodes", "4", "--gpus", "8", "--restarts", "2", "--no-monitor")
    options = "-n 4 --address auto --gpus-per-worker 8 --restarts 2 --no-monitor"
    assert job["spec"]["entrypoint"].startswith(f"unison run {options} ")
    assert shlex.split(job["spec"]["entrypoint"])[-2:] == ["--epochs", "a 'b'"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0"}  # no worker is placed there


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "GPUs", "restarts"])
def test_the_systems_own_schemas_accept_it(printed, place, options):
    """Needs `pip install kubernetes-validate kubeflow-trainer-api`."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    if place == "kubeflow" and "--restarts" in options:
        pytest.skip("A TrainJob has no number of restarts.")
    documents = printed(place, *options)
    if place == "kubernetes":
        for document in documents:
            kubernetes.validate(document, "1.30", strict=True)
        return
    if place != "kubeflow":
        pod, _ = pods_of(place, documents)
        named = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        kubernetes.validate(named, "1.30", strict=True)
    if place != "kuberay":
        models = pytest.importorskip("kubeflow_trainer_api.models", reason="its models are missing")
        kind = {"jobset": "JobsetV1alpha2JobSet", "kubeflow": "TrainerV1alpha1TrainJob"}[place]
        [document] = documents
        read = getattr(models, kind).from_dict(copy.deepcopy(document)).to_dict()
        assert_has(read["spec"], document["spec"])


def assert_has(read, written):
    """Everything that is written is a field that the models know."""
    if isinstance(written, dict):
        for name, value in written.items():
            assert name in read
            assert_has(read[name], value)
    elif isinstance(written, list):
        for ours, theirs in zip(written, read, strict=True):
            assert_has(theirs, ours)


@pytest.mark.parametrize(
    ("place", "lines"),
    [
        ("slurm", ["--nodes=4\n", "--ntasks-per-node=8\n", "--gpus-per-node=8\n"]),
        ("openmpi", ["mpirun -n 32 --map-by ppr:8:node "]),
        ("ray", ["unison run -n 4 --gpus-per-worker 8 --address auto "]),
    ],
)
def test_other_places_start_workers_for_the_gpus(place, lines, tmp_path, capsys):
    program = tmp_path / "train.py"
    program.touch()
    assert main(["run", "--env", place, "--nodes", "4", "--gpus", "8", str(program)]) == 0
    text = capsys.readouterr().out
    assert all(line in text for line in lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nodes 2", "--nodes is for other places. Give --env, or leave it out."),
        ("--gpus 2", "--gpus is for other places"),
        ("--env slurm --gpus 0", "Expected at least 1 for --gpus. Received: 0"),
        ("--env slurm --nodes 2 -n 2", "--nodes and -n are one number"),
        ("--env tf-config --gpus 2", "--gpus is for other machines. Those of this one are found."),
        ("--env tf-config --nodes 2", "--nodes is for other machines: give -n"),
        ("--env kubeflow --restarts 2", "spec.template.spec.failurePolicy.maxRestarts"),
    ],
)
def test_what_a_place_cannot_do_is_refused(options, said, tmp_path, capsys):
    program = tmp_path / "train.py"
    program.touch()
    assert main(["run", *options.split(), str(program)]) == 2
    assert said in capsys.readouterr().err
