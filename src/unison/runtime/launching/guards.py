"""How a worker ends when the process that started it has died, on Linux.

Most workers are killed by the kernel at once. One of an elastic job may first save what it has: it
has a guard, a small process of its group (so that the group's number is nobody else's), which sends
it SIGTERM, and some seconds later kills all of the group. Until then it reads what the worker
prints, which would be an error where nobody reads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Self

#: Becomes the program, and before that: has the kernel kill the process when its parent dies, or
#: starts its guard; takes signals where the parent does not (Ray passes over Ctrl-C).
#:
#: The guard waits at a pipe that nobody writes to, and which is closed when the process dies that
#: holds the other end. It is nobody's child, since a program may wait for all its children. (The
#: kernel could send SIGTERM as well, but does it once for each thread of the parent that ends.)
_STARTER = """
import ctypes, os, signal, sys, time

parent, grace, *kept = sys.argv[1].split(":")
kept = [int(one) for one in kept]

def guard(leader, pipe, output):
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.read(pipe, 1)
    last = time.monotonic() + float(grace)
    os.set_blocking(output, False)
    try:
        os.kill(leader, signal.SIGTERM)
        while time.monotonic() < last:
            os.kill(leader, 0)
            try:
                os.read(output, 1 << 16)
            except BlockingIOError:
                pass
            time.sleep(0.01)
    except ProcessLookupError:
        pass
    os.kill(0, signal.SIGKILL)

if kept:
    leader = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            guard(leader, *kept[:2])
        os._exit(0)
    os.waitpid(between, 0)
    for one in kept:
        os.set_inheritable(one, False)
else:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.execv(sys.argv[2], sys.argv[2:])
"""


class Guard:
    """Has workers told by SIGTERM that this process has died, and killed some time later.

    It ends with a `with` block; the workers have ended before.

    Args:
        grace: Seconds for which they may go on.
        held: Open files, by number, that stay open as long as one of the workers lives: locks.
    """

    def __init__(self, grace: float, held: Sequence[int] = ()):
        self.grace = grace
        self._held = tuple(held)
        self._reading, self._writing = os.pipe()

    def inherited(self, output: int) -> tuple[int, ...]:
        """Returns the open files that a worker's process inherits, for its guard.

        Args:
            output: From which is read what the worker prints.
        """
        return (self._reading, output, *self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._reading)
        os.close(self._writing)


def ending_with_this_process(
    command: Sequence[str], guard: Guard | None, inherited: Sequence[int]
) -> list[str]:
    """Returns the command that starts `command` as a worker, which leads a group of its own.

    Args:
        command: The program's path, and its arguments.
        guard: What lets it go on for a while. None: it is killed at once.
        inherited: The open files that the process inherits for its guard.
    """
    if sys.platform != "linux":
        return list(command)
    guarding = [0] if guard is None else [guard.grace, *inherited]
    said = ":".join(map(str, [os.getpid(), *guarding]))
    return [sys.executable, "-S", "-E", "-c", _STARTER, said, *command]
