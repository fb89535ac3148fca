"""How long tests take: `make durations` records it, and slow tests are marked by it.

`durations.txt` has the seconds of each test function that takes more than `LIMIT`, the mean over
its parameters, and of the other functions those parameters that take more: `make test` leaves these
out, and `make check` runs them. A test that is marked `smoke` always runs.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: The seconds that a test of `make test` takes at most.
LIMIT = 0.4

RECORD = Path(__file__).with_suffix(".txt")

_HEADER = f"""\
# Written by `make durations`: the seconds of every test function that takes more than {LIMIT}, the
# mean over its parameters, and of single parameters that do. See durations.py.
"""


class Durations(NamedTuple):
    """What was recorded.

    Attributes:
        slow: The seconds of slow tests, as `path::name` or `path::name[parameters]`, the path below
            the root of the repository.
    """

    slow: Mapping[str, float]

    @classmethod
    def read(cls) -> Durations:
        lines = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
        pairs = [line.split(maxsplit=1) for line in lines]
        return cls({name: float(seconds) for seconds, name in pairs})

    def is_slow(self, test: str) -> bool:
        """Whether a test, by its node's id, takes more than `LIMIT` seconds."""
        return test in self.slow or function_of(test) in self.slow

    def seconds(self, test: str) -> float:
        """The recorded seconds of a test, by its node's id; 0 if it is not slow."""
        return self.slow.get(test, self.slow.get(function_of(test), 0.0))


def function_of(test: str) -> str:
    """The function of a test, without its parameters.

    >>> function_of("tests/single/test_run.py::test_a_sum[2-x::y]")
    'tests/single/test_run.py::test_a_sum'
    """
    return test.partition("[")[0]


class Recorder:
    """A plugin of pytest that records how long the tests take that pass."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, float]] = collections.defaultdict(dict)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self._calls[function_of(report.nodeid)][report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        RECORD.write_text(_HEADER + "".join(f"{line}\n" for line in self.lines()))

    def lines(self) -> list[str]:
        """What `durations.txt` has, rounded: the next recording should change what has changed."""
        slow = {}
        for function, seconds in self._calls.items():
            mean = sum(seconds.values()) / len(seconds)
            own = {function: mean} if mean > LIMIT else seconds
            slow |= {name: value for name, value in own.items() if value > LIMIT}
        return [f"{seconds:.1f} {name}" for name, seconds in sorted(slow.items())]
