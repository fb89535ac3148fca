"""The options of `unison run` for elastic jobs, and their valid combinations."""

from __future__ import annotations

import argparse
import math
import os

from unison.cli.errors import CommandError
from unison.net.addresses import LOOPBACK, host_and_port
from unison.runtime.cluster_resolvers.gpus import gpus_of_jax
from unison.runtime.elastic.environment import TOKEN_VARIABLE
from unison.runtime.launching import default_workers

#: The default values of the options.
_RESTARTS = 10
_HEARTBEAT_TIMEOUT = 10.0
_WAIT = 60.0
_GRACE = 20.0

#: Wildcard addresses, which cannot be given to workers.
_ANY_ADDRESS = ("", "0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of elastic jobs."""
    group = parser.add_argument_group(
        "elastic jobs", "the job continues when workers are lost, and accepts new ones"
    )
    group.add_argument(
        "--min-workers", type=int, metavar="M", help="with fewer, it stops (default: 1)"
    )
    group.add_argument(
        "--max-workers",
        type=int,
        metavar="N",
        help="more wait until one is lost (default: --workers, else M); --workers says how many "
        "are started here (default: N)",
    )
    group.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="start more workers (default: 1) for the job whose register listens there; its secret "
        f"is in {TOKEN_VARIABLE}",
    )
    group.add_argument(
        "--restarts",
        type=int,
        metavar="R",
        help="how often, in the whole job, a lost worker is started again, also with --ps "
        f"(default: {_RESTARTS}); in other jobs, all workers are started again (default: 0)",
    )
    group.add_argument(
        "--restarts-on-error",
        action="store_true",
        help="start a worker again, too, whose program has raised (default: that ends the job)",
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=float,
        metavar="S",
        help=f"a worker that is silent for so many seconds is lost (default: "
        f"{_HEARTBEAT_TIMEOUT:g})",
    )
    group.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help=f"seconds to wait for others with fewer than M workers (default: {_WAIT:g})",
    )
    group.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="seconds that workers have to save and end when the job is stopped (default: "
        f"{_GRACE:g})",
    )
    group.add_argument(
        "--folder",
        metavar="DIR",
        help="where the job keeps what it needs to resume when it is started again (default: a "
        "temporary folder)",
    )
    group.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="the address of this machine at which workers of other machines reach the register "
        "(default: the loopback address, at a free port)",
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Returns whether an elastic job is requested."""
    asked = (options.min_workers, options.max_workers, options.join)
    return any(given is not None for given in asked)


def regroups_by_restart(options: argparse.Namespace) -> bool:
    """Returns whether the workers of each group of an elastic job are new processes.

    They are on GPUs, whose collectives end with their processes, and anywhere with checkpoints in
    memory, from which new processes go on.
    """
    starts = (options.join, options.listen, options.folder, options.address, options.env)
    is_on_gpus = all(given is None for given in starts) and bool(gpus_of_jax())
    return is_elastic(options) and (bool(options.in_memory_checkpoints) or is_on_gpus)


def may_start_nobody(options: argparse.Namespace) -> bool:
    """Returns whether all workers may be started by other commands."""
    return is_elastic(options) and options.join is None and options.address is None


def check(options: argparse.Namespace) -> None:
    """Rejects invalid options.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    if not is_elastic(options):
        _refuse(options, "is for elastic jobs. Give --min-workers, or leave it out", *_OF_ELASTIC)
        is_of_servers = options.ps is not None or options.ps_at is not None
        if is_of_servers:
            _refuse(options, "is for other jobs: leave it out with --ps", "restarts_on_error")
        elif options.restarts_on_error and not (options.restarts or options.regroups_by_restart):
            raise CommandError("--restarts-on-error needs --restarts R, how often at most.")
        _check_numbers(options)
        return
    _refuse(
        options,
        "starts a fixed number of workers elsewhere. Start an elastic job without it on one "
        "machine, and more workers on others with --join",
        "env",
    )
    _check_numbers(options)
    if regroups_by_restart(options):
        _refuse(
            options,
            "is for elastic jobs whose workers go on in the same processes. Leave it out, or start "
            "the job on CPUs (JAX_PLATFORMS=cpu) without --in-memory-checkpoints",
            *_OF_SAME_PROCESSES,
        )
    if options.join is not None:
        first = ("min_workers", "max_workers", "folder", "listen", "address")
        _refuse(options, "is for the command that starts the job: leave it out with --join", *first)
        checked_address(options.join, "--join")
        if not os.environ.get(TOKEN_VARIABLE):
            raise CommandError(
                f"--join needs the job's secret in the environment variable {TOKEN_VARIABLE}: it "
                "is in the file `token` of the job's folder."
            )
        return
    least, most, _ = sizes(options)
    if least < 1:
        raise CommandError(f"Expected at least 1 for --min-workers. Received: {least}")
    if most < least:
        raise CommandError(
            f"Expected at least as many for --max-workers as for --min-workers. Received: {most} "
            f"and {least}"
        )
    if options.workers is not None and options.workers > most:
        raise CommandError(
            f"Expected at most as many for --workers as for --max-workers. Received: "
            f"{options.workers} and {most}"
        )
    if regroups_by_restart(options) and options.workers not in (None, most):
        raise CommandError(
            f"Expected as many for --workers as for --max-workers, since no others can join a job "
            f"whose state is in the memory of this machine. Received: {options.workers} and {most}"
        )
    if options.folder is not None and os.path.isfile(options.folder):
        raise CommandError(f"Expected a folder for --folder. Received: {options.folder!r}")


