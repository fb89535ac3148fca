"""`unison run`: starts the workers of a program, on this machine or on a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from unison.cli import (
    elastic,
    elastic_options,
    hosts,
    in_memory,
    nodes,
    parameter_servers,
    programs,
    ray_places,
    top,
)
from unison.cli.asked import Asked
from unison.cli.errors import CommandError
from unison.cli.interrupted_output import InterruptedOutput
from unison.cli.numbers import seconds
from unison.cli.recipes import RECIPES, local_environments
from unison.cli.terminal import Terminal
from unison.errors import UnavailableError
from unison.monitoring.launcher import Monitored
from unison.monitoring.metrics_endpoint import VARIABLE as METRICS_VARIABLE
from unison.monitoring.otlp import VARIABLE as OPENTELEMETRY_VARIABLE
from unison.net.addresses import LOOPBACK
from unison.runtime.elastic.protocol import TOO_FEW_WORKERS
from unison.runtime.exit_codes import LOST_ANOTHER
from unison.runtime.launching import (
    Failure,
    Job,
    ProcessWorker,
    Program,
    Restarts,
    Start,
    cores_of_workers,
    default_workers,
    worker_environments,
)
from unison.runtime.launching.distinct_tracebacks import DistinctTracebacks
from unison.runtime.launching.partners import Partners

#: The exit status of a program that Ctrl-C has ended, as in shells.
_INTERRUPTED = 128 + signal.SIGINT

#: The exit status of a job whose `--timeout` has passed, and of `ssh` without a connection.
_TIMED_OUT = 124
_SSH_FAILED = 255


def add_command(commands: Any) -> None:
    """Adds `run` to the subcommands of a parser."""
    parser = commands.add_parser(
        "run",
        help="start a program's workers, on this machine or a Ray cluster",
        description="Starts a Python program several times, as the workers of one cluster. Each "
        "finds the cluster in TF_CONFIG, computes with its part of the cores, and has its name "
        "before every line that it prints. When one fails, the others are ended, and this command "
        "exits as the first that failed.",
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        metavar="WORKERS",
        help="how many workers to start (default: one a GPU of this machine, without GPUs 1; or "
        "one a node of a Ray cluster)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="D",
        help="into how many logical devices each worker splits its CPU",
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        help="the address of this machine where the workers listen (default: the loopback "
        "address, which others cannot reach)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="end the workers after this time (default: never)",
    )
    parser.add_argument(
        "--env",
        choices=sorted(RECIPES),
        help="start nothing, and print how to start the workers there",
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="with --env, on how many machines (default: -n)"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="G", help="with --env, how many GPUs each machine has"
    )
    nodes.add_arguments(parser)
    hosts.add_arguments(parser)
    ray_places.add_arguments(parser)
    elastic_options.add_arguments(parser)
    in_memory.add_arguments(parser)
    parameter_servers.add_arguments(parser)
    top.add_option(parser)
    programs.add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    programs.choose_keras_backend()
    options.regroups_by_restart = elastic_options.regroups_by_restart(options)
    _check(options)
    if options.regroups_by_restart:
        options.in_memory_checkpoints = True
        options.restarts = elastic_options.restarts(options)
        options.workers = elastic_options.sizes(options)[2]
    if options.env is not None:
        print(RECIPES[options.env](_asked(options)), end="")
        return 0
    try:
        if elastic_options.is_elastic(options) and not options.regroups_by_restart:
            return elastic.run(options)
        if parameter_servers.is_asked(options):
            return parameter_servers.run(options)
        return _until_it_is_done(options)
    except (ImportError, UnavailableError) as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:  # before the workers are started
        return _INTERRUPTED


def _check(options: argparse.Namespace) -> None:
    for name, number, least in (
        ("-n", options.workers, 0 if elastic_options.may_start_nobody(options) else 1),
        ("--devices-per-worker", options.devices_per_worker, 1),
    ):
        if number is not None and number < least:
            raise CommandError(f"Expected at least {least} for {name}. Received: {number}")
    for option, number in (("--nodes", options.nodes), ("--gpus", options.gpus)):
        if number is not None and options.env is None:
            raise CommandError(f"{option} is for other places. Give --env, or leave it out.")
        if number is not None and number < 1:
            raise CommandError(f"Expected at least 1 for {option}. Received: {number}")
    for option, is_given, variable in (
        ("--metrics-address", options.metrics_address is not None, METRICS_VARIABLE),
        ("--opentelemetry", options.opentelemetry, OPENTELEMETRY_VARIABLE),
    ):
        if options.env is not None and is_given:
            raise CommandError(
                f"{option} is for workers that this command starts. With --env, set {variable} for "
                "those workers."
            )
    if options.env == "tf-config" and options.nodes is not None:
        raise CommandError("--nodes is for other machines: give -n for the workers of this one.")
    if options.nodes is not None and options.workers is not None:
        raise CommandError("With --env, --nodes and -n are one number: leave one out.")
    if not options.module and not os.path.isfile(options.script):
        raise CommandError(f"There is no program {options.script!r}.")
    ray_places.check(options)
    if options.address is not None and options.host is not None:
        raise CommandError("--host is for workers on this machine: leave it out with --address.")
    elastic_options.check(options)
    parameter_servers.check(options)
    others = {
        "--address": options.address is not None,
        "--env": options.env is not None,
        "--ps": parameter_servers.is_asked(options),
        "the options of elastic jobs": elastic_options.is_elastic(options),
    }
    in_memory.check(
        options,
        {
            **others,
            "the options of elastic jobs": False,
            "--hosts": hosts.is_asked(options),
        },
    )
    if hosts.is_asked(options):
        several = {
            "--nnodes": options.nnodes is not None,
            "--host": options.host is not None,
            "--metrics-address": options.metrics_address is not None,
            "--opentelemetry": options.opentelemetry,
        }
        hosts.check(options, others | several)
    else:
        nodes.check(options, others)


def _asked(options: argparse.Namespace) -> Asked:
    """Returns the input of the recipes."""
    return Asked(
        program=programs.program_of(options),
        workers=options.workers if options.nodes is None else options.nodes,
        devices_per_worker=options.devices_per_worker,
        host=options.host or LOOPBACK,
        is_monitored=not options.no_monitor,
        restarts=options.restarts or 0,
        restarts_on_error=options.restarts_on_error,
        gpus=options.gpus,
    )


def _placed(
    options: argparse.Namespace,
    ends: contextlib.ExitStack,
    partners: Partners | None,
    places: Sequence[int] | None,
) -> tuple[list[Program], Start, int]:
    """Returns the workers' programs, the function that starts each, and the first one's index.

    Args:
        options: The command's options.
        ends: Ends with the workers.
        partners: The records that this machine holds in memory.
        places: Those of the workers that are started, if it may be some.
    """
    first = 0
    if options.address is None:
        script = programs.script_of(options)
        start: Start = ProcessWorker
        if nodes.is_asked(options):
            environments, first = nodes.environments(options, partners)
        else:
            environments = local_environments(_asked(options), places)
        cores = cores_of_workers(environments)
    else:
        script, ray = ray_places.on_ray(options, ends, options.workers)
        start = ray.start
        environments = worker_environments(ray.cluster, options.devices_per_worker, ray.cores)
        cores = [None] * len(environments)
    arguments = ["-u", *script, *options.arguments]
    of_workers = [
        Program(arguments, own, cores=near) for own, near in zip(environments, cores, strict=True)
    ]
    return of_workers, start, first


def _until_it_is_done(options: argparse.Namespace) -> int:
    """Runs the job, again if it loses workers, and returns its exit code."""
    with contextlib.ExitStack() as job, _leaving_at_sigterm():
        part = _HostsPart(options) if hosts.is_asked(options) else _MachinePart(options, job)
        ends = math.inf if options.timeout is None else time.monotonic() + options.timeout
        code = _last_code(options, part, ends)
        part.ended(code)
        return code


def _last_code(options: argparse.Namespace, part: _MachinePart | _HostsPart, ends: float) -> int:
    """Runs a part of the job, again if it loses workers; returns the last exit code."""
    restarts = Restarts(options.restarts or 0)
    run, code = part.run(ends)
    try:
        while (again_in := _again_in(run, restarts, options, part)) is not None:
            time.sleep(max(0.0, min(again_in, ends - time.monotonic())))
            if time.monotonic() >= ends:
                run.complain(
                    f"Timed out: expected the job to end within {options.timeout:g} s, and it had "
                    "still to start again. Give it more time (--timeout), or fewer --restarts"
                )
                return _TIMED_OUT
            run, code = part.run(ends)
    except KeyboardInterrupt:
        run.complain("interrupted (SIGINT) before the workers were started again")
        return _INTERRUPTED
    except (CommandError, UnavailableError) as error:
        run.complain(f"the workers are not started again: {error}")
    return TOO_FEW_WORKERS if part.has_too_few else code


@contextlib.contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """Inside, SIGTERM leaves through `finally` blocks, also while no worker runs."""

    def terminated(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _again_in(
    run: _Run, restarts: Restarts, options: argparse.Namespace, part: _MachinePart | _HostsPart
) -> float | None:
    """Returns the seconds until all workers are started again; None if they are not."""
    failure, may_regroup = run.failure, options.regroups_by_restart
    if failure is None or not (restarts.at_most or may_regroup):
        return None
    if not (run.has_lost or options.restarts_on_error):
        run.complain("a program that fails is not started again (--restarts-on-error)")
        return None
    if may_regroup and not failure.has_lost_another:
        place = part.places[failure.worker]
        event = restarts.lost(place, failure.how, run.lived, part.has_kept)
    else:
        event = restarts.all_ended(run.lived)
    if "given_up" in event and may_regroup:
        return _without(failure.worker, event["given_up"], run, options, part)
    if "given_up" in event:
        run.complain(f"it is not started again: {event['given_up']}")
        return None
    seconds = float(event["again_in"])
    after = f" in {seconds:g} s" if seconds else ""
    count = f"{event['restart']} of {restarts.at_most}"
    run.complain(f"all workers are started again{after} ({count})")
    return seconds


def _without(
    worker: int,
    why: str,
    run: _Run,
    options: argparse.Namespace,
    part: _MachinePart | _HostsPart,
) -> float | None:
    """Leaves a worker's place out; returns the seconds until the others start, if they are enough.

    Their new processes are given new indices.
    """
    del part.places[worker]
    left = len(part.places)
    words = "1 worker" if left == 1 else f"{left} workers"
    told = f"worker {worker} is not started again: {why}"
    needed, *_ = elastic_options.sizes(options)
    if left < needed:
        part.has_too_few = True
        run.complain(f"{told}; {needed} workers are needed to continue, and there would be {left}")
        return None
    run.complain(f"{told}; the job goes on with {words}")
    return 0.0


class _MachinePart:
    """The job's workers on this machine, or all of them on a Ray cluster.

    Args:
        options: The command's options.
        job: Ends with the job: its monitoring outlives the workers.
    """

    def __init__(self, options: argparse.Namespace, job: contextlib.ExitStack):
        self._options = options
        self._job = job
        self._monitored: Monitored | None = None
        self._memory: in_memory.Memory | None = None
        workers = options.workers or default_workers()
        #: Those of the workers that are started, and whether they are not enough to continue.
        self.places = list(range(workers))
        self.has_too_few = False
        if in_memory.is_asked(options):
            terminal = Terminal(options.no_color)
            self._memory = in_memory.Memory(
                options, workers, job, lambda text: terminal.say(f"unison run: {text}")
            )

    @property
    def has_kept(self) -> bool:
        """Whether the workers have kept a state in memory since they were started."""
        return self._memory is not None and self._memory.has_kept

    def run(self, ends: float) -> tuple[_Run, int]:
        """Runs the workers until a time; returns the run, and its exit code."""
        options = self._options
        with contextlib.ExitStack() as inside:
            memory = self._memory
            partners = None if memory is None else memory.partners
            places = self.places if options.regroups_by_restart else None
            of_workers, start, first = _placed(options, inside, partners, places)
            if memory is not None:
                if options.regroups_by_restart:
                    memory.begin_with(len(of_workers))
                of_workers, start = memory.programs(of_workers), memory.start
                inside.enter_context(memory.watched(of_workers))
            names = [f"worker {first + index}" for index in range(len(of_workers))]
            if self._monitored is None:
                monitored = self._job.enter_context(top.monitored(options, "workers", names))
                self._monitored = monitored
            else:
                self._monitored.starts_again(names, "all workers are started again")
            run = _Run(self._monitored.programs(of_workers), start, options, first)
            return run, run.wait(ends)

    def ended(self, code: int) -> None:
        """Tells those who watch how the job has ended."""
        if self._monitored is not None:
            self._monitored.ended(code)


class _HostsPart:
    """The commands of the job's machines, each of which starts, and monitors, its workers."""

    has_too_few = has_kept = False

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self.places: list[int] = []

    def run(self, ends: float) -> tuple[_Run, int]:
        """Runs the commands until a time; returns the run, and its exit code."""
        made, named = hosts.programs(self._options)
        run = _Run(made, ProcessWorker, self._options, hosts=named)
        return run, run.wait(ends)

    def ended(self, code: int) -> None:
        """Does nothing: the machines' commands have told it."""


