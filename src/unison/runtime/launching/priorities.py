"""The priority of processes that prepare something while others compute.

They get about a tenth of a core that others want, too, so that they are ready some time. Linux lets
nobody without privileges undo a higher `nice` value. It can always be undone for the autogroup of a
session: where Linux groups processes so, sessions share the cores by it, and the processes' own
values count within their session only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time

logger = logging.getLogger("unison")

#: The `nice` value of such processes.
_NICE = 10

#: Seconds between two attempts to change an autogroup, and for all of them: without privileges,
#: Linux allows ten changes a second, of all processes together.
_PAUSE = 0.06
_LONGEST = 60.0


class LowPriority:
    """The low priority of a process that leads a session, from now on.

    It is as low as can be undone, which on other systems than Linux is not at all.

    Args:
        process: Its number.
    """

    def __init__(self, process: int):
        self._process = process
        #: Its `nice` value before, and whether that of its autogroup is changed.
        self._before: int | None = None
        self._is_of_autogroup = False
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # it has ended
            before = os.getpriority(os.PRIO_PROCESS, process)
            if before < _NICE and _can_be_undone(before):
                os.setpriority(os.PRIO_PROCESS, process, _NICE)
                self._before = before
        with contextlib.suppress(OSError):  # there are none, or many have changed
            self._set_autogroup(_NICE)
            self._is_of_autogroup = True

    def undo(self) -> None:
        """Gives the process, and its threads, the usual priority; this may take some time."""
        if self._before is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._set_threads(self._before)
        if self._is_of_autogroup:
            last = time.monotonic() + _LONGEST
            while not self._has_undone_autogroup():
                if time.monotonic() > last:
                    logger.warning("Process %d keeps a low priority.", self._process)
                    return
                time.sleep(_PAUSE)

    def _set_threads(self, nice: int) -> None:
        """Sets the value of all threads, those included that others start meanwhile."""
        done: set[str] = set()
        while left := set(os.listdir(f"/proc/{self._process}/task")) - done:
            for thread in left:
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), nice)
            done |= left

    def _has_undone_autogroup(self) -> bool:
        try:
            self._set_autogroup(0)
        except BlockingIOError:
            return False
        except OSError:
            pass  # it has ended
        return True

    def _set_autogroup(self, nice: int) -> None:
        with open(f"/proc/{self._process}/autogroup", "wb", buffering=0) as autogroup:
            # The file's own `write` hides that it must wait.
            os.write(autogroup.fileno(), str(nice).encode())


@functools.cache
def _can_be_undone(before: int) -> bool:
    """Returns whether a process may go back to a `nice` value; tried in a thread of its own."""
    can: list[bool] = []

    def try_it() -> None:
        with contextlib.suppress(OSError):
            for nice in (_NICE, before):
                os.setpriority(os.PRIO_PROCESS, 0, nice)  # on Linux, of the thread only
            can.append(True)

    thread = threading.Thread(target=try_it, name="unison-priority")
    thread.start()
    thread.join()
    return bool(can)
