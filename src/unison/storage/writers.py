"""The process that writes a file: its machine, its number, and whether it is still running."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket


def own_name() -> str:
    """Returns the name of this process: unique among machines and over time."""
    process = os.getpid()
    return f"{machine()}-{process}-{started_at(process)}"


#: The pattern of the number and the start of a process in its `own_name`, after `machine()`.
PROCESS = r"(\d+)-(\d+)"


@functools.cache
def machine() -> str:
    """Returns a name that is unique to this container, and to this machine since it was booted."""
    host = re.sub(r"\W", "_", socket.gethostname())
    started = namespace = ""
    with contextlib.suppress(OSError):  # on other systems than Linux
        with open("/proc/sys/kernel/random/boot_id") as file:
            started = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{host}-{hashlib.sha256(f'{started} {namespace}'.encode()).hexdigest()[:12]}"


def started_at(process: int) -> str:
    """Returns the start of a process, in the kernel's clock ticks; 0 if it is unknown."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        # The name, in parentheses, may contain any characters.
        return file.read().rpartition(b")")[2].split()[19].decode()
    return "0"


def is_running(process: int, start: str) -> bool:
    """Whether the process that started at `start` is running, and not a later one with its id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return started_at(process) in (start, "0")
