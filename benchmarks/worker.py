"""A process of a contestant: `python -m benchmarks.worker MODULE:FUNCTION WORK SECONDS`.

Nothing that is printed while a contestant works can disturb the protocol: standard output leads
to /dev/null, and the answers go to what it was before. The process ends when standard input
does, when its driver dies, and SECONDS after it last heard from the driver.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import time
from typing import Any

from benchmarks.machine import expect_device, peak_resident_bytes, resident_bytes
from benchmarks.protocol import Contestant, Ready, Round
from benchmarks.workloads import ImageInputWork, from_json


def main(builder: str, work: str, seconds: str) -> None:
    module, function = builder.split(":")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)

    def answer(message: Any) -> None:
        answers.write(json.dumps(dataclasses.asdict(message)) + "\n")

    faulthandler.enable()
    end_after(float(seconds))
    of_work = from_json(json.loads(work))
    has_own_cores = of_work.processes > 1 or isinstance(of_work, ImageInputWork)
    if has_own_cores and getattr(of_work, "device", "cpu") == "cpu":
        _share_cores(of_work.processes)
    build = getattr(importlib.import_module(module), function)
    contestant = build(of_work)
    contestant.round()  # compiles and warms up
    expect_device(getattr(of_work, "device", "cpu"))
    answer(Ready(contestant.versions))
    for _ in sys.stdin:
        end_after(float(seconds))
        answer(_round(contestant))


def _share_cores(processes: int) -> None:
    """Keeps contestants of several processes to a core for each, whatever threads they start."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processes])


def end_after(seconds: float) -> None:
    """Ends this process in `seconds`, even if it is stuck in C++; shows where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def _round(contestant: Contestant) -> Round:
    wall, cpu = time.perf_counter(), time.process_time()
    value = contestant.round()
    busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return Round(value, busy, resident_bytes(), peak_resident_bytes(), contestant.facts())


if __name__ == "__main__":
    main(*sys.argv[1:])
