"""The collectives of a compiled program, read off the text of its HLO."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

#: The fraction of its bytes that a device sends in each collective, in a group of n.
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
#: A collective in a line of a program; `start` if another line waits for its end.
COLLECTIVE = re.compile(
    rf"%(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\("
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_execution_thread)=%?([\w.\-]+)")
#: A collective that a TPU runs beside other kernels is in several fusions: one that starts it,
#: those that continue it while they compute, and one that waits for its end. Each contains it.
FUSED = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>async-collective-(?P<part>start|done)[\w.\-]*) = .*? fusion\("
    r".*\bcalls=%?(?P<calls>[\w.\-]+)"
)
#: The beginning of the names of what those compute that continue it.
_CONTINUES = "async_collective_fusion"
#: The branches that a conditional chooses from, in its line.
BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r" while\(.*?condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]")
#: An array of all devices, in an order of its axes.
_DEVICES = r"\[(?P<devices>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
#: The first group, as a list, as a part of an array of all devices, or by axes of a mesh.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}"
    rf"|\[(?P<shape>[\d,]+)\]<={_DEVICES}"
    r"|mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<axes>[^}]*)\})"
)
_IOTA = re.compile(_DEVICES)
_SIZE_OF_AXIS = re.compile(r"'([^']*)'=(\d+)")
#: An axis of a group; for a part of an axis, the sizes before it and of it.
_AXIS_OF_GROUP = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_NUM_PARTITIONS = re.compile(r"num_partitions=(\d+)")


class Collective(NamedTuple):
    """Collectives of one kind and size in a program.

    Attributes:
        kind: As XLA calls it: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, ...
        bytes: The bytes of the whole value that is reduced, gathered or exchanged, on each device.
        tensors: The number of tensors that are sent together in one.
        group_size: The number of devices that take part.
        runs: The number of times that a step runs it.
        span: The number of devices from the first of a group to its last; for permutations, from
            one that sends to the one that receives.
    """

    kind: str
    bytes: int
    tensors: int
    group_size: int
    runs: int = 1
    span: int = 0

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
    computations = dict(computations_of(hlo))
    num_devices = devices_of(hlo)
    runs = runs_of(computations)
    repeated = repeated_in(computations)
    counts: collections.Counter[Collective] = collections.Counter()
    for name, lines in computations.items():
        if name in repeated:
            continue
        for line in lines:
            found = COLLECTIVE.search(line)
            if found is not None:
                counts[collective_in(found, line, num_devices)] += runs[name]
    every = [
        collective._replace(runs=count)
        for collective, count in counts.items()
        if count and collective.group_size > 1
    ]
    return sorted(every, key=lambda one: (-one.sent_bytes, one.kind))


def devices_of(hlo: str) -> int:
    """Returns the number of devices that a program runs on."""
    partitions = _NUM_PARTITIONS.search(hlo)
    return int(partitions[1]) if partitions else 1


def computations_of(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each computation of a program, and its lines, its head first."""
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


def repeated_in(computations: dict[str, list[str]]) -> set[str]:
    """Returns the fused computations of a TPU's program whose collective another one starts."""
    return {name for name in computations if name.startswith(_CONTINUES)} | {
        found["calls"]
        for lines in computations.values()
        for line in lines
        if (found := FUSED.match(line)) is not None and found["part"] == "done"
    }


class Started(NamedTuple):
    """A fusion of a TPU's program that starts a collective.

    Attributes:
        name: The name of the fusion.
        computation: The name of the fused computation.
        collective: The collective in it.
    """

    name: str
    computation: str
    collective: Collective


def started_in(line: str, computations: dict[str, list[str]], num_devices: int) -> Started | None:
    """Returns the collective that a fusion of a TPU's program starts; None for other lines."""
    fused = FUSED.match(line)
    if fused is None or fused["part"] == "done":
        return None
    for inner in computations.get(fused["calls"], [])[1:]:
        found = COLLECTIVE.search(inner)
        if found is not None:
            collective = collective_in(found, inner, num_devices)
            return Started(fused["name"], fused["calls"], collective)
    return None


def continues(line: str) -> bool:
    """Whether a line of a TPU's program is a fusion that computes while a collective continues."""
    return f"calls=%{_CONTINUES}" in line


def trips_of(line: str, computations: dict[str, list[str]]) -> int:
    """Returns the trip count of the loop in a line: 1 if it is unknown, or if it is not a loop."""
    loop = _CONDITION.search(line)
    if loop is None:
        return 1
    known = _TRIPS.search(line)
    if known is not None:
        return int(known[1])
    # TPUs' programs do not contain it. JAX counts from 0 while the counter is less than a constant.
    condition = computations.get(loop[1], [])
    limits = [found[1] for inner in condition if (found := _LIMIT.search(inner))]
    compares = any("direction=LT" in inner for inner in condition)
    return int(limits[0]) if compares and len(limits) == 1 else 1


