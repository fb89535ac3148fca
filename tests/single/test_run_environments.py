"""What programs that `unison` starts find in their environments: GPUs, Keras' backend, and more."""

import json
import os
import sys

import pytest

from unison.cli import main
from unison.runtime.launching import with_own_gpus


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Returns `have(count)`: from then on the driver lists so many GPUs, and JAX would use them."""

    def have(count):
        lines = [f"echo 'GPU {index}: NVIDIA H100 (UUID: GPU-{index})'" for index in range(count)]
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
            '- name: KERAS_BACKEND\n              value: "jax"\n',
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


def test_what_is_printed_for_shells_has_the_workers_gpus(printed, gpus):
    gpus(2)
    text = printed("tf-config")
    _, first, second = text.split("# worker ")
    assert "export CUDA_VISIBLE_DEVICES=0\n" in first
    assert "export CUDA_VISIBLE_DEVICES=1\n" in second
