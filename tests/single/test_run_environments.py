"""What programs that `unison` starts find in their environments: GPUs, Keras' backend, and more."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from unison.cli import main
from unison.cli.asked import Asked
from unison.cli.recipes import local_environments
from unison.runtime import cores
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching import cores_of_workers, with_own_gpus
from unison.runtime.launching.server_jobs import Task, task_environment


def echoed(lines):
    return "; ".join(f"echo '{line}'" for line in lines)


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Returns `have(count)`: from then on the driver lists so many GPUs, and JAX would use them."""

    def have(count):
        listed = [f"GPU {index}: NVIDIA H100 (UUID: GPU-{index})" for index in range(count)]
        asked = [f"{index}, GPU-{index}, 00000000:{index}B:00.0" for index in range(count)]
        lines = [f"if [ $1 = --list-gpus ]; then {echoed(listed)}; else {echoed(asked)}; fi"]
        driver = tmp_path / "bin" / "nvidia-smi"
        driver.parent.mkdir()
        driver.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        driver.chmod(0o755)
        monkeypatch.setenv("PATH", f"{driver.parent}{os.pathsep}{os.environ['PATH']}")
        plugin = tmp_path / "site" / "jax_plugins" / "xla_cuda12"
        plugin.mkdir(parents=True)
        monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        (plugin / "__init__.py").touch()
        monkeypatch.setenv("JAX_PLATFORMS", "")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return have


def seen(workers):
    """Which GPUs each of several workers sees; None: as this process."""
    found = with_own_gpus([{"OWN": str(index)} for index in range(workers)])
    assert [environment["OWN"] for environment in found] == [str(i) for i in range(workers)]
    return [environment.get("CUDA_VISIBLE_DEVICES") for environment in found]


def test_each_worker_sees_gpus_of_its_own(gpus, caplog):
    gpus(4)
    assert seen(2) == ["0,1", "2,3"]
    assert seen(4) == ["0", "1", "2", "3"]
    assert caplog.messages == []


def test_a_worker_alone_sees_all(gpus):
    gpus(4)
    assert seen(1) == [None]


def test_only_the_gpus_that_the_user_has_named_are_shared(gpus, monkeypatch, caplog):
    gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, GPU-6,7,2")
    assert seen(2) == ["4,5", "GPU-6,7"]
    assert caplog.messages == ["No worker has GPU 2: the 2 workers have 2 each."]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert seen(2) == [None, None]


def test_with_fewer_gpus_than_workers_each_sees_all_and_a_line_says_what_follows(gpus, caplog):
    gpus(1)
    assert seen(2) == [None, None]
    (said,) = caplog.messages
    assert said.startswith("2 workers, and fewer GPUs (0): each worker sees all of them, and NCCL")
    assert said.endswith("Start at most 1, or set JAX_PLATFORMS=cpu.")


def test_workers_that_share_gpus_share_their_memory(gpus, monkeypatch):
    gpus(1)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    shares = [each["XLA_PYTHON_CLIENT_MEM_FRACTION"] for each in with_own_gpus([{}, {}])]
    assert shares == ["0.375", "0.375"]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    assert with_own_gpus([{}, {}]) == [{}, {}]


def test_a_worker_with_gpus_of_its_own_may_take_their_memory(gpus):
    gpus(2)
    assert with_own_gpus([{}, {}]) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_by_default_there_is_a_worker_for_each_gpu(gpus, count):
    gpus(count)
    environments = local_environments(Asked(["train.py"]))
    seen = [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments]
    assert seen == (["0", "1", "2"] if count == 3 else [None])
    assert len(local_environments(Asked(["train.py"], workers=1))) == 1


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """Returns `have(*nodes)`: GPU i is then connected to node i, which has the cores given."""

    def have(of_gpus, of_cores):
        system = tmp_path / "sys"
        for gpu, node in enumerate(of_gpus):
            device = system / f"bus/pci/devices/0000:{gpu}b:00.0"
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{node}\n")
        for node, listed in enumerate(of_cores):
            folder = system / f"devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{listed}\n")
        for core in range(8):  # threads of the same physical core: 0 and 8, 1 and 9, ...
            for thread in (core, core + 8):
                folder = system / f"devices/system/cpu/cpu{thread}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(f"{core},{core + 8}\n")
        monkeypatch.setattr(cores, "_SYSTEM", system)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    return have


