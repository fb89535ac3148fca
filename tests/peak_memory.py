"""How much memory a piece of a program takes at most, beyond what its process has."""

import contextlib
import dataclasses
from pathlib import Path

_STATUS = Path("/proc/self/status")
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
    before = _resident("VmRSS")
    try:
        yield peak
    finally:
        peak.bytes = max(0, _resident("VmHWM") - before)


def _resident(name):
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
