"""`unison run --min-workers` and `--join`: jobs whose workers may be lost and may join."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unison.cli import elastic_options, top
from unison.cli.elastic_story import Story
from unison.cli.errors import CommandError
from unison.cli.programs import program_of, script_of
from unison.cli.ray_places import on_ray
from unison.cli.terminal import Terminal
from unison.monitoring.reporting import ELASTIC_VARIABLE
from unison.net.addresses import LOOPBACK, address_towards, split_address
from unison.runtime.elastic.environment import TOKEN_VARIABLE, ElasticEnvironment
from unison.runtime.elastic.protocol import REGISTER_LOST
from unison.runtime.elastic.register import Register
from unison.runtime.launching import (
    ElasticJob,
    ForeignGroup,
    Guard,
    JobFolder,
    ProcessWorker,
    Program,
    Restarts,
    Start,
    elastic_environments,
)
from unison.runtime.launching.distinct_tracebacks import DistinctTracebacks
from unison.runtime.launching.elastic import Group

#: Seconds for the workers to connect at the start of a job.
_SECONDS_TO_START = 300.0

#: Timeout in seconds of the connection that checks whether the register listens.
_SECONDS_TO_CONNECT = 5.0


def run(options: argparse.Namespace) -> int:
    """Runs an elastic job, or adds workers to one, and returns the exit code.

    Raises:
        CommandError: The job cannot be started.
        UnavailableError: Its folder cannot be used.
    """
    terminal = Terminal(options.no_color)
    if options.join is None:
        return _Supervision(options, terminal).run()
    return _join(options, terminal)


class _Places(NamedTuple):
    """The places where the workers of a job are started.

    Attributes:
        script: The arguments of Python, without the program's arguments.
        listen: The address at which each worker listens; empty for that of the Ray node on which it
            is started.
        cores: The number of threads of each worker; None: they share this machine's cores.
        start: Starts a worker.
        register_host: The address of this machine at which the workers reach the register.
        folder: The job's folder, as the workers access it; None if they cannot.
    """

    script: list[str]
    listen: list[str]
    cores: int | None
    start: Start
    register_host: str
    folder: str | None


class _Supervision:
    """A job that this process runs."""

    def __init__(self, options: argparse.Namespace, terminal: Terminal):
        self._options = options
        self._terminal = terminal
        self._min_workers, self._max_workers, self._workers = elastic_options.sizes(options)
        self._story = Story(elastic_options.restarts(options))
        self._grace = elastic_options.grace(options)
        self._group = _OwnGroup(self._workers)
        names = [f"worker {index}" for index in range(self._workers)]
        self._monitored = top.monitored(options, "elastic", names)
        self._folder: JobFolder

    def run(self) -> int:
        """Runs the job, and returns its exit code."""
        options = self._options
        with contextlib.ExitStack() as ends:
            self._folder = ends.enter_context(
                JobFolder(options.folder, 2 * self._grace, self._say_that_others_end)
            )
            token = self._folder.token()
            places = self._placed(ends)
            ends.enter_context(self._monitored)
            register = ends.enter_context(self._register(places.register_host, token))
            self._group.register = register
            self._folder.publish(register.address)
            told = _told(options, register.address, token)._replace(folder=places.folder)
            environments = elastic_environments(
                told, places.listen, options.devices_per_worker, places.cores
            )
            output = ends.enter_context(contextlib.closing(DistinctTracebacks(self._terminal.show)))
            job = ends.enter_context(
                ElasticJob(
                    _programs(options, places.script, environments),
                    self._group,
                    output,
                    self._hear,
                    places.start,
                    Restarts(elastic_options.restarts(options)),
                    self._grace,
                    elastic_options.wait(options),
                    options.restarts_on_error,
                )
            )
            self._group.job = job
            if self._folder.has_state:
                self._say(f"the job resumes from {self._folder.path / 'state'}")
            self._say_how_to_join(register.address)
            with _stopping(job) as signals, self._terminal.progress(job, self._workers):
                code = job.run(options.timeout)
            if signals and not job.is_done:
                code = 128 + signals[0]
            _explain(job, self._terminal, "the job")
            self._close(code)
            self._monitored.ended(code)
        return code

    def _placed(self, ends: contextlib.ExitStack) -> _Places:
        """Returns the places where the workers are started, on this machine or on a Ray cluster."""
        options = self._options
        host = elastic_options.listen_at(options)[0]
        if options.address is None:
            guard = ends.enter_context(Guard(self._grace, [self._folder.workers_lock]))
            return _Places(
                script_of(options),
                [options.host or host] * self._workers,
                None,
                functools.partial(ProcessWorker, guard=guard),
                host,
                str(self._folder.path),
            )
        at_least = min(self._min_workers, self._workers)
        script, nodes = on_ray(options, ends, self._workers, self._grace, at_least)
        if options.listen is None:
            first = split_address(nodes.cluster.task_address("worker", 0))
            host = address_towards(*first) or host
        # Only a folder that the user has specified can be accessible to the nodes, too.
        folder = None if self._folder.is_temporary else str(self._folder.path)
        listen = [""] * self._workers
        return _Places(script, listen, nodes.cores, nodes.start, host, folder)

    def _register(self, host: str, token: str) -> Register:
        options = self._options
        port = elastic_options.listen_at(options)[1]
        try:
            return Register(
                self._min_workers,
                self._max_workers,
                slots=self._workers,
                host=host,
                port=port,
                token=token,
                heartbeat_timeout=elastic_options.heartbeat_timeout(options),
                wait=elastic_options.wait(options),
                start_timeout=_SECONDS_TO_START,
                on_event=self._hear,
                ends_after_errors=not options.restarts_on_error,
                on_report=self._monitored.hear,
            )
        except OSError as error:
            raise CommandError(
                f"Cannot listen on {host}:{port}: {error}. Give an address of this machine, and a "
                "port that is free there, as --listen."
            ) from error

    def _hear(self, event: Mapping[str, Any]) -> None:
        """Records and prints an event; called in any thread."""
        self._folder.note(event)
        self._group.hear(event)
        line = self._story.told(event)
        self._monitored.happened(event, line)
        if line is not None:
            self._say(line)

    def _say(self, message: str) -> None:
        self._terminal.say(f"[unison] {message}")

    def _say_that_others_end(self) -> None:
        self._say("waiting for the workers of an earlier run to end")

    def _say_how_to_join(self, address: str) -> None:
        token = shlex.quote(str(self._folder.path / "token"))
        program = shlex.join(program_of(self._options))
        self._say(
            f"more workers: {TOKEN_VARIABLE}=$(cat {token}) unison run --join {address} {program}"
        )

    def _close(self, code: int) -> None:
        """Removes the state of a finished job, or prints how to resume the job."""
        if code == 0:
            self._folder.forget_state()
        elif self._folder.has_state:
            where = self._folder.path
            self._say(
                f"its state is in {where / 'state'}; to resume: unison run --folder "
                f"{shlex.quote(str(where))} ..., with the same arguments otherwise"
            )


class _OwnGroup:
    """The group of a job whose register is in this process."""

    final_codes = ForeignGroup.final_codes - {REGISTER_LOST}

    def __init__(self, workers: int):
        self._own = {f"worker {index}": index for index in range(workers)}
        self._others: set[str] = set()
        self.register: Register
        self.job: ElasticJob | None = None

    def lost(self, worker: int) -> None:
        self.register.lost(worker)

    def wait(self, seconds: float) -> int | None:
        return self.register.wait(seconds)

    def has_others(self) -> bool:
        return bool(self._others)

    def end(self, why: str) -> None:
        self.register.end(REGISTER_LOST, why)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Notes workers that join and leave; called in any thread."""
        what, name = event["event"], str(event.get("worker"))
        own = self._own.get(name)
        if what == "came" and own is None:
            self._others.add(name)
        elif what in ("lost", "leaving", "done", "refused") and own is None:
            self._others.discard(name)
        if self.job is None:
            return
        if what == "came" and own is not None:
            self.job.back(own)
        elif what == "lost" and own is not None:
            self.job.missed(own)
        elif what == "started":
            for member in event["workers"]:
                if member in self._own:
                    self.job.joined(self._own[member])


