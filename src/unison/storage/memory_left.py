"""The memory that this process can still allocate."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Iterator

_CGROUP = pathlib.Path("/sys/fs/cgroup")


def memory_left() -> tuple[int, str] | None:
    """Returns the number of bytes that this process can still allocate, and what limits them.

    None if the system does not provide this.
    """
    return min(_limits(), default=None)


def memory_in_words() -> str:
    """Returns a sentence on how much memory is left, and what limits it."""
    left = memory_left()
    if left is None:
        return "How much this process may take is not known."
    return f"This process can get {left[0]:,} bytes more ({left[1]})."


def _limits() -> Iterator[tuple[int, str]]:
    own = _numbers(pathlib.Path("/proc/self/status"))
    for name, limit, taken in (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and taken in own:
            yield max(0, most - 1024 * own[taken]), name
    of_system = _numbers(pathlib.Path("/proc/meminfo"))
    if "MemAvailable" in of_system:
        yield 1024 * of_system["MemAvailable"], "what the machine has free"
    try:
        most, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # there is no cgroup, or no limit
        return
    # The kernel can reclaim the page cache, but not the anonymous files in memory that it counts.
    counted = _numbers(_CGROUP / "memory.stat")
    cache = counted.get("file", 0) - counted.get("shmem", 0)
    yield max(0, most - used + cache), "the cgroup"


def _numbers(path: pathlib.Path) -> dict[str, int]:
    """Returns the numbers in a file with lines `name: number ...`."""
    found = {}
    try:
        for line in path.read_text().splitlines():
            name, *values = line.replace(":", " ").split()
            if values and values[0].isdigit():
                found[name] = int(values[0])
    except OSError:
        pass
    return found
