"""The kernels of a compiled program, which a device starts one after the other."""

from __future__ import annotations

import re

from unison.planning.collectives import (
    BRANCHES,
    bytes_of_type,
    computations_of,
    runs_of,
    trips_of,
)

_OPERATION = re.compile(r"^\s*(?:ROOT )?%[\w.\-]+ = (?:\(.*?\)|\S+) (?P<kind>[\w\-]+)\(")
_CALLED = re.compile(r"(?:to_apply|body|condition)=%?([\w.\-]+)")

#: Operations that start nothing: they name a value, or wait for one.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier "
    "partition-id replica-id".split()
)


_VALUE = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) ")
_NAMES = re.compile(r"%([\w.\-]+)")


def sizes_of(lines: list[str]) -> dict[str, int]:
    """Returns the bytes of the values in the lines of a computation, by their names."""
    values = filter(None, map(_VALUE.match, lines))
    return {value["name"]: bytes_of_type(value["type"]) for value in values}


def bytes_accessed_in(line: str, sizes: dict[str, int]) -> int:
    """Returns the bytes of an operation's operands and results.

    Args:
        line: The operation.
        sizes: Those of its computation; see `sizes_of`.
    """
    operation, _, _ = line.partition("), ")  # without its attributes
    return sum(sizes.get(name, 0) for name in _NAMES.findall(operation))


def bytes_of_custom_calls(hlo: str) -> int:
    """Returns the bytes that a program's calls of libraries read and write, in all their runs."""
    computations = dict(computations_of(hlo))
    runs = runs_of(computations)
    total = 0
    for name, lines in computations.items():
        sizes = sizes_of(lines)
        calls = [line for line in lines if " custom-call(" in line]
        total += runs[name] * sum(bytes_accessed_in(line, sizes) for line in calls)
    return total


def starts_kernel(line: str) -> bool:
    """Whether a line of a program starts a kernel, as one that names a value or waits does not."""
    found = _OPERATION.match(line)
    return found is not None and found["kind"] not in _FREE and not found["kind"].endswith("-done")


def kernels_of(hlo: str) -> int:
    """Returns the number of kernels that a run of a program launches, with repetitions in loops.

    Of a conditional, the branch with most counts; a loop of unknown length counts once.

    Args:
        hlo: The text of the program: `compiled.as_text()`.
    """
    computations = dict(computations_of(hlo))

    def count(name: str) -> int:
        return sum(map(count_line, computations.get(name, [])[1:]))

    def count_line(line: str) -> int:
        found = _OPERATION.match(line)
        if found is None:
            return 0
        kind = found["kind"]
        if kind == "conditional":
            branches = [name for listed in BRANCHES.findall(line) for name in listed.split(",")]
            return max((count(branch.strip().lstrip("%")) for branch in branches), default=0)
        if kind in ("while", "call"):
            return sum(map(count, _CALLED.findall(line))) * trips_of(line, computations)
        return int(starts_kernel(line))

    entry = next(name for name, lines in computations.items() if lines[0].startswith("ENTRY"))
    return count(entry)
