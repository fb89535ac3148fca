"""`ScheduledLoop`: handles the calls that a Keras loop has scheduled if an exception ends it.

`fit` schedules a whole epoch ahead. If Ctrl-C ends it, the rest of the epoch must not be trained in
the background, and readers of variables must not see them in the middle of a step: calls that no
worker has begun are cancelled, and reading or assigning a variable waits for the remaining calls.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import Protocol

from unison.interrupts import signals_held
from unison.parameter_server.cells import RemotePlacement


class SchedulesCalls(Protocol):
    """The part of a coordinator that a loop needs."""

    def call_off(self, loop: object) -> None:
        """Cancels the calls of a loop that no worker has begun."""
        ...

    def wait_for(self, loop: object) -> None:
        """Waits until no call of a loop is waiting or running."""
        ...


class ScheduledLoop:
    """A context around a loop that schedules calls.

    Args:
        coordinator: The coordinator that schedules the calls.
        placement: The placement of the variables.
    """

    def __init__(self, coordinator: SchedulesCalls, placement: RemotePlacement):
        self._coordinator = coordinator
        self._placement = placement
        self._thread = threading.get_ident()
        self._frame: FrameType | None = None
        self._is_cancelled = False

    def __enter__(self) -> ScheduledLoop:
        with signals_held:
            self._frame = sys._getframe(1)
            self._placement.loops.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with signals_held:
            if error is None:
                self._end()
            else:
                self._cancel()

    def settle(self) -> None:
        """Waits until the loop has no further effect, if it was left by an exception.

        A second exception, from a signal handler, may have prevented the call of `__exit__`, so
        this checks whether the loop is still running.
        """
        if not self._is_cancelled:
            if threading.get_ident() != self._thread or self._is_running():
                return
            self._cancel()
        self._coordinator.wait_for(self)
        with signals_held:
            self._end()

    def _is_running(self) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def _cancel(self) -> None:
        with signals_held:
            self._coordinator.call_off(self)
            self._is_cancelled = True
            self._frame = None

    def _end(self) -> None:
        self._frame = None
        if self in self._placement.loops:
            self._placement.loops.remove(self)
