"""Liveness of a job's workers: which are alive, and which is at fault if this one is blocked.

`watcher` sends this worker's progress to the others, and evaluates theirs (`failure_detector`); the
messages are relayed by the first worker (`star`). `programs` counts and compares the programs that
all workers run together. `sockets` unblocks operations that wait for a lost worker, and `relay`
prevents JAX from aborting this process in that case.
"""

from unison.runtime.liveness.failure_detector import AGREEMENT
from unison.runtime.liveness.programs import watched
from unison.runtime.liveness.watcher import (
    Liveness,
    OnReport,
    cause_of,
    check,
    current,
    fail,
    failure,
    is_watching,
    lost,
    on_failure,
    on_report,
    passed,
    report,
    start,
    stop,
    waiting,
)

__all__ = [
    "AGREEMENT",
    "Liveness",
    "OnReport",
    "cause_of",
    "check",
    "current",
    "fail",
    "failure",
    "is_watching",
    "lost",
    "on_failure",
    "on_report",
    "passed",
    "report",
    "start",
    "stop",
    "waiting",
    "watched",
]
