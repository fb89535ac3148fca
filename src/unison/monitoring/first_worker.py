"""`UNISON_MONITOR`: a job that nobody of Unison has started is watched on its first worker.

That one serves what `unison run` serves elsewhere. The others report to it over the connections by
which the workers of a job watch each other (`unison.runtime.liveness`); workers and parameter
servers answer their coordinator so, which asks them for signs of life anyway
(`unison.parameter_server.pulse`). So nothing has to be reached that is not reached already.
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
from collections.abc import Callable, Mapping
from typing import Any, Final

from unison.runtime import liveness
from unison.runtime.cluster import ClusterSpec
from unison.runtime.launching.server_jobs import tasks_of

#: The variable that asks for it, on all workers.
VARIABLE: Final = "UNISON_MONITOR"

#: How many of a worker's latest reports say how far its clock is ahead.
_COMPARED = 64

logger = logging.getLogger("unison")


def is_asked() -> bool:
    """Returns whether `UNISON_MONITOR` is set, which goes: child processes are no workers."""
    return os.environ.pop(VARIABLE, "0") not in ("", "0")


def tell_first_worker(strategy: Any) -> Callable[[Mapping[str, Any]], None] | None:
    """Returns what takes this process's reports; on the first worker, serves those of all.

    Args:
        strategy: The strategy that has brought the workers together, or is about to.

    Returns:
        None where this process is to serve and cannot.
    """
    job = liveness.current()
    if job is not None and job.own > 0:
        return liveness.report
    if job is not None:
        names = [name.partition(" (")[0] for name in job.names]  # without the addresses
        kind = "workers"
    else:
        names, kind = _served_with(getattr(strategy, "cluster_resolver", None))
    if not _serve(names, kind):
        return None
    if job is not None:
        liveness.on_report(lambda worker, told: hear(names[worker], told))
    return lambda told: hear(names[0], json.loads(json.dumps(told)))  # as it comes from others


def is_serving() -> bool:
    """Returns whether this process serves what the workers of its job report."""
    return _served is not None


def hear(name: str, told: Any) -> None:
    """Takes note of what a worker reports; what is no report is left out.

    Args:
        name: What the worker is called.
        told: What it reports.
    """
    served = _served
    if served is not None:
        with contextlib.suppress(LookupError, TypeError):
            is_own = name == served.own
            ahead = 0.0 if is_own else served.clocks[name].ahead(told["now"])
            served.job.hear(name, told, ahead)


def close() -> None:
    """Ends the serving, if this process serves."""
    global _served
    if _served is not None:
        served, _served = _served, None
        liveness.on_report(None)
        served.job.__exit__()


def _forget() -> None:
    """In a child: what it has a copy of is the parent's."""
    global _served
    _served = None


os.register_at_fork(after_in_child=_forget)


def _served_with(resolver: Any) -> tuple[list[str], str]:
    """Returns whom a process serves that trains with no others: itself, and parameter servers."""
    task = getattr(resolver, "task_type", None)
    cluster = None if resolver is None else ClusterSpec(resolver.cluster_spec())
    if task in (None, "chief") and cluster is not None and "ps" in cluster.jobs:
        return [str(each) for each in tasks_of(cluster)], "parameter servers"
    return ["worker 0" if task is None else f"{task} {resolver.task_id or 0}"], "workers"


def _serve(names: list[str], kind: str) -> bool:
    """Lets others watch the workers of these names, the first of which is this process."""
    from unison.monitoring.launcher import Monitored

    global _served
    job = Monitored(shlex.join(sys.argv), kind, names)
    job.__enter__()
    if not job.is_watched:
        return False
    _served = _Served(job, names[0])
    atexit.register(close)
    logger.info("On %s, `unison top %d` shows this job.", socket.gethostname(), os.getpid())
    return True


class _Clock:
    """How far a worker's clock is ahead of this one's, by when it has said what is heard now.

    Nothing is heard before it was said; so it is ahead by the greatest difference, but for the
    milliseconds that the fastest of the latest reports has taken.

    Examples:
        >>> clock = _Clock()
        >>> now = time.time()
        >>> round(clock.ahead(now + 5.0), 1), round(clock.ahead(now + 3.0), 1)
        (5.0, 5.0)
    """

    def __init__(self) -> None:
        self._differences: collections.deque[float] = collections.deque(maxlen=_COMPARED)

    def ahead(self, said_at: float) -> float:
        """Returns by how many seconds, after a report that was made at a time by that clock."""
        self._differences.append(said_at - time.time())
        return max(self._differences)


class _Served:
    """A job that this process lets others watch.

    Attributes:
        job: What is known of it.
        own: What this process is called there.
        clocks: Those of the others, by their names.
    """

    def __init__(self, job: Any, own: str):
        self.job = job
        self.own = own
        self.clocks: dict[str, _Clock] = collections.defaultdict(_Clock)


_served: _Served | None = None