def _join(options: argparse.Namespace, terminal: Terminal) -> int:
    """Starts workers for the job of another process, and returns the exit code."""
    host, port = elastic_options.checked_address(options.join, "--join")
    try:
        socket.create_connection((host, port), _SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise CommandError(
            f"Nobody listens at {options.join}: {error}. Give the address that the job's first "
            "command has printed; it must have been given --listen to be reached from elsewhere."
        ) from error
    listen = options.host or address_towards(host, port) or LOOPBACK
    told = _told(options, options.join, os.environ[TOKEN_VARIABLE])
    workers = options.workers or 1
    story = Story(elastic_options.restarts(options))
    own = f"{socket.gethostname()} ({os.getpid()})"
    environments = elastic_environments(
        told, [listen] * workers, options.devices_per_worker, added_by=own
    )

    def hear(event: Mapping[str, Any]) -> None:
        line = story.told(event)
        if line is not None:
            terminal.say(f"[unison] {line}")

    grace = elastic_options.grace(options)
    group: Group = ForeignGroup()
    output = DistinctTracebacks(terminal.show)
    with (
        contextlib.closing(output),
        Guard(grace) as guard,
        ElasticJob(
            _programs(options, script_of(options), environments),
            group,
            output,
            hear,
            functools.partial(ProcessWorker, guard=guard),
            Restarts(elastic_options.restarts(options)),
            grace,
            elastic_options.wait(options),
            options.restarts_on_error,
        ) as job,
        _stopping(job) as signals,
    ):
        with terminal.progress(job, workers):
            code = job.run(options.timeout)
        _explain(job, terminal, "this command")
    return 128 + signals[0] if signals else code


def _told(options: argparse.Namespace, register: str, token: str) -> ElasticEnvironment:
    return ElasticEnvironment(
        register=register,
        token=token,
        name="",
        slot=None,
        listen="",
        heartbeat_timeout=elastic_options.heartbeat_timeout(options),
        wait=elastic_options.wait(options),
        folder=None,
    )


def _programs(
    options: argparse.Namespace, script: list[str], environments: list[dict[str, str]]
) -> list[Program]:
    watched = {} if options.no_monitor else {ELASTIC_VARIABLE: "1"}
    return [Program(["-u", *script, *options.arguments], own | watched) for own in environments]


def _explain(job: ElasticJob, terminal: Terminal, what: str) -> None:
    """Prints how a worker failed, if that has ended `what`."""
    if job.failure is None:
        return
    error = f": {job.failure.error}" if job.failure.error else ""
    terminal.complain(f"[unison] {job.failure}, which ends {what}{error}")


@contextlib.contextmanager
def _stopping(job: ElasticJob) -> Iterator[list[int]]:
    """Stops the job on Ctrl-C or SIGTERM, and kills it on the second signal; yields the signals."""
    numbers: list[int] = []

    def stop(number: int, frame: object) -> None:
        numbers.append(number)
        job.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
