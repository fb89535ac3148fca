"""Jobs that others start: `mpirun`, `torchrun`, and what `unison run --env` prints for them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from subprocess_program import UNISON, run_program

MPIRUN = shutil.which("mpirun")
MPICH = shutil.which("mpiexec.hydra")
TORCHRUN = shutil.which("torchrun")

PROGRAM = """
import json, sys
import jax
from jax.experimental import multihost_utils
import unison


strategy = unison.MultiWorkerMirroredStrategy()
total = multihost_utils.process_allgather(jax.numpy.ones(())).sum()
report = [strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync, float(total)]
sys.stdout.write(json.dumps(report) + "\\n")
multihost_utils.sync_global_devices("end")
"""


def printed(place: str, *arguments: object, workers: int | None = 2) -> str:
    """What `unison run --env` prints for a program."""
    count = [] if workers is None else ["-n", str(workers)]
    words = ("run", *count, "--env", place, *arguments)
    done = run_program(UNISON, *words, imported=("jax", "unison"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder of programs that come first on the path; `python` is this one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    add_program(folder, "python", f'exec {sys.executable} "$@"')
    return folder


def add_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def shell(text: str, folder: Path, **variables: str) -> str:
    """What a shell prints that runs `text`."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def reports(text: str) -> list[list[float]]:
    return sorted(json.loads(report) for report in re.findall(r"\[\d, \d, [\d.]+\]", text))


@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed (no mpirun)")
def test_the_line_for_open_mpi_trains_there(program, bin_folder):
    add_program(bin_folder, "mpirun", f'exec {MPIRUN} --oversubscribe "$@"')
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    line = printed("openmpi", "--devices-per-worker", 1, program)
    assert reports(shell(line, bin_folder, **as_root)) == [[0, 2, 2.0], [1, 2, 2.0]]


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        (TORCHRUN, ["--standalone", "--nproc-per-node", "2", "--no-python"]),
        (MPICH, ["-n", "2"]),
    ],
    ids=["torchrun", "mpich"],
)
def test_the_processes_of_a_launcher_train_together(launcher, options, program, bin_folder):
    if launcher is None:
        pytest.skip("The launcher is not installed.")
    line = shlex.join([launcher, *options, sys.executable, str(program)])
    assert reports(shell(line, bin_folder, UNISON_CPU_DEVICES="1")) == [[0, 2, 2.0], [1, 2, 2.0]]


# Starts what follows its options twice, as Slurm does it on two nodes; both are this machine.
SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1,1
export SLURM_STEP_NODELIST=127.0.0.1,127.0.0.2
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" || exit
wait $first
"""


@pytest.mark.smoke
def test_the_script_for_slurm_trains_there(program, bin_folder):
    add_program(bin_folder, "srun", SRUN)
    script = printed("slurm", "--devices-per-worker", 1, program)
    assert "#SBATCH --nodes=2\n" in script
    ran = shell(script, bin_folder, SLURM_CPUS_PER_TASK="1")
    assert reports(ran) == [[0, 2, 2.0], [1, 2, 2.0]]


def test_the_job_for_kubernetes_describes_its_cluster(program):
    manifest = printed("kubernetes", "--devices-per-worker", 4, program, "--epochs", 3, workers=3)
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all(manifest)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "train"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-u", str(program), "--epochs", "3"]
    assert {"name": "UNISON_CPU_DEVICES", "value": "4"} in container["env"]
    [config] = [one["value"] for one in container["env"] if one["name"] == "TF_CONFIG"]
    config = json.loads(config.replace("$(INDEX)", "2"))
    addresses = [f"train-{index}.train:8470" for index in range(3)]
    assert config["cluster"] == {"worker": addresses}
    assert config["task"] == {"type": "worker", "index": "2"}
    # A variable is put in only where it stands before.
    names = [one["name"] for one in container["env"]]
    assert names.index("INDEX") < names.index("TF_CONFIG")


def test_the_lines_for_ray_start_the_workers_there(program):
    lines = printed("ray", "--devices-per-worker", 2, "-m", "package.train", "a b")
    assert lines.endswith(
        "unison run -n 2 --devices-per-worker 2 --address auto -m package.train 'a b'\n"
    )
    assert "127.0.0.1" not in lines  # for which Ray takes the machine's outer address
