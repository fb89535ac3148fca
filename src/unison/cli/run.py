"""`unison run`: starts the workers of a program on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from unison.cli.errors import CommandError
from unison.runtime.launching import (
    Failure,
    Job,
    Program,
    cluster_on_this_machine,
    worker_environments,
)

#: The colours of the workers' names, in turn.
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")

#: What shells report for a program that Ctrl-C has ended.
_INTERRUPTED = 128 + signal.SIGINT


def add_command(commands: Any) -> None:
    """Adds `run` to the subcommands of a parser."""
    parser = commands.add_parser(
        "run",
        help="start a program's workers on this machine",
        description="Starts a Python program several times, as the workers of one cluster. Each "
        "finds the cluster in TF_CONFIG, computes with its part of the cores, and has its name "
        "before every line that it prints. When one fails, the others are ended, and this command "
        "exits as the first that failed.",
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        default=1,
        metavar="WORKERS",
        help="how many workers to start (default: 1)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="D",
        help="into how many logical devices each worker splits its CPU",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address of this machine where the workers listen (default: the loopback "
        "address, which others cannot reach)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end the workers after this time (default: never)",
    )
    parser.add_argument(
        "--env",
        choices=["tf-config"],
        metavar="tf-config",
        help="start nothing, and print what each worker would find in its environment",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT", help="the program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    for name, number in (
        ("-n", options.workers),
        ("--devices-per-worker", options.devices_per_worker),
    ):
        if number is not None and number < 1:
            raise CommandError(f"Expected at least 1 for {name}. Received: {number}")
    if not options.module and not os.path.isfile(options.script):
        raise CommandError(f"There is no program {options.script!r}.")
    try:
        cluster = cluster_on_this_machine(options.workers, options.host)
    except OSError as error:
        raise CommandError(
            f"Cannot listen on {options.host}: {error}. Give an address of this machine as --host."
        ) from error
    environments = worker_environments(cluster, options.devices_per_worker)
    if options.env is not None:
        for index, environment in enumerate(environments):
            print(f"# worker {index}")
            for name, value in environment.items():
                print(f"export {name}={shlex.quote(value)}")
        return 0
    program = [sys.executable, "-u", *(["-m"] if options.module else []), options.script]
    programs = [Program([*program, *options.arguments], own) for own in environments]
    return _Run(programs).wait(options.timeout)


class _Run:
    """A job whose output goes to the terminal."""

    def __init__(self, programs: list[Program]):
        self._programs = programs
        self._output = Console(highlight=False, soft_wrap=True)
        self._messages = Console(stderr=True, highlight=False, soft_wrap=True)
        self._interrupts = 0
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> int:
        """Runs the job and returns the exit code."""
        with Job(self._programs, self._show) as job, self._interrupting(job):
            try:
                with self._progress(job):
                    failure = job.wait(timeout)
            except TimeoutError as error:
                self._messages.print(f"unison run: {error}", style="bold red", markup=False)
                return 124
        if self._interrupts:
            return _INTERRUPTED
        if failure is not None:
            self._explain(failure)
        return 0 if failure is None else failure.exit_code

    def _show(self, worker: int, line: str) -> None:
        if not self._output.is_terminal:
            with self._lock:
                print(f"[worker {worker}] {line}", flush=True)
            return
        name = Text(f"[worker {worker}] ", style=_COLOURS[worker % len(_COLOURS)])
        self._output.print(name + Text.from_ansi(line))

    def _explain(self, failure: Failure) -> None:
        others = len(self._programs) - 1
        ended = f"; the other {'workers were' if others > 1 else 'one was'} ended" if others else ""
        self._messages.print(f"unison run: {failure}{ended}", style="bold red", markup=False)
        for line in failure.last_lines:
            self._messages.print(line, markup=False)

    def _progress(self, job: Job) -> contextlib.AbstractContextManager[object]:
        """Shows, in a terminal, how many workers run and for how long."""
        if not self._output.is_terminal:
            return contextlib.nullcontext()
        return self._output.status(_Progress(job, len(self._programs)))

    @contextlib.contextmanager
    def _interrupting(self, job: Job) -> Iterator[None]:
        """Passes Ctrl-C on to the workers; the second time, they are killed."""

        def interrupted(number: int, frame: object) -> None:
            self._interrupts += 1
            job.signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

        def terminated(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        before = (
            signal.signal(signal.SIGINT, interrupted),
            signal.signal(signal.SIGTERM, terminated),
        )
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])


class _Progress:
    """The line at the foot of the terminal."""

    def __init__(self, job: Job, workers: int):
        self._job = job
        self._workers = workers
        self._begin = time.monotonic()

    def __rich__(self) -> str:
        seconds = time.monotonic() - self._begin
        return f"{self._job.running} of {self._workers} workers run, {seconds:.0f} s"
