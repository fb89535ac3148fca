"""`Results`: the file that `unison bench` writes, and reads when results are compared."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

from unison.benching.points import Point
from unison.benching.records import Record
from unison.storage.decoding import parsed_json

_FORMAT = 1
_WHAT = "unison bench"


class NoResultsError(ValueError):
    """A file that is not a result of `unison bench`."""


@dataclasses.dataclass(frozen=True)
class Results:
    """All that has been measured.

    Attributes:
        target: What has been measured, in words.
        machine: Where.
        notes: Remarks about the measurement.
        rounds: For every point, a record of each round.
    """

    target: str
    machine: str
    notes: list[str]
    rounds: dict[Point, list[Record]]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries."""
        records = [record for of_point in self.rounds.values() for record in of_point]
        return records[0].versions if records else {}

    def write(self, path: Path) -> None:
        """Writes them as JSON."""
        said = {
            "what": _WHAT,
            "format": _FORMAT,
            "target": self.target,
            "machine": self.machine,
            "notes": self.notes,
            "points": [
                {**dataclasses.asdict(point), "rounds": [record.as_dict() for record in records]}
                for point, records in self.rounds.items()
            ],
        }
        path.write_text(json.dumps(said) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file that `write` has written.

        Raises:
            NoResultsError: The file is something else, or of another version.
        """
        try:
            said = parsed_json(path.read_bytes())
        except OSError as error:
            raise NoResultsError(f"Cannot read {path}: {error.strerror}.") from error
        except ValueError as error:
            raise NoResultsError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(said, dict) or said.get("what") != _WHAT:
            raise NoResultsError(
                f"{path} does not hold what unison bench writes. Give the results.json of a run."
            )
        if (format_of := said.get("format")) != _FORMAT:
            raise NoResultsError(
                f"{path} is of format {format_of!r:.80}; this version reads format {_FORMAT}. "
                "Measure again with one version of unison."
            )
        try:
            rounds = {
                _point(each): [Record.of(record) for record in each["rounds"]]
                for each in said["points"]
            }
            return cls(said["target"], said["machine"], said["notes"], rounds)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise NoResultsError(f"{path} is corrupt: {reason}") from error


def _point(said: dict[str, Any]) -> Point:
    return Point(*(said[field.name] for field in dataclasses.fields(Point)))


def this_machine() -> str:
    """Returns a description of this machine."""
    model = platform.processor() or platform.machine()
    lines = Path("/proc/cpuinfo")
    if lines.exists():
        names = [
            line.split(":")[1] for line in lines.read_text().splitlines() if "model name" in line
        ]
        model = names[0].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"
