"""The termination of workers whose parent process has died, on Linux.

The kernel kills most workers immediately. A worker of an elastic job may first save its state: it
has a guard, a small process in its process group (so that the group's id is not reused), which
sends it SIGTERM, and some seconds later kills the whole group. Until then the guard reads the
worker's output, since writing to a pipe without a reader would be an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Self

#: Sets up the process, and then executes the program: it asks the kernel to kill the process when
#: its parent dies, or starts its guard; it resets signals that the parent ignores (Ray ignores
#: Ctrl-C).
#:
#: The guard waits on a pipe that is never written to, and that is closed when the process that
#: holds the other end dies. It is not a child of the program, as a program may wait for all its
#: children. (The kernel could send SIGTERM as well, but does it once for each thread of the parent
#: that ends.)
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
    """Sends workers SIGTERM when this process has died, and kills them some time later.

    A context manager; the workers must have ended before it exits.

    Args:
        grace: Seconds between SIGTERM and SIGKILL.
        held: File descriptors that stay open as long as one of the workers is alive: locks.
    """

    def __init__(self, grace: float, held: Sequence[int] = ()):
        self.grace = grace
        self._held = tuple(held)
        self._reading, self._writing = os.pipe()

    def inherited(self, output: int) -> tuple[int, ...]:
        """Returns the file descriptors that a worker's process inherits, for its guard.

        Args:
            output: The file descriptor from which the worker's output is read.
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
    """Returns the command that starts `command` as a worker that ends with this process.

    Args:
        command: The program's path, and its arguments.
        guard: The guard that terminates it after a grace period. None: it is killed immediately.
        inherited: The file descriptors that the process inherits for its guard.
    """
    if sys.platform != "linux":
        return list(command)
    guarding = [0] if guard is None else [guard.grace, *inherited]
    said = ":".join(map(str, [os.getpid(), *guarding]))
    return [sys.executable, "-S", "-E", "-c", _STARTER, said, *command]
