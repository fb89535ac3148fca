"""`UNISON_MONITOR`: monitoring, on its first worker, of a job that Unison has not started.

The first worker serves what `unison run` serves otherwise. The others report to it over the
existing connections for liveness checks (`unison.runtime.liveness`); workers and parameter servers
report to their coordinator with their replies to its heartbeats (`unison.parameter_server.pulse`).
So no additional connections are needed.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from unison.errors import UnavailableError
from unison.monitoring import otlp
from unison.monitoring.metrics_endpoint import place_of
from unison.runtime import liveness
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.server_jobs import tasks_of

#: The variable that enables it, on all workers.
VARIABLE: Final = "UNISON_MONITOR"

#: The number of a worker's latest reports from which its clock offset is estimated.
_COMPARED = 64

logger = logging.getLogger("unison")


def is_asked() -> bool:
    """Returns whether `UNISON_MONITOR` is set, and removes it: child processes are not workers."""
    return os.environ.pop(VARIABLE, "0") not in ("", "0")


def tell_first_worker(strategy: Any) -> Callable[[Mapping[str, Any]], None] | None:
    """Returns the sink for this process's reports; on the first worker, serves all reports.

    Args:
        strategy: The strategy that connects the workers.

    Returns:
        The sink; None if this process should serve and cannot.
    """
    job = liveness.current()
    if job is not None and job.own > 0:
        return liveness.report
    if job is not None:
        names = [name.partition(" (")[0] for name in job.names]  # strips the addresses
        kind = "workers"
    else:
        names, kind = _served_with(getattr(strategy, "cluster_resolver", None))
    if not _serve(names, kind):
        return None
    if job is not None:
        liveness.on_report(lambda worker, told: hear(names[worker], told))
    return lambda told: hear(names[0], json.loads(json.dumps(told)))  # in the form of the others'


def serves(name: str) -> bool:
    """Returns whether this process serves the reports of its job's workers, and this is one.

    Args:
        name: The worker's name. A process may also be connected to the servers of another job.
    """
    return _served is not None and name in _served.names


def hear(name: str, told: Any) -> None:
    """Handles a worker's report; ignores invalid ones, and those of other jobs.

    Args:
        name: The worker's name.
        told: The report.
    """
    served = _served
    if served is not None and name in served.names:
        with contextlib.suppress(LookupError, TypeError):
            is_own = name == served.names[0]
            ahead = 0.0 if is_own else served.clocks[name].ahead(told["now"])
            served.job.hear(name, told, ahead)


def close() -> None:
    """Stops serving, if this process serves."""
    global _served
    if _served is not None:
        served, _served = _served, None
        liveness.on_report(None)
        served.job.__exit__()


def _forget() -> None:
    """Forgets the copy of the parent's state, in a forked child."""
    global _served
    _served = None


os.register_at_fork(after_in_child=_forget)


def _served_with(resolver: Any) -> tuple[list[str], str]:
    """Returns the tasks and kind of a job without other training processes."""
    task = getattr(resolver, "task_type", None)
    cluster = None if resolver is None else ClusterSpec(resolver.cluster_spec())
    if task in (None, "chief") and cluster is not None and "ps" in cluster.jobs:
        return [str(each) for each in tasks_of(cluster)], "parameter servers"
    return ["worker 0" if task is None else f"{task} {resolver.task_id or 0}"], "workers"


def _serve(names: list[str], kind: str) -> bool:
    """Starts serving the workers with these names, the first of which is this process."""
    global _served
    job = _entered(names, kind)
    if not job.is_watched:
        return False
    _served = _Served(job, names)
    atexit.register(close)
    logger.info("On %s, `unison top %d` shows this job.", socket.gethostname(), os.getpid())
    return True


def _entered(names: list[str], kind: str) -> Any:
    """Returns the monitoring of a job, which runs, without the receivers that are impossible."""
    from unison.monitoring.launcher import Monitored

    receivers: dict[str, Callable[[], Any]] = {
        "metrics": lambda: place_of(None),
        "is_exported": otlp.is_asked,
    }
    complaints = set()
    for left_out in ((), ("is_exported",), ("metrics",)):
        try:
            given = {name: ask() for name, ask in receivers.items() if name not in left_out}
            job = Monitored(shlex.join(sys.argv), kind, names, **given)
            job.__enter__()
        except (ImportError, UnavailableError, ValueError) as error:  # they must not end a job
            if str(error) not in complaints:
                logger.warning("This job's metrics are not served: %s", error)
            complaints.add(str(error))
        else:
            return job
    job = Monitored(shlex.join(sys.argv), kind, names)
    job.__enter__()
    return job


class _Clock:
    """Estimates how far a worker's clock is ahead of the local one, from send times of reports.

    A report is never received before it was sent; so the offset is the greatest difference, up to
    the milliseconds that the fastest of the latest reports took.

    Examples:
        >>> clock = _Clock()
        >>> now = time.time()
        >>> round(clock.ahead(now + 5.0), 1), round(clock.ahead(now + 3.0), 1)
        (5.0, 5.0)
    """

    def __init__(self) -> None:
        self._differences: collections.deque[float] = collections.deque(maxlen=_COMPARED)

    def ahead(self, said_at: float) -> float:
        """Returns the offset in seconds, after a report that was sent at a time by that clock."""
        self._differences.append(said_at - time.time())
        return max(self._differences)


class _Served:
    """A job whose state this process serves.

    Attributes:
        job: The monitored job.
        names: The names of its processes, the first of which is this one.
        clocks: The clocks of the others, by name.
    """

    def __init__(self, job: Any, names: Sequence[str]):
        self.job = job
        self.names = names
        self.clocks: dict[str, _Clock] = collections.defaultdict(_Clock)


_served: _Served | None = None