def runs_of(computations: dict[str, list[str]]) -> collections.Counter[str]:
    """Returns the number of runs of every computation; a loop of unknown length counts once."""
    runs: collections.Counter[str] = collections.Counter()
    entry = next(name for name, lines in computations.items() if lines[0].startswith("ENTRY"))

    def visit(name: str, times: int) -> None:
        if name not in computations:
            return
        runs[name] += times
        for line in computations[name][1:]:
            inner = times * trips_of(line, computations)
            names = _CALLED.findall(line)
            for listed in BRANCHES.findall(line):
                names += [branch.strip().lstrip("%") for branch in listed.split(",")]
            for called in names:
                visit(called, inner)

    visit(entry, 1)
    return runs


def collective_in(found: re.Match[str], line: str, num_devices: int) -> Collective:
    """Returns the collective in a line.

    Args:
        found: The match of `COLLECTIVE`.
        line: The line.
        num_devices: The number of devices that the program runs on.
    """
    kind = found["kind"]
    arrays = [(_bytes_of(array), array) for array in _ARRAY.finditer(found["type"])]
    sizes = [size for size, _ in arrays]
    # Its operands, its results, and a context of u32. An all-reduce has its results only, before
    # jaxlib 0.12.
    if found["start"] and (kind != "all-reduce" or found["type"].startswith("((")):
        data = [size for size, array in arrays if array[0] != "u32[]"]
        sizes = data[len(data) // 2 :]
    group, span = _group(line, num_devices)
    whole = sum(sizes) * (group if kind == "reduce-scatter" else 1)
    return Collective(kind, whole, len(sizes), group, span=span)


def _group(line: str, num_devices: int) -> tuple[int, int]:
    """Returns the number of devices in a collective, and the distance between them."""
    pairs = _PAIRS.search(line)
    if pairs is not None:
        ends = re.findall(r"(\d+),(\d+)", pairs[1])
        return num_devices, 1 + max((abs(int(a) - int(b)) for a, b in ends), default=0)
    groups = _GROUPS.search(line)
    if groups is None:
        return num_devices, num_devices
    if groups["mesh"] is not None:
        first = _first_of_mesh(groups["mesh"], groups["ids"], groups["axes"])
    elif groups["first"] is not None:
        first = _numbers(groups["first"])
    else:
        first = _in_order(groups).reshape(_numbers(groups["shape"]))[0].tolist()
    return len(first), 1 + max(first) - min(first)


def _in_order(array: re.Match[str]) -> np.ndarray:
    """Returns the devices in the order of an array of `_DEVICES`."""
    sizes = _numbers(array["devices"])
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(_numbers(array["order"]) or None).ravel()


def _first_of_mesh(mesh: str, ids: str | None, axes: str) -> list[int]:
    """Returns the first group of those along axes of a mesh.

    Args:
        mesh: Its axes with their sizes: `"'a'=2,'b'=4"`.
        ids: The devices in it, if they are not in order.
        axes: Those of a group, or parts of them: `"'a','b':(1)2"`.
    """
    sizes = {name: int(size) for name, size in _SIZE_OF_AXIS.findall(mesh)}
    devices = np.arange(math.prod(sizes.values()))
    if ids is not None:
        iota = _IOTA.fullmatch(ids)
        devices = np.array(_numbers(ids)) if iota is None else _in_order(iota)
    # For each axis: the size before the part that a group has, of that part, and after it.
    parts = {name: (1, 1, size) for name, size in sizes.items()}
    for name, before, size in _AXIS_OF_GROUP.findall(axes):
        own = (int(before), int(size)) if size else (1, sizes[name])
        parts[name] = (*own, sizes[name] // math.prod(own))
    first = devices.reshape([size for part in parts.values() for size in part])
    return first[(0, slice(None), 0) * len(parts)].ravel().tolist()


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def bytes_of_type(text: str) -> int:
    """Returns the bytes of a value by its type in the text of a program, of a tuple those of all.

    Examples:
        >>> bytes_of_type("(f32[8,4]{1,0}, s32[])")
        132
    """
    return sum(map(_bytes_of, _ARRAY.finditer(text)))


def _bytes_of(array: re.Match[str]) -> int:
    shape = [int(size) for size in array["shape"].split(",") if size]
    bits = 8 if array["dtype"] == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", array["dtype"]))
    return math.ceil(math.prod(shape) * bits / 8)
