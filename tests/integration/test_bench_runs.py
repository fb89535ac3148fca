"""`unison bench` starts programs, measures them, and ends them."""

import json

import pytest

from unison.benching.points import Point
from unison.benching.records import Record
from unison.benching.sweep import MeasurementError, Place, Sweep, Target
from unison.cli import main

PROGRAM = """
import json, os, sys
import numpy as np
import unison

workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
several = len(workers) > 1
strategy = unison.MultiWorkerMirroredStrategy() if several else unison.MirroredStrategy()
batches = unison.data.Dataset.from_tensor_slices(np.ones((64, 8), np.float32))
batches = batches.batch(int(sys.argv[1])).repeat()

def step(x):
    return unison.get_replica_context().all_reduce("sum", x.sum())

for batch in strategy.experimental_distribute_dataset(batches):
    strategy.run(step, args=(batch,))
"""


def bench(tmp_path, program, *options, arguments=()):
    script = tmp_path / "program.py"
    script.write_text(program)
    few = ["--rounds", "1", "--steps", "5", "--warmup", "2", "--timeout", "100"]
    output = tmp_path / "output"
    code = main(["bench", *few, "-o", str(output), *options, str(script), *arguments])
    return code, output


@pytest.mark.parametrize(
    ("option", "replicas"), [(["--devices", "2"], "2  "), (["--workers", "2"], "2×1")]
)
def test_a_program_is_measured_on_devices_and_on_workers(tmp_path, capsys, option, replicas):
    options = [*option, "--batch", "16"]
    code, output = bench(tmp_path, PROGRAM, *options, arguments=["{batch}"])
    assert code == 0
    (point,) = json.loads((output / "results.json").read_text())["points"]
    (record,) = point["rounds"]
    assert (record["replicas"], record["examples"], record["loop"]) == (2, 16, "step")
    assert record["alone"] > 0
    assert record["waited"] > 0
    assert (output / "report.html").read_text().startswith("<!doctype html>")
    assert (output / "scaling.png").exists()
    assert any(line.startswith(replicas) for line in capsys.readouterr().out.splitlines())


def test_a_program_that_fails_is_shown_and_its_code_returned(tmp_path, capsys):
    program = "import sys\nprint('about to fail')\nsys.exit(7)"
    code, output = bench(tmp_path, program, "--devices", "1")
    assert code == 7
    said = capsys.readouterr().err
    assert "about to fail" in said
    assert "with 1 device: worker 0 failed with exit code 7" in said
    assert not output.exists()


def test_a_program_without_a_step_is_refused(tmp_path, capsys):
    code, _ = bench(tmp_path, "print('nothing to do')", "--devices", "1")
    assert code == 1
    assert "with 1 device ended without a step" in capsys.readouterr().err


def record_of(replicas, launches):
    return Record(
        "step", replicas, "cpu", 9, 64, launches, 0.0, [], None, None, None, None, {"unison": "1"}
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (record_of(1, [(1, 0.1)] * 9), "expected 2 replicas. Received: 1"),
        (record_of(2, [(1, 0.1)] * 3), "ended after 9 steps, of which 6 warm it up"),
    ],
)
def test_what_a_measurement_lacks_is_said(record, words):
    point = Point(1, 2, None, None)
    target = Target("program.py", False, [], "program.py")
    sweep = Sweep(target, [point], Place(), warmup=6, steps=5, timeout=1.0)
    with pytest.raises(MeasurementError) as error:
        sweep._checked(point, [record])
    assert words in str(error.value)