class _Run:
    """A job whose output is printed to the terminal.

    Args:
        programs: The programs.
        start: Starts one.
        options: The command's options.
        first: The index of the first worker, if others are on other machines.
        hosts: The machines, if each program is the command of one, whose lines have the names of
            workers already.
    """

    def __init__(
        self,
        programs: list[Program],
        start: Start,
        options: argparse.Namespace,
        first: int = 0,
        hosts: list[str] | None = None,
    ):
        self._programs = programs
        self._start = start
        self._noun = "worker" if hosts is None else "machine"
        if hosts is None:
            self._names = [f"worker {first + index}" for index in range(len(programs))]
        else:
            self._names = [f"a worker of {host}" for host in hosts]
        self._terminal = Terminal(options.no_color)
        #: The failure of the job; None if it is done, was interrupted, or took too long.
        self.failure: Failure | None = None
        #: Seconds from the start of the workers to that failure.
        self.lived = 0.0
        if hosts is None:
            self._tracebacks = DistinctTracebacks(
                lambda worker, line: self._terminal.show(first + worker, line)
            )
        else:
            self._tracebacks = DistinctTracebacks(lambda _, line: self._terminal.pass_on(line))
        self._output = InterruptedOutput(self._tracebacks)
        self._interrupts = 0

    def wait(self, ends: float) -> int:
        """Runs the job until a time at most, and returns the exit code."""
        left = None if ends == math.inf else max(0.0, ends - time.monotonic())
        begin = time.monotonic()
        job = Job(self._programs, self._output, start=self._start)
        with job, self._interrupting(job):
            try:
                with self._terminal.progress(job, len(self._programs), self._noun):
                    failure = job.wait(left)
            except TimeoutError as error:
                self.complain(str(error))
                return _TIMED_OUT
        self._output.end()
        self._tracebacks.close()
        if self._interrupts:
            count = len(self._programs)
            ended = f"the {count} workers were" if count > 1 else "the worker was"
            if self._noun == "machine":
                ended = f"the workers of {count} machine{'s' if count > 1 else ''} were"
            self.complain(f"interrupted (SIGINT); {ended} ended")
            return _INTERRUPTED
        self.failure = failure
        if failure is None:
            return 0
        self.lived = failure.ended_at - begin
        self._explain(failure)
        return LOST_ANOTHER if failure.has_lost_another else failure.exit_code

    @property
    def has_lost(self) -> bool:
        """Whether workers were lost, or the connection to a machine."""
        failure = self.failure
        if failure is None:
            return False
        is_cut = self._noun == "machine" and failure.exit_code == _SSH_FAILED
        return failure.is_loss or is_cut

    def complain(self, text: str) -> None:
        """Prints a line about the job."""
        self._terminal.complain(f"unison run: {text}")

    def _explain(self, failure: Failure) -> None:
        others = len(self._programs) - 1
        if self._noun == "worker":
            ended = f"the other {'workers were' if others > 1 else 'one was'} ended"
        else:
            ended = f"those of the other {'machines' if others > 1 else 'one'} were ended"
        error = f": {failure.error}" if failure.error else ""
        name = self._names[failure.worker]
        self.complain(f"{name} {failure.ending}{error}{f'; {ended}' if others else ''}")

    @contextlib.contextmanager
    def _interrupting(self, job: Job) -> Iterator[None]:
        """Forwards Ctrl-C to the workers; on the second one, kills them."""

        def interrupted(number: int, frame: object) -> None:
            self._interrupts += 1
            self._output.interrupt()
            job.signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

        before = signal.signal(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
