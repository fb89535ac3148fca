"""A census of what processes hold, and what one census has more than another; on Linux only.

It counts open descriptors, threads, shared memory, temporary files, processes, compiled programs
and resident memory. A loop that leaks has more of something after 100 rounds than after 10.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

#: Seconds in which what is given back in other threads and processes must have been.
SECONDS_TO_SETTLE = 40.0

#: The numbers in names of descriptors, files and threads, which differ from one to the next.
_NUMBERS = re.compile(r"\d+")
_SHARED = re.compile(r"/memfd:|/dev/shm/")


@dataclasses.dataclass(frozen=True)
class Census:
    """What processes hold, by kind.

    Attributes:
        counts: How many of each kind: "descriptors: socket", "threads: python", ...
        memory: Their resident memory, in bytes.
    """

    counts: collections.Counter[str]
    memory: int

    def count(self, what: str) -> int:
        """Returns how many there are of all kinds that begin with `what`."""
        return sum(number for kind, number in self.counts.items() if kind.startswith(what))


def census(*processes: int, folders: Iterable[Path | str] = ()) -> Census:
    """Counts what processes hold.

    Args:
        processes: Their numbers. None: this process, after a garbage collection.
        folders: Folders whose files count as temporary files.
    """
    counts: collections.Counter[str] = collections.Counter()
    memory = 0
    for process in processes or [os.getpid()]:
        if process == os.getpid():
            gc.collect()
            counts["compiled programs"] += _compiled_programs()
        folder = Path("/proc", str(process))
        counts.update(f"descriptors: {kind}" for kind in _descriptors(folder))
        counts.update(f"threads: {name}" for name in _threads(folder))
        counts.update(f"shared memory: {name}" for name in _mapped(folder))
        counts["processes"] += len(_children(folder))
        memory += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    for path in folders:
        counts[f"temporary files: {path}"] += sum(1 for _ in Path(path).rglob("*"))
    counts["shared memory: with a name"] = len(named_shared_memory())
    return Census(+counts, memory)


def leaked(before: Census, after: Census, memory: int, **allowed: int) -> list[str]:
    """Returns what `after` has more than `before`, in words.

    Args:
        before: The census before a loop, when what is made once has been made.
        after: The census after it.
        memory: How many bytes of resident memory may have been added. The allocators of C and of
            Python keep what is freed, in pieces, so that it is never none.
        allowed: How many more there may be of what begins with a name: `threads=2`.
    """
    found = []
    kinds = {kind.partition(":")[0] for kind in before.counts | after.counts}
    for kind in sorted(kinds):
        more = after.count(kind) - before.count(kind)
        if more > allowed.get(kind.replace(" ", "_"), 0):
            new = {
                name: number - before.counts[name]
                for name, number in after.counts.items()
                if name.startswith(kind) and number > before.counts[name]
            }
            found.append(f"{kind}: {more} more, of which {new}")
    if after.memory > before.memory + memory:
        grown = (after.memory - before.memory) / 2**20
        found.append(f"memory: {grown:.1f} MiB more; {memory / 2**20:.1f} MiB are allowed")
    return found


def settled(
    take: Callable[[], Census], before: Census, memory: int, **allowed: int
) -> tuple[Census, list[str]]:
    """Takes a census until it has nothing more than `before`; after a while, the last one.

    Returns:
        The census, and what `leaked` says of it.
    """
    last = time.monotonic() + SECONDS_TO_SETTLE
    while True:
        after = take()
        found = leaked(before, after, memory, **allowed)
        if not found or time.monotonic() > last:
            return after, found
        time.sleep(0.2)


def named_shared_memory() -> set[Path]:
    """Returns the files in shared memory that could be of Unison."""
    patterns = ("unison*", "handover*", "state*")
    return {path for pattern in patterns for path in Path("/dev/shm").glob(pattern)}


def process_tree(process: int) -> list[int]:
    """Returns a process and all that descend from it."""
    return [
        process,
        *(one for child in _children(Path("/proc", str(process))) for one in process_tree(child)),
    ]


def _descriptors(process: Path) -> list[str]:
    found = []
    for number in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):  # the one by which the folder is listed
            found.append(_NUMBERS.sub("", os.readlink(process / "fd" / number)))
    return [kind for kind in found if kind != "/proc//fd"]


def _threads(process: Path) -> list[str]:
    found = []
    for thread in (process / "task").iterdir():
        with contextlib.suppress(OSError):
            found.append(_NUMBERS.sub("", (thread / "comm").read_text().strip()))
    return found


def _mapped(process: Path) -> list[str]:
    """Returns the mappings of files in memory, whether they have a name or not."""
    lines = (process / "maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[5] for line in lines if _SHARED.search(line))
    return [_NUMBERS.sub("", path) for path in paths]


def _children(process: Path) -> list[int]:
    """Returns a process' children, those included that nobody has waited for."""
    found: list[int] = []
    for thread in (process / "task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


def _compiled_programs() -> int:
    jax = sys.modules.get("jax")
    if jax is None:
        return 0
    return len(jax.devices()[0].client.live_executables())