#: The options that require an elastic job.
_OF_ELASTIC = (
    "heartbeat_timeout",
    "wait",
    "grace",
    "folder",
    "listen",
)


#: Those that need workers that outlive changes of the group.
_OF_SAME_PROCESSES = ("join", "listen", "folder", "heartbeat_timeout", "wait", "grace", "address")


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("restarts", 0), ("heartbeat_timeout", 0.5), ("wait", 0), ("grace", 0)):
        given = getattr(options, name)
        if given is not None and not given >= least:
            raise CommandError(f"Expected at least {least} for {_option(name)}. Received: {given}")
        if given == math.inf:
            raise CommandError(f"Expected a number with an end for {_option(name)}. Received: inf")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse(options: argparse.Namespace, why: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) not in (None, False):
            raise CommandError(f"{_option(name)} {why}.")


def sizes(options: argparse.Namespace) -> tuple[int, int, int]:
    """Returns the minimum and maximum number of workers, and the number that is started here."""
    least = 1 if options.min_workers is None else options.min_workers
    most = options.max_workers
    if most is None:
        most = max(least, options.workers or default_workers())
    return least, most, most if options.workers is None else options.workers


def checked_address(address: str, option: str) -> tuple[str, int]:
    """Returns the host and the port of an option's address."""
    where = host_and_port(address)
    if where is None:
        raise CommandError(f"Expected HOST:PORT for {option}. Received: {address!r}")
    return where


def listen_at(options: argparse.Namespace) -> tuple[str, int]:
    """Returns the host and the port at which the register listens; port 0 for a free one."""
    if options.listen is None:
        return options.host or LOOPBACK, 0
    given = options.listen
    host, colon, port = given.rpartition(":")
    is_bare_ipv6 = given.count(":") > 1 and "[" not in given
    if not colon or given.endswith("]") or is_bare_ipv6:
        host, port = given, "0"
    host = host.strip("[]")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise CommandError(f"Expected HOST or HOST:PORT for --listen. Received: {given!r}")
    if host in _ANY_ADDRESS:
        raise CommandError(
            f"Expected the address at which others reach this machine for --listen. Received: "
            f"{given!r}"
        )
    return host, int(port)


def restarts(options: argparse.Namespace) -> int:
    """Returns the maximum number of restarts of lost workers."""
    return _RESTARTS if options.restarts is None else int(options.restarts)


def heartbeat_timeout(options: argparse.Namespace) -> float:
    """Returns the seconds of silence after which a worker counts as lost."""
    return _given(options.heartbeat_timeout, _HEARTBEAT_TIMEOUT)


def wait(options: argparse.Namespace) -> float:
    """Returns the seconds for which too few workers wait for others."""
    return _given(options.wait, _WAIT)


def grace(options: argparse.Namespace) -> float:
    """Returns the seconds that workers have to save and end."""
    return _given(options.grace, _GRACE)


def _given(option: float | None, default: float) -> float:
    return default if option is None else option
