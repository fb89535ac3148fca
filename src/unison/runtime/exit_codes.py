"""The exit codes of workers whose job can continue when they are started again."""

from __future__ import annotations

from typing import Final

#: The exit code of a process that has saved its state before a preemption, as in TensorFlow.
PREEMPTED: Final = 42

#: The exit code of a process that ends because another one is lost: `EX_TEMPFAIL` of `sysexits.h`.
LOST_ANOTHER: Final = 75

#: The exit codes, as in a shell, of processes that a signal has ended.
OF_SIGNALS: Final = range(128 + 1, 128 + 65)
