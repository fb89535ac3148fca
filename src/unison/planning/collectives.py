"""The collectives of a compiled program, read off the text of its HLO."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

#: Of every collective: what part of its bytes a device sends, in a group of n.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}
_KINDS = "|".join(sorted(_SENT, key=len, reverse=True))

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_COLLECTIVE = re.compile(
    rf"%(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\("
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_execution_thread)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,]*\}|\[[\d,]+\]<=|\{\})")
_NUM_PARTITIONS = re.compile(r"num_partitions=(\d+)")


class Collective(NamedTuple):
    """Collectives of one kind and size in a program.

    Attributes:
        kind: As XLA calls it: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, ...
        bytes: The whole value's: what is reduced, gathered or exchanged, on each device.
        tensors: How many tensors travel together in one.
        group_size: How many devices take part.
        runs: How many of them a step runs.
    """

    kind: str
    bytes: int
    tensors: int
    group_size: int
    runs: int = 1

    @property
    def sent_bytes(self) -> int:
        """The bytes that a device sends for all of them in a step, by a bandwidth-optimal ring."""
        return round(self.runs * self.bytes * _SENT[self.kind](self.group_size))


def collectives_of(hlo: str) -> list[Collective]:
    """Returns the collectives of a compiled program, those of loops as often as they run.

    Args:
        hlo: The text of the program: `compiled.as_text()`.

    Returns:
        One entry for each kind and size, the largest first; none for those of a device alone.
    """
    computations = dict(_computations(hlo))
    partitions = _NUM_PARTITIONS.search(hlo)
    num_devices = int(partitions[1]) if partitions else 1
    runs = _runs_of(computations)
    counts: collections.Counter[Collective] = collections.Counter()
    for name, lines in computations.items():
        for line in lines:
            found = _COLLECTIVE.search(line)
            if found is not None:
                counts[_collective(found, line, num_devices)] += runs[name]
    every = [
        collective._replace(runs=count)
        for collective, count in counts.items()
        if count and collective.group_size > 1
    ]
    return sorted(every, key=lambda one: (-one.sent_bytes, one.kind))


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in hlo.splitlines():
        begins = _COMPUTATION.match(line)
        if begins is not None:
            name, lines = begins["name"], [line]
        elif line.startswith("}"):
            yield name, lines
            name, lines = "", []
        elif name:
            lines.append(line)


def _runs_of(computations: dict[str, list[str]]) -> collections.Counter[str]:
    """Returns how often every computation runs; a loop of unknown length counts once."""
    runs: collections.Counter[str] = collections.Counter()
    entry = next(name for name, lines in computations.items() if lines[0].startswith("ENTRY"))

    def visit(name: str, times: int) -> None:
        if name not in computations:
            return
        runs[name] += times
        for line in computations[name][1:]:
            trips = _TRIPS.search(line)
            inner = times * (int(trips[1]) if trips and " while(" in line else 1)
            names = _CALLED.findall(line)
            for listed in _BRANCHES.findall(line):
                names += [branch.strip().lstrip("%") for branch in listed.split(",")]
            for called in names:
                visit(called, inner)

    visit(entry, 1)
    return runs


def _collective(found: re.Match[str], line: str, num_devices: int) -> Collective:
    kind = found["kind"]
    arrays = [(_bytes_of(array), array) for array in _ARRAY.finditer(found["type"])]
    sizes = [size for size, _ in arrays]
    if found["start"] and kind in ("all-gather", "collective-permute"):
        sizes = sizes[len(sizes) // 2 :] if kind == "all-gather" else sizes[1:2]
    group = _group_size(line, num_devices)
    whole = sum(sizes) * (group if kind == "reduce-scatter" else 1)
    return Collective(kind, whole, len(sizes), group)


def _group_size(line: str, num_devices: int) -> int:
    groups = _GROUPS.search(line)
    if groups is None or groups[1] == "{}":
        return num_devices
    if groups[1].startswith("{{"):
        return groups[1].count(",") + 1
    return int(groups[1].strip("[]<=").split(",")[-1])


def _bytes_of(array: re.Match[str]) -> int:
    shape = [int(size) for size in array["shape"].split(",") if size]
    bits = 8 if array["dtype"] == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", array["dtype"]))
    return math.ceil(math.prod(shape) * bits / 8)