def test_workers_get_whole_cores_near_their_gpus(gpus, nodes):
    gpus(4)
    nodes(of_gpus=[0, 0, 1, 1], of_cores=["0-3,8-11", "4-7,12-15"])
    assert cores_of_workers(with_own_gpus([{}] * 4)) == [
        [0, 8, 1, 9],
        [2, 10, 3, 11],
        [4, 12, 5, 13],
        [6, 14, 7, 15],
    ]


def test_gpus_named_by_uuid_have_their_cores(gpus, nodes, monkeypatch):
    gpus(4)
    nodes(of_gpus=[0, 0, 1, 1], of_cores=["0-1", "2-3"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3,GPU-0")
    assert cores_of_workers(with_own_gpus([{}, {}])) == [[2, 3], [0, 1]]


def test_cores_are_left_alone_where_the_system_does_not_say_which_are_near(gpus, nodes):
    gpus(4)
    nodes(of_gpus=[-1, -1, 0, 1], of_cores=["0-7", "8-15"])
    # The last worker has GPUs on two nodes.
    assert cores_of_workers(with_own_gpus([{}, {}])) == [None, None]
    assert cores_of_workers([{"CUDA_VISIBLE_DEVICES": "MIG-1"}, {}]) == [None, None]


def test_only_the_workers_of_parameter_servers_use_accelerators():
    cluster = ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})
    platforms = [
        task_environment(cluster, task, "00", 1).get("JAX_PLATFORMS")
        for task in (Task("chief", 0), Task("worker", 0), Task("ps", 0))
    ]
    assert platforms == ["cpu", None, "cpu"]


def test_where_jax_computes_on_cpus_no_gpu_is_looked_for(gpus, monkeypatch, caplog):
    gpus(1)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert seen(2) == [None, None]
    assert caplog.messages == []


def test_a_driver_that_fails_has_no_gpus(gpus, tmp_path, caplog):
    gpus(4)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: lost'\nexit 9\n")
    assert seen(2) == [None, None]
    assert caplog.messages == []


