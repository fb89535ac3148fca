"""Slurm's compact lists of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PART_OF_LIST = re.compile(r"(?P<prefix>[^,\[\]]*)(?:\[(?P<ranges>[^\]]+)\](?P<suffix>[^,\[\]]*))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the names in Slurm's compact list of nodes, in order.

    Raises:
        ValueError: The list is malformed.

    Examples:
        >>> expand_hostlist("n[1-2],m5,o[03-04,07]")
        ['n1', 'n2', 'm5', 'o03', 'o04', 'o07']
    """
    names: list[str] = []
    position = 0
    while position < len(hostlist):
        part = _PART_OF_LIST.match(hostlist, position)
        assert part is not None  # it may be empty
        position = part.end()
        if part.end() == part.start() or hostlist[position : position + 1] not in ("", ","):
            raise ValueError(f"Expected a list of nodes such as n[1-3],m5. Received: {hostlist!r}")
        position += 1
        if part["ranges"] is None:
            names.append(part["prefix"])
        else:
            numbers = _numbers(part["ranges"], hostlist)
            names += [f"{part['prefix']}{number}{part['suffix']}" for number in numbers]
    return names


def _numbers(ranges: str, hostlist: str) -> Iterator[str]:
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ValueError(f"Expected numbers such as [1-3,5]. Received: {hostlist!r}")
        first, last = found[1], found[2] or found[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
