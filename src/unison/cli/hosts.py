"""`unison run --hosts`: a job on several machines, which `ssh` reaches."""

from __future__ import annotations

import argparse
import os
import random
import re
import sys

from unison.cli.errors import CommandError, require_alone
from unison.cli.programs import program_of
from unison.monitoring.metrics_endpoint import TOKEN_VARIABLE
from unison.monitoring.metrics_endpoint import VARIABLE as METRICS_VARIABLE
from unison.monitoring.otlp import VARIABLE as OPENTELEMETRY_VARIABLE
from unison.net.addresses import own_address
from unison.net.secret import KEY_VARIABLE, new_key
from unison.runtime.cluster_resolvers.ranks import PORTS
from unison.runtime.launching import Program
from unison.runtime.launching.remote import remote_program

_HOST = re.compile(r"(?P<host>[^\s,:]+)(?::(?P<workers>\d+))?")

#: The prefixes of environment variables that the other machines get, and those that they do not.
_FORWARDED = ("JAX_", "KERAS_", "NCCL_", "PYTHONPATH", "UNISON_", "XLA_")
_NOT_FORWARDED = (
    *(KEY_VARIABLE, "UNISON_ELASTIC_TOKEN", TOKEN_VARIABLE),
    *(METRICS_VARIABLE, OPENTELEMETRY_VARIABLE),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option for hosts."""
    parser.add_argument(
        "--hosts",
        metavar="HOST[:WORKERS],...",
        help="start the job on these machines by ssh, each with WORKERS or -n workers (default: "
        "one a GPU, without GPUs 1)",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Returns whether the command names hosts."""
    return options.hosts is not None


def check(options: argparse.Namespace, others: dict[str, bool]) -> None:
    """Rejects invalid options.

    Args:
        options: The command's options.
        others: Whether options for other kinds of jobs are given, by name.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    require_alone("--hosts", others)
    hosts = [host for host, _ in _hosts(options)]
    plain = [host.rpartition("@")[2] for host in hosts]
    if len(set(plain)) < len(plain):
        raise CommandError(f"Expected each of --hosts once. Received: {options.hosts}")
    is_loopback = (own_address(plain[0]) or "").startswith("127.")
    if options.rendezvous is None and is_loopback and any(map(_is_remote, plain)):
        raise CommandError(
            f"The other machines cannot reach {plain[0]!r}. Name this machine in --hosts by an "
            "address that they reach, or give --rendezvous HOST:PORT."
        )


def programs(options: argparse.Namespace) -> tuple[list[Program], list[str]]:
    """Returns the program that starts each machine's part of the job, and the hosts."""
    hosts = _hosts(options)
    first = hosts[0][0].rpartition("@")[2]
    rendezvous = options.rendezvous or f"{first}:{random.SystemRandom().choice(PORTS)}"
    key = new_key()
    for variable in (METRICS_VARIABLE, OPENTELEMETRY_VARIABLE):
        os.environ.pop(variable, None)  # else this machine's part would have its metrics
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
    }
    common = ["--nnodes", str(len(hosts)), "--rendezvous", rendezvous, "--no-color"]
    for name in ("rendezvous_timeout", "devices_per_worker"):
        if (value := getattr(options, name)) is not None:
            common += [f"--{name.replace('_', '-')}", str(value)]
    common += ["--no-monitor"] if options.no_monitor else []
    common += ["-m"] if options.module else []
    program = program_of(options)[1 if options.module else 0 :]
    made = [
        remote_program(
            host,
            [sys.executable, "-m", "unison", "run", *_of_workers(workers), *common, *program],
            os.getcwd(),
            environment,
            key,
        )
        for host, workers in hosts
    ]
    return made, [host for host, _ in hosts]


def _of_workers(count: int | None) -> list[str]:
    return [] if count is None else ["-n", str(count)]


def _hosts(options: argparse.Namespace) -> list[tuple[str, int | None]]:
    """Returns the hosts, and the number of workers of each; None: the host decides."""
    found = [_HOST.fullmatch(part) for part in options.hosts.split(",")]
    given = [each["workers"] for each in found if each is not None]
    counts = [options.workers if count is None else int(count) for count in given]
    if len(counts) < len(found) or 0 in counts:
        raise CommandError(
            f"Expected --hosts to be names or addresses such as a,b:2. Received: {options.hosts!r}"
        )
    return [(each["host"], count) for each, count in zip(found, counts, strict=True) if each]


def _is_remote(host: str) -> bool:
    return own_address(host) is None
