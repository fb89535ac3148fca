"""`unison run --nnodes`: the part of a job on one of several machines, without a scheduler."""

from __future__ import annotations

import argparse

from unison.cli.errors import CommandError, require_alone
from unison.cli.numbers import seconds
from unison.errors import OpError
from unison.net.secret import KEY_VARIABLE
from unison.runtime.launching import default_workers, with_own_gpus, worker_environments
from unison.runtime.launching.nodes import about_program, meet_nodes
from unison.runtime.launching.partners import Partners

#: Seconds that a machine waits for the others.
_TIMEOUT = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for jobs of several machines."""
    group = parser.add_argument_group(
        "several machines", "the same command on each of them, in any order"
    )
    group.add_argument(
        "--nnodes",
        type=int,
        metavar="N",
        help="how many machines the job has, each with -n workers",
    )
    group.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the machines meet: an address and a free port of one of them",
    )
    group.add_argument(
        "--rendezvous-timeout",
        type=seconds,
        metavar="SECONDS",
        help=f"how long a machine waits for the others (default: {_TIMEOUT:g})",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Returns whether the job has other machines."""
    return options.nnodes is not None


def check(options: argparse.Namespace, others: dict[str, bool]) -> None:
    """Rejects invalid options.

    Args:
        options: The command's options.
        others: Whether options for other kinds of jobs are given, by name.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    if options.nnodes is None:
        for name in ("rendezvous", "rendezvous_timeout"):
            if getattr(options, name) is not None:
                raise CommandError(
                    f"--{name.replace('_', '-')} is for jobs of several machines. Give --nnodes, "
                    "or leave it out."
                )
        return
    if options.nnodes < 1:
        raise CommandError(f"Expected at least 1 for --nnodes. Received: {options.nnodes}")
    if options.rendezvous is None:
        raise CommandError(
            "--nnodes needs --rendezvous HOST:PORT, an address and a free port of one of the "
            "machines, the same on all."
        )
    require_alone("--nnodes", others)


def environments(
    options: argparse.Namespace, partners: Partners | None = None
) -> tuple[list[dict[str, str]], int]:
    """Meets the other machines.

    Args:
        options: The command's options.
        partners: The records that this machine holds in memory. The slots of its own workers may be
            others afterwards.

    Returns:
        The additional environment variables of each worker of this machine, and the index of the
        first of them in the job.

    Raises:
        CommandError: The machines cannot form a job.
    """
    count = options.workers or default_workers()
    timeout = options.rendezvous_timeout or _TIMEOUT
    try:
        about = about_program(options.script, options.module)
        node = meet_nodes(
            options.nnodes,
            options.rendezvous,
            count,
            about,
            timeout,
            host=options.host,
            partners=partners,
        )
    except (OpError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    own = range(node.first_worker, node.first_worker + count)
    of_workers = worker_environments(node.cluster, options.devices_per_worker, own=own)
    return with_own_gpus([each | {KEY_VARIABLE: node.key} for each in of_workers]), own.start