@pytest.fixture
def keras_home(monkeypatch, tmp_path):
    """Returns `says(backend)`: then Keras' configuration names it, and the environment nothing."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "")  # which is what Keras takes for nothing

    def says(backend):
        (tmp_path / "keras.json").write_text(json.dumps({"floatx": "float32", "backend": backend}))

    return says


#: Each fails for want of something after it has chosen.
COMMANDS = (["run", "nowhere.py"], ["bench", "nowhere.py"], ["plan", "nowhere.py"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_programs_run_keras_on_jax_where_nobody_has_chosen(keras_home, command):
    assert main(command) == 2
    assert os.environ["KERAS_BACKEND"] == "jax"


def test_the_backend_that_keras_writes_down_by_itself_is_nobodys_choice(keras_home):
    keras_home("tensorflow")
    assert main(COMMANDS[0]) == 2
    assert os.environ["KERAS_BACKEND"] == "jax"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_backend_that_the_user_has_chosen_stays(keras_home, monkeypatch, command):
    keras_home("torch")
    assert main(command) == 2
    assert os.environ["KERAS_BACKEND"] == ""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert main(command) == 2
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


def test_a_configuration_that_cannot_be_read_is_none(keras_home, tmp_path):
    (tmp_path / "keras.json").write_text("{")
    assert main(COMMANDS[0]) == 2
    assert os.environ["KERAS_BACKEND"] == "jax"


@pytest.fixture
def printed(keras_home, tmp_path, capsys):
    """Returns `printed(place, *options)`: what `unison run --env` prints for two workers."""
    program = tmp_path / "train.py"
    program.touch()

    def print_for(place, *options):
        assert main(["run", "-n", "2", "--env", place, *options, str(program)]) == 0
        return capsys.readouterr().out

    return print_for


@pytest.mark.parametrize(
    ("place", "backend", "monitor"),
    [
        ("tf-config", "export KERAS_BACKEND=jax\n", "export UNISON_MONITOR=1\n"),
        ("slurm", "export KERAS_BACKEND=jax\n", "export UNISON_MONITOR=1\n"),
        ("openmpi", "-x KERAS_BACKEND=jax ", "-x UNISON_MONITOR=1 "),
        (
            "kubernetes",
            "- name: KERAS_BACKEND\n              value: jax\n",
            '- name: UNISON_MONITOR\n              value: "1"\n',
        ),
    ],
)
def test_workers_elsewhere_run_keras_on_jax_and_can_be_watched(printed, place, backend, monitor):
    text = printed(place)
    assert backend in text
    assert monitor in text
    unwatched = printed(place, "--no-monitor")
    assert backend in unwatched
    assert "MONITOR" not in unwatched


def test_workers_elsewhere_get_a_key_that_no_command_line_shows(printed, monkeypatch):
    monkeypatch.delenv("UNISON_KEY")
    made = "export UNISON_KEY=${UNISON_KEY:-$(python -c 'import secrets; print"
    assert made in printed("slurm")
    assert made in printed("openmpi")
    assert " -x UNISON_KEY " in printed("openmpi")
    assert "secretKeyRef:\n                  name: train-key\n" in printed("kubernetes")
    assert "UNISON_KEY" not in printed("tf-config")


def test_workers_of_ray_can_be_watched_unless_they_are_not_to_be(printed):
    assert printed("ray").count("--no-monitor") == 0
    assert "unison run -n 2 --no-monitor --address auto" in printed("ray", "--no-monitor")


@pytest.mark.parametrize(("place", "shell"), [("slurm", "bash"), ("openmpi", "sh")])
@pytest.mark.parametrize(
    ("fails", "code", "times"),
    [(2, 7, 3), (9, 7, 4), (9, 130, 1)],
    ids=["recovers", "does not", "Ctrl-C"],
)
def test_what_is_printed_for_schedulers_starts_all_workers_again(
    printed, tmp_path, place, shell, fails, code, times
):
    script = printed(place, "--restarts", "3")
    starter = tmp_path / {"slurm": "srun", "openmpi": "mpirun"}[place]
    starter.write_text(
        f"#!/bin/sh\necho start >> {tmp_path}/starts\n"
        f"[ $(wc -l < {tmp_path}/starts) -gt {fails} ] || exit {code}\n"
    )
    starter.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "SLURM_CPUS_PER_TASK": "1"}
    script += "echo still here\n"  # pasted into a shell, it must not end that
    done = subprocess.run(
        [shell, "-c", script], env=variables, timeout=60, check=False, capture_output=True
    )
    assert done.stdout.decode().endswith("still here\n"), done.stderr
    assert (tmp_path / "starts").read_text().split() == ["start"] * times


def test_pods_are_replaced_unless_their_program_has_failed(printed):
    [job] = [
        each
        for each in yaml.safe_load_all(printed("kubernetes", "--restarts", "3"))
        if each["kind"] == "Job"
    ]
    assert job["spec"]["backoffLimit"] == 2 * 3  # of all pods together
    ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
    assert (ignored["action"], failed["action"]) == ("Ignore", "FailJob")
    codes = failed["onExitCodes"]
    assert codes["operator"] == "NotIn"
    assert {42, 75, 137, 143} <= set(codes["values"])
    assert not {0, 1, 2} & set(codes["values"])
    assert "podFailurePolicy" not in printed("kubernetes")


def test_what_others_start_they_have_to_start_again(keras_home, tmp_path, capsys):
    program = tmp_path / "train.py"
    program.touch()
    assert main(["run", "--env", "tf-config", "--restarts", "1", str(program)]) == 2
    assert "has to start them again" in capsys.readouterr().err
    text = ["run", "--env", "ray", "--restarts", "1", str(program)]
    assert main(text) == 0
    assert "unison run --restarts 1 --address auto" in capsys.readouterr().out


def test_what_is_printed_for_shells_has_the_workers_gpus(printed, gpus):
    gpus(2)
    text = printed("tf-config")
    _, first, second = text.split("# worker ")
    assert "export CUDA_VISIBLE_DEVICES=0\n" in first
    assert "export CUDA_VISIBLE_DEVICES=1\n" in second
