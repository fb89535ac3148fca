"""Programs of the shape of TensorFlow's public guide and tutorials on distribution run.

They are in `tests/tutorials`: the same calls in the same order, in their own words, on a small part
of the data, each in a process of its own with two logical devices.
"""

from __future__ import annotations

import os
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from subprocess_program import FEW_OPTIMIZATIONS, PYTHON_PATH, run_program

TUTORIALS = pathlib.Path(__file__).resolve().parents[1] / "tutorials"
SECONDS = 100


def printed_by(name: str, *arguments: object, **environment: str) -> str:
    """Runs `tests/tutorials/<name>.py <arguments>`; returns what it prints."""
    program = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    settings = {
        "UNISON_CPU_DEVICES": "2",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": os.pathsep.join([PYTHON_PATH, str(TUTORIALS)]),
        **FEW_OPTIMIZATIONS,
    }
    finished = run_program(
        program,
        TUTORIALS / f"{name}.py",
        *arguments,
        env=settings | environment,
        timeout=SECONDS,
        imported=("jax", "unison"),
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def numbers_after(words: str, printed: str) -> list[float]:
    """The number that each line with `words` ends in."""
    found = re.findall(rf"^{re.escape(words)}.*?([0-9.e+-]+)$", printed, re.MULTILINE)
    assert found, printed
    return [float(number) for number in found]


@pytest.mark.smoke
def test_the_guide():
    printed = printed_by("guide")
    assert "replicas: 2" in printed
    assert numbers_after("nothing to reduce:", printed) == [1.0]
    assert numbers_after("loss of arrays:", printed)[0] < 1.0
    assert numbers_after("steps:", printed) == [20.0]
    first, last = re.search(r"first and last loss: (\S+) (\S+)", printed).groups()
    assert float(last) < float(first)


@pytest.mark.parametrize("name", ["keras_fit", "keras_fit_before_keras_3"])
def test_training_with_keras(name, tmp_path):
    printed = printed_by(name, tmp_path)
    trained = numbers_after("Eval accuracy:", printed)
    assert trained[0] > 0.8
    assert numbers_after("Eval accuracy with", printed) == pytest.approx(2 * trained)
    assert len(numbers_after("Learning rate for epoch", printed)) >= 2


def test_custom_training(tmp_path):
    printed = printed_by("custom_training", tmp_path)
    assert numbers_after("test accuracy:", printed)[0] > 0.8
    assert numbers_after("accuracy after restoring:", printed)[0] > 0.8
    assert numbers_after("train accuracy:", printed)[0] > 0.9


def test_distributed_input():
    printed = printed_by("distributed_input")
    assert "batches: [16, 16, 16, 16, 16, 16, 4]" in printed
    assert "steps with data: 3" in printed
    assert "twice one: 2.0" in printed
    assert "looked up: [[1, 3], [0, 1]]" in printed
    assert "in order: True" in printed
    assert "values: [0, 1]" in printed
    assert "from a generator: [(2,), (2,)]" in printed


def test_several_workers_with_keras_as_one(tmp_path):
    printed = printed_by("multi_worker_with_keras", tmp_path)
    assert min(numbers_after("accuracy", printed)) > 0.5
    assert numbers_after("accuracy after restoring:", printed)[0] > 0.8


def test_several_workers_with_a_loop_as_one(tmp_path):
    first = printed_by("multi_worker_with_ctl", tmp_path, 2)
    assert "begins with epoch 0" in first
    second = printed_by("multi_worker_with_ctl", tmp_path, 3)
    assert "begins with epoch 2" in second
    assert re.search(r"Epoch: 2, accuracy: (\S+),", second)[1] > "0.8"


def test_saving_and_loading(tmp_path):
    printed = printed_by("save_and_load", tmp_path)
    assert min(numbers_after("restored", printed)) > 0.8
    assert "as the model says: True" in printed
    assert "predicted by replicas: 256" in printed
    assert "signatures: ['serving_default']" in printed
    assert "loaded from a directory: Sequential" in printed


def test_text_features():
    printed = printed_by("text_features")
    assert numbers_after("Evaluation accuracy:", printed)[0] > 0.8


def test_parameter_server_training(tmp_path):
    printed = printed_by("parameter_server_training", tmp_path)
    assert "shards: 2 [(4, 16384), (4, 16384)]" in printed
    assert numbers_after("Distributed evaluation accuracy:", printed)[0] > 0.8


def test_a_side_car_evaluates_while_a_coordinator_is_started_again(tmp_path):
    first = printed_by("parameter_server_restarts", tmp_path, 1)
    assert "begins with epoch 0" in first
    assert "fails before epoch 1" in first
    with ThreadPoolExecutor(1) as threads:
        evaluating = threads.submit(printed_by, "side_car_evaluation", tmp_path, 3)
        second = printed_by("parameter_server_restarts", tmp_path, 3)
        evaluated = evaluating.result()
    assert "begins with epoch 1" in second
    assert numbers_after("epoch 2, loss:", second)[0] < numbers_after("epoch 0, loss:", first)[0]
    assert numbers_after("evaluated 3, loss:", evaluated)[0] < 1.0
