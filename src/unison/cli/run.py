"""`unison run`: starts the workers of a program, on this machine or on a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
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
from unison.cli.asked import asked_for
from unison.cli.errors import CommandError
from unison.cli.job_parts import HostsPart, MachinePart
from unison.cli.job_run import INTERRUPTED, TIMED_OUT, JobRun
from unison.cli.numbers import seconds
from unison.cli.recipes import RECIPES
from unison.errors import UnavailableError
from unison.monitoring.metrics_endpoint import VARIABLE as METRICS_VARIABLE
from unison.monitoring.otlp import VARIABLE as OPENTELEMETRY_VARIABLE
from unison.runtime.elastic.protocol import TOO_FEW_WORKERS
from unison.runtime.launching import Restarts


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
    is_elastic = elastic_options.is_elastic(options)
    options.regroups_by_restart = (
        elastic_options.regroups_by_restart(options) if is_elastic else nodes.may_change(options)
    )
    _check(options)
    if options.regroups_by_restart:
        options.in_memory_checkpoints = True
        options.restarts = elastic_options.restarts(options)
        options.workers = elastic_options.sizes(options)[2] if is_elastic else options.workers
    if options.env is not None:
        print(RECIPES[options.env](asked_for(options)), end="")
        return 0
    try:
        if is_elastic and not options.regroups_by_restart:
            return elastic.run(options)
        if parameter_servers.is_asked(options):
            return parameter_servers.run(options)
        return _until_it_is_done(options)
    except (ImportError, UnavailableError) as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:  # before the workers are started
        return INTERRUPTED


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


def _until_it_is_done(options: argparse.Namespace) -> int:
    """Runs the job, again if it loses workers, and returns its exit code."""
    with contextlib.ExitStack() as job, _leaving_at_sigterm():
        part = HostsPart(options) if hosts.is_asked(options) else MachinePart(options, job)
        ends = math.inf if options.timeout is None else time.monotonic() + options.timeout
        code = _last_code(options, part, ends)
        part.ended(code)
        return code


def _last_code(options: argparse.Namespace, part: MachinePart | HostsPart, ends: float) -> int:
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
                return TIMED_OUT
            run, code = part.run(ends)
    except KeyboardInterrupt:
        run.complain("interrupted (SIGINT) before the workers were started again")
        return INTERRUPTED
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
    run: JobRun, restarts: Restarts, options: argparse.Namespace, part: MachinePart | HostsPart
) -> float | None:
    """Returns the seconds until all workers are started again; None if they are not."""
    failure, may_regroup = run.failure, options.regroups_by_restart
    if part.group is not None and part.group.has_ended:
        return None
    if run.was_over:
        run.complain("the machines of the job meet again: all workers are started again")
        return 0.0
    if part.group is not None and part.group.has_changed:
        restarts.undo()  # a machine was lost, or has come
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
    if "given_up" in event and may_regroup and not failure.has_lost_another:
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
    run: JobRun,
    options: argparse.Namespace,
    part: MachinePart | HostsPart,
) -> float | None:
    """Leaves a worker's place out; returns the seconds until the others start, if they are enough.

    Their new processes are given new indices.
    """
    del part.places[worker]
    left = len(part.places)
    words = "1 worker" if left == 1 else f"{left} workers"
    told = f"worker {worker} is not started again: {why}"
    needed = 1 if part.group is not None else elastic_options.sizes(options)[0]
    if left < needed:
        part.has_too_few = True
        few = "1 worker is" if needed == 1 else f"{needed} workers are"
        run.complain(f"{told}; {few} needed to continue, and there would be {left}")
        return None
    run.complain(f"{told}; the job goes on with {words}")
    return 0.0
