"""What was found, as a file that is complete at every moment."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from benchmarks.gpu.findings import Finding, Note, Row, Wrong, from_json, to_json
from unison.storage.atomic import replacing

#: The states of a check that has run, or has not.
PASSED, WRONG, FAILED, LATE, LEFT_OUT = "passed", "wrong", "failed", "out of time", "left out"

#: The state of one that runs, as a run that was cut off leaves it.
RUNNING = "running"


@dataclasses.dataclass
class Outcome:
    """What became of a check.

    Attributes:
        name: Its name.
        title: Its title.
        state: One of the states above.
        seconds: How long it took.
        reason: Why it has failed, is late, or was left out.
        findings: What it found, in order.
    """

    name: str
    title: str
    state: str = RUNNING
    seconds: float = 0.0
    reason: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [finding.text for finding in self.findings if isinstance(finding, Wrong)]

    @property
    def notes(self) -> list[str]:
        return [finding.text for finding in self.findings if isinstance(finding, Note)]

    def tables(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for finding in self.findings:
            if isinstance(finding, Row):
                found.setdefault(finding.table, []).append(finding)
        return found


@dataclasses.dataclass
class Record:
    """All outcomes of a run.

    Attributes:
        machine: `benchmarks.machine.description()`.
        device: "gpu" or "cpu".
        outcomes: Those of the checks up to now.
        is_complete: Whether the run has come to its end.
    """

    machine: dict[str, Any]
    device: str
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    is_complete: bool = False

    @property
    def status(self) -> int:
        """The exit status: 0, or 1 if a result is wrong, 3 if a check could not be completed.

        It is 2 if there was nothing to check.
        """
        if len(self.outcomes) < 2:  # the machine alone
            return 2
        if any(outcome.wrong for outcome in self.outcomes):
            return 1
        ended = {PASSED, LEFT_OUT}
        return 0 if all(outcome.state in ended for outcome in self.outcomes) else 3

    def write(self, path: pathlib.Path) -> None:
        fields = {"machine": self.machine, "device": self.device, "is_complete": self.is_complete}
        checks = []
        for outcome in self.outcomes:
            about = {name: getattr(outcome, name) for name in ("name", "title", "state", "reason")}
            about["seconds"] = round(outcome.seconds, 1)
            checks.append(about | {"findings": list(map(to_json, outcome.findings))})
        with replacing(str(path)) as file:
            file.write(json.dumps(fields | {"checks": checks}, indent=1).encode() + b"\n")

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Record:
        """Returns what `write` has written."""
        fields = dict(fields)
        outcomes = []
        for check in fields.pop("checks"):
            findings = list(map(from_json, check["findings"]))
            outcomes.append(Outcome(**check | {"findings": findings}))
        return cls(outcomes=outcomes, **fields)
