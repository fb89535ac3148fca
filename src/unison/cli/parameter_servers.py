"""`unison run --ps`: a program with workers and parameter servers."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from unison.cli import elastic_options, top
from unison.cli.elastic_story import lost_task
from unison.cli.errors import CommandError
from unison.cli.interrupted_output import InterruptedOutput
from unison.cli.programs import program_of
from unison.cli.terminal import Terminal
from unison.monitoring.launcher import Monitored
from unison.net.addresses import LOOPBACK, split_address
from unison.net.secret import key, new_key
from unison.runtime.cluster import ClusterSpec
from unison.runtime.cores import available_cores
from unison.runtime.launching import ProcessWorker, Program, RayNodes, Restarts, Room, Start
from unison.runtime.launching.distinct_tracebacks import DistinctTracebacks
from unison.runtime.launching.environments import cluster_on_this_machine, with_own_gpus
from unison.runtime.launching.server_jobs import (
    SERVING,
    ParameterServerJob,
    Task,
    task_environment,
    tasks_of,
)
from unison.runtime.launching.workers import OnLine, Worker

#: The colours of the tasks' names, used cyclically.
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of jobs with parameter servers."""
    group = parser.add_argument_group(
        "parameter servers",
        "SCRIPT runs once, as the coordinator; workers and servers serve it until it ends",
    )
    group.add_argument("--ps", type=int, metavar="S", help="how many parameter servers to start")
    group.add_argument(
        "--ps-at",
        metavar="HOST:PORT,...",
        help="the servers that run already (python -m unison.parameter_server --serve HOST:PORT), "
        "and that this job may share with others; start workers only",
    )
    group.add_argument(
        "--ps-checkpoints",
        metavar="FOLDER",
        help="where servers write their variables every 10 seconds; a server that is lost then "
        "comes back with them (default: the job ends with it)",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Returns whether a job with parameter servers is requested."""
    return options.ps is not None or options.ps_at is not None


def _servers_at(options: argparse.Namespace) -> list[str]:
    """Returns the addresses of the servers that are already running."""
    return [] if options.ps_at is None else options.ps_at.split(",")


def check(options: argparse.Namespace) -> None:
    """Rejects invalid options.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    if options.ps is None and options.ps_checkpoints is not None:
        raise CommandError("--ps-checkpoints is for jobs that start parameter servers: give --ps.")
    if not is_asked(options):
        return
    if options.ps is not None and options.ps_at is not None:
        raise CommandError("Give --ps to start servers, or --ps-at to use those that run.")
    if options.ps is not None and options.ps < 1:
        raise CommandError(f"Expected at least 1 for --ps. Received: {options.ps}")
    for address in _servers_at(options):
        try:
            split_address(address)
        except ValueError as error:
            raise CommandError(f"--ps-at names servers as HOST:PORT,HOST:PORT. {error}") from error
    if options.env is not None:
        raise CommandError("--env has no recipe for parameter servers. Leave it out.")
    if elastic_options.is_elastic(options):
        raise CommandError(
            "--min-workers, --max-workers and --join are for jobs without parameter servers: with "
            "these, lost workers are started again anyway (--restarts). Leave them out."
        )


def run(options: argparse.Namespace) -> int:
    """Runs the job and returns the exit code.

    Raises:
        CommandError: The job cannot be started.
        UnavailableError: The Ray cluster cannot be reached.
        ImportError: Ray is requested, but not installed.
    """
    workers = options.workers or 1
    with contextlib.ExitStack() as places:
        cluster, start, threads = _placed(options, workers, places)
        names = [str(task) for task in _tasks(options, cluster)]
        monitored = places.enter_context(top.monitored(options, "parameter servers", names))
        code = _run(options, cluster, start, threads, monitored)
        monitored.ended(code)
        return code


def _placed(
    options: argparse.Namespace, workers: int, places: contextlib.ExitStack
) -> tuple[ClusterSpec, Start, int]:
    """Returns the cluster, the function that starts its tasks, and their number of threads."""
    tasks = workers + (options.ps or 0)
    if options.address is None:
        try:
            there = cluster_on_this_machine(tasks, options.host or LOOPBACK)
        except OSError as error:
            raise CommandError(
                f"Cannot listen on {options.host}: {error}. Give an address of this machine."
            ) from error
        start: Start = ProcessWorker
        threads = max(1, available_cores() // workers)
    else:
        room = Room(tasks, options.cpus_per_worker, options.gpus_per_worker)
        folder = os.getcwd()
        if not options.module:
            folder = os.path.dirname(os.path.abspath(options.script))
        nodes = places.enter_context(RayNodes(options.address, room, folder))
        there, threads = nodes.cluster, nodes.cores

        def start(index: int, program: Program, on_line: OnLine) -> Worker:
            # The chief runs locally: it connects to the others, and none has to connect to it.
            if index == 0:
                return ProcessWorker(index, program, on_line)
            return nodes.start(index - 1, program, lambda _, line: on_line(index, line))

    addresses = [there.task_address("worker", index) for index in range(tasks)]
    servers = _servers_at(options) or addresses[workers:]
    return ClusterSpec({"worker": addresses[:workers], "ps": servers}), start, threads


def _run(
    options: argparse.Namespace,
    cluster: ClusterSpec,
    start: Start,
    threads: int,
    monitored: Monitored,
) -> int:
    tasks = _tasks(options, cluster)
    checkpoints = options.ps_checkpoints
    if checkpoints is not None:
        checkpoints = os.path.abspath(checkpoints)
        os.makedirs(checkpoints, exist_ok=True)
    key = _key(options)
    folder = os.getcwd() if options.module else os.path.dirname(os.path.abspath(options.script))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    environments = [task_environment(cluster, task, key, threads, checkpoints) for task in tasks]
    if options.address is None:  # on Ray, a task has the GPUs that Ray gives it
        workers = [place for place, task in enumerate(tasks) if task.job == "worker"]
        shared = with_own_gpus([environments[place] for place in workers])
        for place, environment in zip(workers, shared, strict=True):
            environments[place] = environment
    programs = []
    for task, environment in zip(tasks, environments, strict=True):
        if task.job == "chief":
            arguments = ["-u", *program_of(options)]
        else:
            # Modules in the program's folder, which a dataset function may import.
            arguments, environment["PYTHONPATH"] = ["-u", "-m", SERVING], path
        programs.append(Program(arguments, environment))
    terminal = _TerminalWithTasks(options.no_color, tasks)
    tracebacks = DistinctTracebacks(terminal.show)
    output = InterruptedOutput(tracebacks)
    restarts = elastic_options.restarts(options)

    interrupts: list[int] = []

    def hear(event: Mapping[str, Any]) -> None:
        if not interrupts:  # else the tasks end since the program does
            lost = lost_task(str(tasks[event["worker"]]), event, restarts)
            terminal.say(f"unison run: {lost}")

    job = ParameterServerJob(
        monitored.programs(programs),
        tasks,
        output,
        start,
        Restarts(restarts),
        restarts_servers=checkpoints is not None,
        on_event=hear,
    )
    with job, _interrupting(job, interrupts, output):
        try:
            with terminal.progress(job, len(tasks)):
                failure = job.wait(options.timeout)
        except TimeoutError as error:
            terminal.complain(f"unison run: {error}")
            return 124
    output.end()
    tracebacks.close()
    if interrupts:
        terminal.complain(f"unison run: interrupted (SIGINT); the {len(tasks)} tasks were ended")
        return 128 + signal.SIGINT
    if failure is None:
        return 0
    said = f": {failure.error}" if failure.error else ""
    terminal.complain(f"unison run: the program has ended ({failure.how}){said}")
    return failure.exit_code


def _tasks(options: argparse.Namespace, cluster: ClusterSpec) -> list[Task]:
    """Returns the tasks to start."""
    return [task for task in tasks_of(cluster) if options.ps_at is None or task.job != "ps"]


def _key(options: argparse.Namespace) -> str:
    """Returns the job's key: a new one, or that of the servers that are already running."""
    if options.ps_at is None:
        return new_key()
    return key().hex()


class _TerminalWithTasks(Terminal):
    """A terminal with the names of tasks as prefixes of lines."""

    def __init__(self, no_color: bool, tasks: list[Task]):
        super().__init__(no_color)
        self._tasks = tasks

    def show(self, worker: int, line: str) -> None:
        name = f"[{self._tasks[worker]}] "
        if not self._output.is_terminal:
            with self._lock:
                print(f"{name}{line}", flush=True)
            return
        colour = _COLOURS[worker % len(_COLOURS)]
        self._output.print(Text.assemble((name, colour), Text.from_ansi(line)))


@contextlib.contextmanager
def _interrupting(
    job: ParameterServerJob, interrupts: list[int], output: InterruptedOutput
) -> Iterator[None]:
    """Forwards Ctrl-C to the program; on the second one, kills all tasks."""

    def interrupted(number: int, frame: object) -> None:
        interrupts.append(number)
        output.interrupt()
        if len(interrupts) == 1:
            job.interrupt()
        else:
            job.signal(signal.SIGKILL)

    def terminated(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = (signal.signal(signal.SIGINT, interrupted), signal.signal(signal.SIGTERM, terminated))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
