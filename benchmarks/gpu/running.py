"""Runs the checks one after the other, each in a process of its own and within a time."""

from __future__ import annotations

import dataclasses
import json
import selectors
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.gpu import plan
from benchmarks.gpu.findings import DEVICES, MACHINE, Row, Setting, environment, from_json
from benchmarks.gpu.plan import Check
from benchmarks.gpu.record import FAILED, LATE, LEFT_OUT, PASSED, RUNNING, WRONG, Outcome, Record
from benchmarks.processes import AnsweringProcess, ProcessEndedError, signals_deferred

#: Seconds that a check that is out of time has to end what it has started.
_SECONDS_TO_END = 10.0


def run_all(
    checks: Sequence[Check],
    setting: Setting,
    record: Record,
    keep: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Runs checks, after that of the machine, which finds out how many devices there are.

    A check that fails or is out of time does not keep the others from running; without a device
    none runs.

    Args:
        checks: The checks.
        setting: `seconds` is the time for all; `devices` is not looked at on GPUs.
        record: Gets the outcomes.
        keep: Called when the record has changed.
        say: Told what goes on, a line at a time.
    """
    ends = time.monotonic() + setting.seconds
    # On more time, or less, so much of the checks' own.
    scale = setting.seconds / plan.SECONDS
    for check in (plan.MACHINE, *checks):
        outcome = Outcome(check.name, check.title)
        record.outcomes.append(outcome)
        left = ends - time.monotonic() - _SECONDS_TO_END
        seconds = min(check.seconds * scale, left)
        if setting.devices < check.least_devices:
            outcome.state = LEFT_OUT
            outcome.reason = f"it needs {check.least_devices} devices; there is {setting.devices}"
        elif seconds < plan.LEAST_PART * check.seconds * scale:
            outcome.state = LEFT_OUT
            outcome.reason = f"there were {max(0.0, left):.0f} s left"
        else:
            of_check = dataclasses.replace(setting, seconds=seconds)
            begin = time.monotonic()
            try:
                _run(check, of_check, outcome, keep)
            finally:
                outcome.seconds = time.monotonic() - begin
                keep()
        keep()
        say(line_of(outcome))
        if check is plan.MACHINE:
            if outcome.state != PASSED:
                break
            setting = dataclasses.replace(setting, devices=_devices(outcome))
    else:
        record.is_complete = True
    keep()


def line_of(outcome: Outcome) -> str:
    """Returns a line about an outcome, and lines about what is wrong."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    line = f"{outcome.title}: {outcome.state}, {outcome.seconds:.0f} s{reason}"
    return "\n".join([line, *(f"  wrong: {text}" for text in outcome.wrong)])


def _run(check: Check, setting: Setting, outcome: Outcome, keep: Callable[[], None]) -> None:
    """Runs a check; adds to its outcome what it finds, and sets its state."""
    of_check = json.dumps(dataclasses.asdict(setting))
    command = [sys.executable, "-m", "benchmarks.gpu.check", check.function, of_check]
    variables = environment(setting.device if check.computes else "cpu", setting.devices)
    keep()
    with signals_deferred():
        process = AnsweringProcess(command, variables)
    deadline = time.monotonic() + setting.seconds
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.output, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                for answer in process.read_answers():
                    outcome.findings.append(from_json(answer))
                keep()
        outcome.state = LATE
        outcome.reason = f"not done in {setting.seconds:.0f} s{process.last_errors()}"
    except ProcessEndedError as error:
        outcome.state = WRONG if outcome.wrong else PASSED
        if process.status != 0:
            outcome.state, outcome.reason = FAILED, str(error)
    finally:
        process.end(_SECONDS_TO_END)
        if outcome.state == RUNNING:  # Ctrl-C
            outcome.reason = "interrupted"


def _devices(outcome: Outcome) -> int:
    for finding in outcome.findings:
        if isinstance(finding, Row) and finding.table == MACHINE and finding.cells[""] == DEVICES:
            return int(finding.cells["value"] or 0)
    return 0
