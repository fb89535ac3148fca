"""The processes of a cluster: how they join it, and how they exchange values.

`join_cluster` makes this process one of a job of `jax.distributed`, in which every process sees the
devices of all. Values other than arrays are exchanged through JAX's coordination service, which the
first process hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import jax

from unison.net.addresses import split_address
from unison.net.lines import Line
from unison.runtime import devices, liveness, logs, uncaught
from unison.runtime.agreement import ConnectedWorkers, Talk, Workers
from unison.runtime.cluster import ClusterSpec
from unison.runtime.coordination import CoordinationStore
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.host_memory import has_worker_memory
from unison.runtime.initialized_job import meet_in_initialized_job
from unison.runtime.liveness.relay import ClientRelay, ServiceRelay
from unison.runtime.liveness.sockets import listening
from unison.runtime.private_jax import (
    backend_is_started,
    cache_programs_of_each_process,
    forget_coordination,
    initialized_processes,
    never_destroy_backends,
)
from unison.runtime.rendezvous import Place, meet
from unison.tracebacks import show_instead

logger = logging.getLogger("unison")

#: The jobs whose tasks train together, in the order of their processes.
TRAINING_JOBS = ("chief", "worker")

#: Timeout in seconds of JAX's own heartbeats: lost processes are detected otherwise, and JAX would
#: terminate the remaining processes.
_NEVER = 10**6

#: The exit code of a process after Ctrl-C.
_INTERRUPTED_EXIT_CODE = 130

#: Seconds that a process waits for the others, at startup and whenever they agree on a value.
TIMEOUT = 300.0


def training_tasks(cluster: ClusterSpec) -> list[tuple[str, int]]:
    """Returns the tasks of a cluster that train together: the chief, then the workers.

    Examples:
        >>> training_tasks(ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"]}))
        [('chief', 0), ('worker', 0), ('worker', 1)]
    """
    jobs = [job for job in TRAINING_JOBS if job in cluster.jobs]
    return [(job, index) for job in jobs for index in cluster.task_indices(job)]


def join_cluster(
    cluster: ClusterSpec, task_type: str | None, task_id: int | None, timeout: float = TIMEOUT
) -> None:
    """Makes this process the given task of a cluster, and waits for the others.

    The first task listens at its address, and relays connections there to the coordination service,
    which it hosts. Does nothing if the cluster has a single task, or if the process has joined
    already. In a job that something else has initialized (`jax.distributed.is_initialized()`), the
    processes only connect to each other.

    Args:
        cluster: The cluster.
        task_type: The job of this process.
        task_id: Its index in the job.
        timeout: Seconds to wait for the others.

    Raises:
        ValueError: The cluster has no such training task, or this process has joined a job of
            another size or as another task.
        RuntimeError: JAX's backend is already running, with the devices of this process only.
        UnavailableError: Not all processes joined, two joined as the same task, their software or
            clusters differ, or the first process cannot listen at its address.
        UnauthenticatedError: The first process has another key (`UNISON_KEY`).
    """
    tasks = training_tasks(cluster)
    if len(tasks) < 2:
        return
    place = next((i for i, task in enumerate(tasks) if task == (task_type, task_id)), None)
    if place is None:
        raise ValueError(
            f"Expected this process to be one of {tasks}, which train together. Received: task "
            f"type {task_type!r}, index {task_id!r}. Set `task` in TF_CONFIG, or the resolver's "
            "task_type and task_id."
        )
    if jax.distributed.is_initialized():
        _check_joined(len(tasks), place)
        if not _has_joined:
            _adopt(tasks, place, timeout)
        return
    if backend_is_started():
        raise RuntimeError(
            "A process joins its cluster before JAX starts. Create the strategy before the first "
            "JAX computation (and before jax.devices())."
        )
    address = cluster.task_address(*tasks[0])
    names = [f"{job} {index} ({cluster.task_address(job, index)})" for job, index in tasks]
    about = software() | {"cluster": str(cluster.as_dict())}
    met = meet(address, Place(place, names), about, timeout)
    if has_worker_memory():  # to be started again soon, with a cache of its own
        cache_programs_of_each_process()
    # JAX's preemption service would keep SIGTERM from terminating the process.
    jax.config.update("jax_enable_preemption_service", False)
    global _relay
    if met.entrance is None:
        _relay = ClientRelay(split_address(address), timeout)
    else:
        _relay = ServiceRelay(met.entrance, timeout)
    try:
        _initialize(_relay.address, len(tasks), place, timeout)
    except BaseException:
        _relay.close()
        _relay = None
        for line in met.lines.values():
            line.close()
        raise
    _watch(names, place, met.lines, timeout)


def _adopt(tasks: list[tuple[str, int]], place: int, timeout: float) -> None:
    """Joins the other processes of the job of `jax.distributed` that this one belongs to."""
    global _is_adopted
    names = [f"{job} {index}" for job, index in tasks]
    adopted = meet_in_initialized_job(place, len(tasks), names, software(), timeout)
    _is_adopted = True
    _watch(adopted.names, place, adopted.met.lines, timeout)


def _watch(names: list[str], place: int, lines: Mapping[int, Line], timeout: float) -> None:
    """Starts to watch the others, once all have met."""
    global _timeout, _has_joined
    _timeout, _has_joined = timeout, True
    logs.say_who(names[place].partition(" (")[0])
    if place == 0:
        logger.info("%d workers have come together: %s", len(names), ", ".join(names))
    watcher = liveness.start(names, place, lines, timeout)
    atexit.register(_leave)
    _tell_of_errors()
    _release_collectives(watcher)


def _initialize(address: str, count: int, place: int, timeout: float) -> None:
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address if place == 0 else None,
        num_processes=count,
        process_id=place,
        initialization_timeout=max(int(timeout), 1),
        heartbeat_timeout_seconds=_NEVER,
        # Under mpirun and srun, JAX would choose devices that the resolvers have chosen already.
        cluster_detection_method="deactivate",
    )


def _release_collectives(watcher: liveness.Liveness) -> None:
    """Makes CPU collectives stop waiting when a worker is lost."""
    own: list[Any] = []
    if not backend_is_started():  # in an initialized job: what listens already may not be theirs
        before = listening()
        devices.default_devices()
        own = sorted(listening() - before)
    of_all = all_gather_json(own, "Where collectives listen")
    watcher.release_at(tuple(address) for own in of_all for address in own)


def _leave() -> None:
    """Leaves the job, without JAX's wait for all other processes to exit.

    A job that something else has initialized ends as JAX ends it, unless a process is lost.
    """
    global _relay, _has_joined, _is_adopted
    atexit.unregister(_leave)
    _has_joined = False
    is_lost = liveness.failure() is not None
    liveness.stop()
    if is_lost:
        never_destroy_backends()
    if is_lost or not _is_adopted:
        forget_coordination()
    _is_adopted = False
    if _relay is not None:
        _relay.close()
        _relay = None
    _stop_telling_of_errors()


def _tell_of_errors() -> None:
    """Reports an uncaught error of this process's program to the others."""
    global _show_error
    if _show_error is None:
        uncaught.install()
        _show_error, sys.excepthook = sys.excepthook, _end_by_error


def _stop_telling_of_errors() -> None:
    global _show_error
    # A hook that was installed since still calls this one, which then only shows the error.
    if sys.excepthook is _end_by_error and _show_error is not None:
        sys.excepthook, _show_error = _show_error, None


def _end_by_error(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Shows an uncaught error, reports it to the others, and ends the process.

    An error of JAX that is due to the loss of another worker is shown with its cause. In an
    interactive interpreter, and if this process has no job (any more), the error is only shown.
    """
    assert _show_error is not None
    cause = liveness.cause_of(error)
    if cause is not error:
        show_instead(cause, error)
        traceback = cause.__traceback__
    is_typed = hasattr(sys, "ps1") or sys.flags.inspect
    if is_typed or not liveness.is_watching():
        _show_error(type(cause), cause, traceback)
        return
    lost = liveness.failure()
    if isinstance(error, KeyboardInterrupt):
        exit_code = _INTERRUPTED_EXIT_CODE
    elif lost is not None and str(cause) == str(lost):
        exit_code = LOST_ANOTHER
    else:
        exit_code = 1
    try:  # also if the output cannot be written
        with contextlib.suppress(Exception):
            _show_error(type(cause), cause, traceback)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(Exception):
            liveness.fail(error)
    finally:
        os._exit(exit_code)


def software() -> dict[str, str]:
    """Returns the versions that all processes must have in common."""
    return {name: importlib.metadata.version(name) for name in ("unison", "jax", "jaxlib")}


def _check_joined(count: int, place: int) -> None:
    joined = initialized_processes()
    if joined != (count, place):
        in_words = "an unknown one" if joined is None else f"number {joined[1]} of {joined[0]}"
        raise ValueError(
            f"Expected process {place} of {count}, as the cluster says. Received: a process that "
            f"has joined a job of jax.distributed as {in_words}."
        )


def all_gather_json(value: Any, what: str) -> list[Any]:
    """Returns the values of all processes, in order; each process must call this.

    Args:
        value: A value that JSON can represent; a tuple is returned as a list.
        what: A description of the value, for messages.

    Raises:
        DeadlineExceededError: A process did not answer in time; the message names it.
        UnavailableError: A process is lost.
        RuntimeError: The processes are at different points of their programs.
    """
    if _elastic is not None:
        return _elastic.all_gather_json(value, what)
    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    with liveness.waiting(f"{liveness.AGREEMENT} ({what})"):
        answers = _talk().ask([what, value])
    for process, (other, _) in enumerate(answers):
        if other != what:
            raise RuntimeError(
                f"All processes must do the same. Process {jax.process_index()} is at: {what}. "
                f"Process {process} is at: {other}."
            )
    return [given for _, given in answers]


class ElasticProcesses(Protocol):
    """The processes of a job that may change, and that does not use `jax.distributed`."""

    @property
    def num_members(self) -> int:
        """The current number of processes."""
        ...

    @property
    def index(self) -> int:
        """The index of this process."""
        ...

    @property
    def is_joining(self) -> bool:
        """Whether this process is joining other ones, and is alone until it takes part."""
        ...

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """See the module's function of this name."""
        ...


def agree_through(processes: ElasticProcesses) -> None:
    """Makes this process part of a job whose processes may change."""
    global _elastic
    _elastic = processes


def is_elastic() -> bool:
    """Returns whether the processes of this job may change."""
    return _elastic is not None


def has_joined() -> bool:
    """Returns whether this process has joined the others of its cluster (`join_cluster`)."""
    return _has_joined


def count() -> int:
    """Returns the number of processes of this job."""
    return jax.process_count() if _elastic is None else _elastic.num_members


def is_of_several() -> bool:
    """Returns whether this job has several processes, without starting JAX in one that has not."""
    return (is_elastic() or jax.distributed.is_initialized()) and count() > 1


def index() -> int:
    """Returns this process's index in its job, from 0."""
    return jax.process_index() if _elastic is None else _elastic.index


def is_first() -> bool:
    """Returns whether this process does what only one should do: save, write summaries."""
    return index() == 0 and (_elastic is None or not _elastic.is_joining)


def timeout() -> float:
    """Returns the seconds that this process waits for the others of its job."""
    return _timeout


#: The seconds for which processes wait for an answer after the timeout of liveness checks: those
#: say that a worker is lost, and the job can restart; here, the program would fail.
_AFTER_LIVENESS = 10.0

_timeout = TIMEOUT
_elastic: ElasticProcesses | None = None
_has_joined = False
#: Whether something else has initialized the job that this process has joined.
_is_adopted = False
_relay: ClientRelay | ServiceRelay | None = None
#: The hook for uncaught errors before this process joined its job.
_show_error: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None
_lock = threading.Lock()
#: By the job's coordination service, and the talk that `all_gather_json` uses.
_connected: dict[int, ConnectedWorkers] = {}
_talks: dict[ConnectedWorkers, Talk] = {}


def talk_of_its_own(matter: str) -> Talk:
    """Returns a talk between the processes of this job, for a thread of each of them.

    Args:
        matter: The subject, in a word; the n-th talk about it is matched with the n-th on the
            others.
    """
    workers = _workers()
    return Workers().talk(matter) if workers is None else workers.talk(matter)


def _talk() -> Talk:
    """Returns the talk between the processes of the job that this one has joined."""
    workers = _workers()
    assert workers is not None
    with _lock:
        if workers not in _talks:
            _talks.clear()
            _talks[workers] = workers.talk("values")
        return _talks[workers]


def _workers() -> ConnectedWorkers | None:
    """Returns the processes of the job that this one has joined; None if it is alone."""
    if jax.process_count() == 1:
        return None
    store = CoordinationStore()
    with _lock:
        if store.service not in _connected:
            count, index = jax.process_count(), jax.process_index()
            patience = _timeout + _AFTER_LIVENESS
            workers = ConnectedWorkers(count, index, store, "process group", patience)
            _connected.clear()
            _connected[store.service] = workers
        return _connected[store.service]
