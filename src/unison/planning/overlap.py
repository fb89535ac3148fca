"""The work that a program does while a collective is under way, read off its schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from unison.planning.collectives import (
    COLLECTIVE,
    FUSED,
    Collective,
    Started,
    collective_in,
    computations_of,
    continues,
    devices_of,
    repeated_in,
    runs_of,
    started_in,
)
from unison.planning.kernels import bytes_accessed_in, sizes_of, starts_kernel

_DONE = re.compile(r" [\w-]+-done\(%?(?P<start>[\w.\-]+)\)")
_IS_SCHEDULED = "is_scheduled=true"
#: In a GPU's program, a start that does not return before the end, whatever follows it.
_IS_SYNCHRONOUS = '"is_sync":true'


class Overlap(NamedTuple):
    """A collective of a program, and what is computed between its start and its end.

    Attributes:
        collective: The collective; `runs` is that of this place in the program.
        kernels: The kernels that the device starts after the collective, and before it waits for
            its end. They do not need its result.
        work: The bytes that these read and write.
    """

    collective: Collective
    kernels: int
    work: int

    @property
    def is_hidden(self) -> bool:
        """Whether there is work to hide the collective behind: kernels for as many bytes."""
        return self.work >= self.collective.bytes


def overlaps_of(hlo: str) -> list[Overlap]:
    """Returns the collectives of a compiled program in the order of its schedule.

    A collective that is one operation, without a start and an end, or whose start is marked as
    synchronous, has nothing to hide behind: the device waits for it, as on CPUs. Those of a device
    alone are left out.

    Args:
        hlo: The text of the program: `compiled.as_text()`. If it has not been scheduled, its
            operations are not in the order in which they run, and the list is empty.

    Examples:
        >>> hlo = '''HloModule step, is_scheduled=true, num_partitions=8
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8]{0} parameter(0)
        ...   %start = f32[8]{0} all-reduce-start(%p), replica_groups={}, to_apply=%add
        ...   %product = f32[8]{0} fusion(%p), kind=kLoop, calls=%computation
        ...   ROOT %done = f32[8]{0} all-reduce-done(%start)
        ... }'''
        >>> (overlap,) = overlaps_of(hlo)
        >>> overlap.collective.kind, overlap.collective.bytes, overlap.kernels, overlap.work
        ('all-reduce', 32, 1, 64)
    """
    if _IS_SCHEDULED not in hlo.partition("\n")[0]:
        return []
    computations = dict(computations_of(hlo))
    num_devices = devices_of(hlo)
    runs = runs_of(computations)
    places = {
        (name, place): started
        for name, lines in computations.items()
        for place, line in enumerate(lines[1:])
        if (started := started_in(line, computations, num_devices)) is not None
    }
    fused = repeated_in(computations) | {started.computation for started in places.values()}
    return [
        overlap._replace(collective=overlap.collective._replace(runs=runs[name]))
        for name, lines in computations.items()
        if runs[name] and name not in fused
        for overlap in _in_order(name, lines[1:], num_devices, places)
        if overlap.collective.group_size > 1
    ]


def hidden_share(overlaps: list[Overlap]) -> float | None:
    """Returns the share of the bytes of collectives that has work to hide behind, if any."""
    of_all = [(one.collective.bytes * one.collective.runs, one.is_hidden) for one in overlaps]
    total = sum(size for size, _ in of_all)
    return sum(size for size, is_hidden in of_all if is_hidden) / total if total else None


def _in_order(
    name: str, lines: list[str], num_devices: int, places: dict[tuple[str, int], Started]
) -> Iterator[Overlap]:
    """Yields the overlaps of a computation; `places` has the fusions that start collectives."""
    sizes = sizes_of(lines)
    for place, line in enumerate(lines):
        started = places.get((name, place))
        if started is not None:
            yield _until_fusion_ends(started, lines[place + 1 :], sizes)
            continue
        found = COLLECTIVE.search(line)
        if found is None:
            continue
        kernels = work = 0
        is_asynchronous = found["start"] and _IS_SYNCHRONOUS not in line
        for later in lines[place + 1 :] if is_asynchronous else ():
            done = _DONE.search(later)
            if done is not None and done["start"] == found["name"]:
                break
            if starts_kernel(later) and COLLECTIVE.search(later) is None:
                kernels += 1
                work += bytes_accessed_in(later, sizes)
        yield Overlap(collective_in(found, line, num_devices), kernels, work)


def _until_fusion_ends(started: Started, later: list[str], sizes: dict[str, int]) -> Overlap:
    """Returns the overlap of a collective that is in fusions.

    Args:
        started: The fusion that starts it; the one that waits for it has the same number.
        later: The lines after that one.
        sizes: The bytes of their values.
    """
    end = started.name.replace("-start", "-done")
    kernels = work = 0
    for line in later:
        fused = FUSED.match(line)
        if fused is not None and fused["name"] == end:
            return Overlap(started.collective, kernels, work)
        if fused is None and starts_kernel(line) and COLLECTIVE.search(line) is None:
            kernels += 1
            # The state of the collective is among the operands and the results.
            state = 2 * sizes[started.name] if continues(line) else 0
            work += max(0, bytes_accessed_in(line, sizes) - state)
    return Overlap(started.collective, 0, 0)
