"""Which process writes a file: its machine, its number, and whether it still runs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket


def own_name() -> str:
    """Returns the name of this process: no other one has it, on any machine, at any time."""
    process = os.getpid()
    return f"{machine()}-{process}-{started_at(process)}"


#: What matches the number and the start of a process in its `own_name`, behind `machine()`.
PROCESS = r"(\d+)-(\d+)"


@functools.cache
def machine() -> str:
    """Returns a name that this machine has had since it started, and this container alone."""
    host = re.sub(r"\W", "_", socket.gethostname())
    started = namespace = ""
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        with open("/proc/sys/kernel/random/boot_id") as file:
            started = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{host}-{hashlib.sha256(f'{started} {namespace}'.encode()).hexdigest()[:12]}"


def started_at(process: int) -> str:
    """Returns when a process started, in the kernel's clock ticks; 0 where that is not known."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        # The name, in parentheses, may hold anything.
        return file.read().rpartition(b")")[2].split()[19].decode()
    return "0"


def is_running(process: int, start: str) -> bool:
    """Whether the process that started at `start` runs, and not another one of its number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return started_at(process) in (start, "0")
