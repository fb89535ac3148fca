"""The speed of the whole programs of `tests/programs` beside TensorFlow's.

    python -m benchmarks.whole_programs --tf-python PATH [--replicas N] [PROGRAM ...]

Unison and TensorFlow are a process each, on logical CPU devices, and train in turns, more epochs
than a program has itself. The time of an epoch is the median of a training's: steps, and what the
program does between them. The rest of a training is mostly tracing and compiling. Seconds are of
the wall; where other programs run, those of the processor (`--processor`) say more: they count all
threads. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from typing import Any

from benchmarks import machine
from benchmarks.processes import AnsweringProcess, ProcessEndedError, python_path

#: How many epochs a training has beside the program's own.
_MORE = 30
_CONTESTANTS = {"unison": "unison.tf", "tensorflow": "tensorflow"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_programs")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="all, if none is named")
    parser.add_argument("--tf-python", required=True, help="a Python that has TensorFlow")
    parser.add_argument("--replicas", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--processor", action="store_true", help="compare processor seconds")
    parser.add_argument("--json", type=pathlib.Path, help="where the results are written")
    options = parser.parse_args(arguments)
    pythons = {"unison": sys.executable, "tensorflow": options.tf_python}
    processes = {
        name: _process(pythons[name], module, options.replicas)
        for name, module in _CONTESTANTS.items()
    }
    measured: dict[str, Any] = {}
    try:
        begun = {name: _answer(process) for name, process in processes.items()}
        print("| program | ms/epoch | TensorFlow | times as fast | whole s | TensorFlow |")
        print("| --- | --- | --- | --- | --- | --- |")
        for program in options.programs or begun["unison"]["programs"]:
            measured[program] = _rounds(program, processes, options.rounds)
            print(_row(program, measured[program], int(options.processor)), flush=True)
    except ProcessEndedError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for process in processes.values():
            process.end()
    if options.json:
        versions = {name: hello["versions"] for name, hello in begun.items()}
        about = {"machine": machine.description(), "replicas": options.replicas, "more": _MORE}
        written = {**about, "versions": versions, "programs": measured}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def _process(python: str, module: str, replicas: int) -> AnsweringProcess:
    environment = os.environ | {
        "PYTHONPATH": python_path("tests"),
        "KERAS_BACKEND": "tensorflow" if module == "tensorflow" else "jax",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [python, "-m", "benchmarks.contestants.whole_programs", module, str(replicas)]
    return AnsweringProcess(command, environment, f"{module}: ")


def _rounds(program: str, processes: dict[str, AnsweringProcess], rounds: int) -> dict[str, Any]:
    """Returns what each contestant answers in each round."""
    found: dict[str, Any] = {name: [] for name in processes}
    for index in range(rounds):
        for name, process in list(processes.items())[:: -1 if index % 2 else 1]:
            process.tell({"program": program, "more": _MORE})
            found[name].append(_answer(process))
    return found


def _answer(process: AnsweringProcess) -> dict[str, Any]:
    while not (answers := process.read_answers()):
        pass
    return answers[0]


def _row(program: str, found: dict[str, Any], clock: int) -> str:
    seconds = {
        (name, part): [each[part][clock] for each in rounds]
        for name, rounds in found.items()
        for part in ("epoch", "whole")
    }
    pairs = zip(seconds["unison", "epoch"], seconds["tensorflow", "epoch"], strict=True)
    ratio = statistics.median(their / our for our, their in pairs)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    epochs = [f"{1e3 * medians[name, 'epoch']:.1f}" for name in _CONTESTANTS]
    wholes = [f"{medians[name, 'whole']:.1f}" for name in _CONTESTANTS]
    return f"| {' | '.join([program, *epochs, f'{ratio:.2f} x', *wholes])} |"


if __name__ == "__main__":
    sys.exit(main())
