"""TensorFlow's numbers of the whole programs: asking for them, keeping them."""

from __future__ import annotations

import json
from typing import Any

from parity.recorded_answers import RECORDED, laid_out, run_with_tensorflow
from parity.whole_programs import names

_FILE = RECORDED / "whole_programs.json"
#: How many programs a process of TensorFlow runs, which it starts slowly.
_OF_A_PROCESS = 10


def recorded_programs() -> dict[str, Any]:
    """TensorFlow's numbers by the name of the program."""
    return _kept()["programs"]


def versions() -> dict[str, str]:
    """The versions of TensorFlow and Keras that gave them."""
    return _kept()["versions"]


def record(python: str, *chosen: str) -> int:
    """Writes what TensorFlow gives for the chosen programs, or for all; returns how many.

    Raises:
        RuntimeError: A program failed there.
    """
    kept = {name: numbers for name, numbers in _kept()["programs"].items() if name in names()}
    wanted = chosen or tuple(names())
    for begin in range(0, len(wanted), _OF_A_PROCESS):
        some = wanted[begin : begin + _OF_A_PROCESS]
        finished = run_with_tensorflow(python, "parity.whole_programs", *some)
        *answers, given_versions = map(json.loads, finished.stdout.splitlines())
        for answer in answers:
            if "failed" in answer:
                raise RuntimeError(f"{answer['name']} fails there:\n{finished.stderr[-4000:]}")
            kept[answer["name"]] = answer["numbers"]
        in_order = {name: kept[name] for name in sorted(kept)}
        _FILE.write_text(laid_out({"versions": given_versions, "programs": in_order}) + "\n")
    return len(wanted)


def _kept() -> dict[str, Any]:
    return json.loads(_FILE.read_text()) if _FILE.exists() else {"programs": {}}
