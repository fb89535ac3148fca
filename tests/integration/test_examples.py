"""The programs in `examples/` run on two devices, and learn what they are shown."""

import pathlib
import re

import numpy as np
import pytest

from subprocess_program import FEW_OPTIMIZATIONS, imported_by, run_program

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = ("mirrored_fit", "custom_loop", "pure_jax")


def run_example(name: str, *arguments: object, **environment: str) -> str:
    """Runs an example as `python examples/<name>.py <arguments>`; returns what it prints."""
    path = EXAMPLES / f"{name}.py"
    program = (
        "import runpy, sys; path = sys.argv.pop(1); sys.path[0] = path.rpartition('/')[0]; "
        "runpy.run_path(path, run_name='__main__')"
    )
    finished = run_program(
        program,
        path,
        *arguments,
        env={"UNISON_CPU_DEVICES": "2", "KERAS_BACKEND": "jax", **environment},
        timeout=100,
        imported=imported_by(path.read_text()),
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def accuracy_in(printed: str) -> float:
    return float(re.search(r"test accuracy: (\S+)", printed)[1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_learns_on_two_replicas(name):
    printed = run_example(name, "--epochs", 2)
    assert "replicas: 2" in printed
    assert accuracy_in(printed) > 0.95


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_trains_on_a_file_whose_last_batch_leaves_a_replica_idle(name, tmp_path):
    labels = np.arange(100) % 10
    pixels = np.repeat(25 * labels, 784).reshape(100, 28, 28).astype("uint8")
    path = tmp_path / "images.npz"
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    arguments = ("--epochs", 1, "--batch", 99, "--data", path)
    printed = run_example(name, *arguments, **FEW_OPTIMIZATIONS)
    assert 0 <= accuracy_in(printed) <= 1
