"""Whether the other workers of a job live, and who is to blame when this one cannot go on.

`watcher` tells the others how far this worker has come, and judges what they tell (`verdict`); the
messages pass through the first worker (`star`). `programs` counts and compares the programs that
all run together. `sockets` releases what waits for a worker that is lost, and `relay` keeps JAX
from ending this process then.
"""

from unison.runtime.liveness.programs import watched
from unison.runtime.liveness.verdict import AGREEMENT
from unison.runtime.liveness.watcher import (
    LOST_ANOTHER_EXIT_CODE,
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
    "LOST_ANOTHER_EXIT_CODE",
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
