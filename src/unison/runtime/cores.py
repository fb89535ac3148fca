"""The cores that this process may use: their number, and which lie near a PCI device."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_CGROUPS_OF_PROCESS = pathlib.Path("/proc/self/cgroup")
_SYSTEM = pathlib.Path("/sys")


def available_cores() -> int:
    """Returns the number of cores that this process may use, at least 1.

    Those are the cores on which it may run (its affinity), but no more than the time on them that
    its control groups allow, as in a container with a limit of CPUs.
    """
    return max(1, min([number_of_allowed_cores(), *(int(quota) for quota in _quotas())]))


def number_of_allowed_cores() -> int:
    """Returns the number of cores on which this process may run, whatever its share of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """Yields the limits of this process's control groups, in cores."""
    try:
        lines = _CGROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS  # version 1, or 2
        for folder in _and_parents(root, path):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = _limit_in(folder, is_first_version=bool(controllers))
                if quota > 0:
                    yield quota / period


def _and_parents(root: pathlib.Path, path: str) -> Iterator[pathlib.Path]:
    """Yields a control group's folder, and those of the groups that it belongs to.

    In a container the path may be that outside of it: then only the root is there.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _limit_in(folder: pathlib.Path, is_first_version: bool) -> tuple[int, int]:
    """Returns the microseconds of processor time in each period, and the period."""
    if is_first_version:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [(folder / name).read_text() for name in names]
    else:
        words = (folder / "cpu.max").read_text().split()
    quota, period = map(int, words)  # -1, or `max`, for no limit
    return quota, period


def cores_near(pci_device: str) -> list[int] | None:
    """Returns the cores of a PCI device's NUMA node on which this process may run.

    The threads of a physical core are next to each other. None if the system does not say.

    Args:
        pci_device: Its address: `"0000:3b:00.0"`.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        node = int((_SYSTEM / "bus/pci/devices" / pci_device / "numa_node").read_text())
        listed = (_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text()
        own = set(_numbers_in(listed)) & os.sched_getaffinity(0)
    except (OSError, ValueError):  # a machine with one node may say -1
        return None
    return sorted(own, key=lambda core: (_first_thread_of(core), core))


def _first_thread_of(core: int) -> int:
    """Returns the first of the logical cores that share a physical core."""
    siblings = _SYSTEM / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    try:
        return min(_numbers_in(siblings.read_text()))
    except (OSError, ValueError):
        return core


def _numbers_in(listed: str) -> list[int]:
    """Returns the numbers of a list in the kernel's form.

    Examples:
        >>> _numbers_in("0-2,8")
        [0, 1, 2, 8]
    """
    numbers: list[int] = []
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def equal_shares(cores: Sequence[int], count: int) -> list[list[int]]:
    """Returns `count` disjoint parts of a list of cores, of equal size.

    Examples:
        >>> equal_shares([0, 4, 1, 5, 2], 2)
        [[0, 4], [1, 5]]
    """
    each = len(cores) // count
    return [list(cores[place * each : (place + 1) * each]) for place in range(count)]
