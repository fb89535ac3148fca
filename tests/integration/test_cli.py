"""The `unison` command. It runs in this process, on the first of its four logical devices."""

import re
import sys

import numpy as np
import pytest

import unison
from subprocess_program import UNISON, run_program
from unison.cli import main
from unison.cli.demo_data import load_images
from unison.cli.errors import CommandError


@pytest.fixture
def run_command(capsys):
    """Returns `run(*arguments)`: the exit status of `unison arguments`, and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exited:
            status = exited.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def save_images(tmp_path):
    """Returns `save(**arrays)`: the path of a file of 150 images, some arrays replaced."""

    def save(**replaced: np.ndarray | None) -> str:
        rng = np.random.default_rng(0)
        labels = np.arange(150) % 10
        noise = rng.integers(0, 20, (150, 28, 28))
        pixels = (labels[:, None, None] * 25 + noise).astype("uint8")
        arrays = {"x_train": pixels, "y_train": labels, "x_test": pixels, "y_test": labels}
        arrays |= replaced
        path = tmp_path / "images.npz"
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return str(path)

    return save


def number_in(printed: str, row: str) -> float:
    """The number that a row of the demo's table shows."""
    return float(re.search(rf"{re.escape(row)}\W+([\d.]+(e[+-]\d+)?)", printed)[1])


def test_without_a_command_it_prints_the_help(run_command):
    status, printed, _ = run_command()
    assert status == 0
    assert "demo" in printed


def test_it_says_its_version(run_command):
    status, printed, _ = run_command("--version")
    assert status == 0
    assert printed.split() == ["unison", unison.__version__]


def test_the_demo_learns_scikit_learns_digits_on_two_replicas():
    pytest.importorskip("sklearn")
    # In a process of its own, which shows the defaults: nothing states a number of devices.
    finished = run_program(
        UNISON,
        "demo",
        "--epochs",
        3,
        timeout=110,
    )
    assert finished.returncode == 0, finished.stderr
    assert "cpu:0, cpu:1" in finished.stdout
    assert number_in(finished.stdout, "test accuracy") > 90


@pytest.mark.smoke
def test_the_demo_gives_the_weights_of_one_device_on_uneven_batches(run_command, save_images):
    arguments = ("--data", save_images(), "--epochs", 1, "--batch", 50, "--replicas", 3)
    status, printed, _ = run_command("demo", *arguments)
    assert status == 0
    assert "cpu:0, cpu:1, cpu:2" in printed
    assert number_in(printed, "of a weight") < 1e-5
    assert number_in(printed, "of an epoch's loss") < 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dem"], "invalid choice: 'dem'"),
        (["demo", "--replicas", "0"], "--replicas: expected a number of at least 1"),
        (["demo", "--batch", "many"], "received 'many'"),
        (["demo", "--epochs", "-1"], "--epochs: expected"),
        (["demo", "--data", "nowhere.npz"], "there is no file nowhere.npz"),
        (["demo", "--data", __file__], "is not an .npz file"),
        (["demo", "--replicas", "5"], "more devices than there are: cpu:0, cpu:1, cpu:2, cpu:3"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(run_command, arguments, said):
    status, _, complaint = run_command(*arguments)
    assert status == 2
    assert said in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("UNISON_CPU_DEVICES", "two", "UNISON_CPU_DEVICES = 'two'"),
        ("KERAS_BACKEND", "torch", "set KERAS_BACKEND=jax"),
    ],
)
def test_an_environment_that_cannot_work_is_said_in_one_line(
    run_command, monkeypatch, variable, value, said
):
    monkeypatch.setenv(variable, value)
    status, _, complaint = run_command("demo")
    assert status == 2
    assert said in complaint
    assert complaint.count("\n") == 1


def test_missing_scikit_learn_names_the_extra_that_brings_it(run_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    status, _, complaint = run_command("demo")
    assert status == 2
    assert "pip install 'unison[demo]'" in complaint


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"y_test": None}, "must hold the arrays x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((150, 8, 8))}, "x_train must hold images of 28x28 pixels"),
        ({"x_train": np.float32(0)}, "x_train must hold images of 28x28 pixels"),
        ({"y_test": np.zeros(3, "int32")}, "one integer for each of the 150 images"),
        ({"y_test": np.full(150, 10)}, "must hold classes from 0 to 9"),
        ({"y_test": np.array([{}] * 150)}, "is not an .npz file of NumPy arrays"),
    ],
)
def test_a_file_without_such_images_is_refused(save_images, replaced, said):
    with pytest.raises(CommandError, match=said):
        load_images(save_images(**replaced))


def test_pixels_of_a_file_are_scaled_to_one(save_images):
    images = load_images(save_images(x_train=np.full((150, 28, 28), 255, "uint8")))
    assert images.x_train.shape == (150, 784)
    assert images.x_train.dtype == np.float32
    assert images.x_train.max() == images.x_train.min() == 1


def test_the_digits_are_split_without_chance():
    pytest.importorskip("sklearn")
    images, again = load_images("digits"), load_images("digits")
    assert (len(images.x_train), len(images.x_test)) == (1438, 359)
    assert images.x_train.max() == 1
    np.testing.assert_array_equal(images.x_test, again.x_test)
