"""How much memory a process takes at most, and a piece of a program beyond what it has."""

import contextlib
import dataclasses
from pathlib import Path

_PEAK = Path("/proc/self/clear_refs")


@dataclasses.dataclass
class Peak:
    """Of a block, when it has ended: the most bytes that were resident beyond those before it."""

    bytes: int = 0


@contextlib.contextmanager
def peak_memory():
    """Measures a block; on Linux only."""
    peak = Peak()
    _PEAK.write_text("5")  # the high-water mark becomes what is resident now
    before = _memory("VmRSS")
    try:
        yield peak
    finally:
        peak.bytes = max(0, _memory("VmHWM") - before)


def most_bytes(process):
    """Returns how many bytes a `Popen` had in memory at most since its program began.

    `ru_maxrss`, which it could tell of itself, begins with what its parent had.
    """
    return _memory("VmHWM", process.pid)


def _memory(name, pid="self"):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024
