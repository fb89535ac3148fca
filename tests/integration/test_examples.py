"""The programs in `examples/` run on two devices, and learn what they are shown."""

import contextlib
import importlib.util
import io
import pathlib
import re
import subprocess

import keras
import numpy as np
import pytest

from subprocess_program import FEW_OPTIMIZATIONS, imported_by, run_program, unison_run

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


# -- examples/gpt.py ------------------------------------------------------------------------------

#: A few steps of a small model.
SMALL = "--size tiny --length 32 --batch 16 --steps 4 --epochs 2 --sample 6".split()


@pytest.fixture(scope="module")
def gpt():
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLES / "gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def on_one_device(gpt):
    """The losses of two epochs on one device, and what is printed."""
    return printed_by(gpt, "--devices", "1")


def printed_by(gpt, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = gpt.main([*SMALL, *arguments])
    return losses, printed.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ("mirrored",),
        ("zero1",),
        ("zero3",),
        ("tensor",),
        ("pipeline",),
        *(
            pytest.param(arguments, marks=pytest.mark.soak)
            for arguments in (
                ("mirrored", "--devices", "2"),
                ("zero2",),
                ("pipeline", "--devices", "2"),
                ("zero3", "--remat"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_gpt_has_the_same_losses_under_every_strategy(arguments, gpt, on_one_device):
    losses, printed = printed_by(gpt, "--strategy", *arguments)
    expected, said = on_one_device
    # Gradients are summed in another order.
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert printed.split("def ")[1] == said.split("def ")[1]  # the sampled text


def test_a_gpt_in_bfloat16_accumulates_gradients_and_resumes(gpt, on_one_device, tmp_path):
    arguments = [
        "--bfloat16",
        "--remat",
        "--accumulate",
        "2",
        "--checkpoint",
        str(tmp_path / "run"),
    ]
    try:
        losses, _ = printed_by(gpt, *arguments)
        resumed, printed = printed_by(gpt, *arguments, "--epochs", "3")
    finally:
        keras.config.set_dtype_policy("float32")
    assert losses[1] < losses[0]
    assert re.findall(r"epoch (\d)", printed) == ["3"]
    assert resumed[-1] < losses[1]


@pytest.mark.parametrize(
    "strategy",
    ["workers", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tensor", "pipeline"))],
)
def test_workers_train_a_gpt_together(strategy, on_one_device):
    arguments = ["-n", "2", "--devices-per-worker", "1"]
    command = [*arguments, EXAMPLES / "gpt.py", "--strategy", strategy, *SMALL]
    finished = subprocess.run(
        unison_run(*command), capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    losses = re.findall(r"\[worker 0\] epoch \d: loss (\S+),", finished.stdout)
    assert losses == [f"{loss:.4f}" for loss in on_one_device[0]]
