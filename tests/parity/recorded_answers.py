"""TensorFlow's answers: asking for them, keeping them, comparing with them."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
from typing import Any

from parity.facts import Fact, facts, topics

ROOM = pathlib.Path(__file__).parent
RECORDED = ROOM / "recorded"
#: How long TensorFlow may take for the programs of a process, in seconds.
PATIENCE = 500


def ask_tensorflow(python: str, *only: str) -> dict[str, Any]:
    """Runs the programs with TensorFlow; returns its versions, and its answers by topic and name.

    Raises:
        RuntimeError: A program failed there.
    """
    given: dict[str, Any] = {"answers": {topic: {} for topic in only or topics()}}
    failed, said = [], ""
    for process in dict.fromkeys(fact.process for fact in facts(*only)):
        finished = run_with_tensorflow(python, "parity.answers", process, *only)
        last_line = json.loads(finished.stdout.splitlines()[-1])
        given["versions"] = last_line["versions"]
        for topic, name, answer in last_line["answers"]:
            given["answers"][topic][name] = answer
            if isinstance(answer, dict) and "failed" in answer:
                failed.append(f"{topic}::{name}: {answer['failed']}")
                said = finished.stderr
    if failed:
        raise RuntimeError(
            "these programs fail under TensorFlow; state an error that is meant with attempt():\n"
            + "\n".join([*failed, said[-6000:]])
        )
    return given


def run_with_tensorflow(
    python: str, module: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a module of this package that takes `tensorflow` and the arguments.

    Raises:
        RuntimeError: It failed.
    """
    finished = subprocess.run(
        [python, "-m", module, "tensorflow", *arguments],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOM.parent),
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": "tensorflow",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"TensorFlow's answers were not given:\n{finished.stderr[-4000:]}")
    return finished


def record(python: str, *only: str) -> int:
    """Writes what TensorFlow answers into `recorded/`; returns how many facts there are."""
    given = ask_tensorflow(python, *only)
    for topic, of_topic in given["answers"].items():
        in_order = {fact.name: of_topic[fact.name] for fact in facts(topic)}
        text = laid_out({"versions": given["versions"], "facts": in_order})
        (RECORDED / f"{topic}.json").write_text(text + "\n")
    return sum(map(len, given["answers"].values()))


def recorded() -> dict[str, dict[str, Any]]:
    """TensorFlow's answers by topic and name."""
    return {
        topic: json.loads(path.read_text())["facts"]
        for topic in topics()
        if (path := RECORDED / f"{topic}.json").is_file()
    }


def disagreement(expected: Any, answer: Any, tolerance: float, where: str = "") -> str:
    """Says where `answer` differs from `expected`; empty if it does not."""
    if isinstance(expected, dict) and isinstance(answer, dict):
        for key in expected.keys() | answer.keys():
            if key not in expected or key not in answer:
                return f"{where}.{key}: expected {expected!r}, got {answer!r}"
            if said := disagreement(expected[key], answer[key], tolerance, f"{where}.{key}"):
                return said
        return ""
    if isinstance(expected, list) and isinstance(answer, list) and len(expected) == len(answer):
        for index, (of_theirs, of_ours) in enumerate(zip(expected, answer, strict=True)):
            if said := disagreement(of_theirs, of_ours, tolerance, f"{where}[{index}]"):
                return said
        return ""
    if isinstance(expected, float) and isinstance(answer, float):
        equal = math.isclose(expected, answer, rel_tol=tolerance, abs_tol=tolerance)
    else:
        equal = type(expected) is type(answer) and expected == answer
    return "" if equal else f"{where or 'the answer'}: expected {expected!r}, got {answer!r}"


def expected_of(fact: Fact, theirs: Any) -> Any:
    """What Unison must answer where TensorFlow answers `theirs`."""
    return fact.ours if fact.differs else theirs


def laid_out(value: Any, indent: str = "", before: int = 0) -> str:
    """JSON with what fits into 100 columns on one line."""
    line = json.dumps(value)
    if len(indent) + before + len(line) < 100 or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)}: {laid_out(item, inner, len(key) + 4)}"
            for key, item in value.items()
        ]
        opening, closing = "{}"
    else:
        items = [laid_out(item, inner) for item in value]
        opening, closing = "[]"
    body = f",\n{inner}".join(items)
    return f"{opening}\n{inner}{body}\n{indent}{closing}"
