"""`unison run --nnodes`: the part of a job on one of several machines, without a scheduler."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from unison.cli.errors import CommandError, require_alone
from unison.cli.numbers import seconds
from unison.errors import OpError
from unison.net.secret import KEY_VARIABLE
from unison.runtime.launching import with_own_gpus, worker_environments
from unison.runtime.launching.node_group import NodeCounts, NodeGroup
from unison.runtime.launching.nodes import Node, about_program, address_of, meet_nodes
from unison.runtime.launching.partners import Partners

#: Seconds that a machine waits for the others, and for more of them than are needed.
_TIMEOUT = 300.0
_LAST_CALL = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for jobs of several machines."""
    group = parser.add_argument_group(
        "several machines", "the same command on each of them, in any order"
    )
    group.add_argument(
        "--nnodes",
        type=_counts,
        metavar="N or MIN:MAX",
        help="how many machines the job has, each with -n workers; of MIN to MAX, some may be lost "
        "and others may come",
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
    group.add_argument(
        "--last-call",
        type=seconds,
        metavar="SECONDS",
        help="with --nnodes MIN:MAX, how long the first start waits for further machines once MIN "
        f"have come (default: {_LAST_CALL:g})",
    )


def _counts(text: str) -> NodeCounts:
    least, colon, most = text.partition(":")
    try:
        return NodeCounts(int(least), int(most if colon else least))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number, or MIN:MAX, received {text!r}"
        ) from None


def is_asked(options: argparse.Namespace) -> bool:
    """Returns whether the job has other machines."""
    return options.nnodes is not None


def may_change(options: argparse.Namespace) -> bool:
    """Returns whether machines may be lost, and others may come, while the job runs."""
    return is_asked(options) and bool(options.nnodes.may_change)


def check(options: argparse.Namespace, others: dict[str, bool]) -> None:
    """Rejects invalid options.

    Args:
        options: The command's options.
        others: Whether options for other kinds of jobs are given, by name.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    if options.nnodes is None:
        for name in ("rendezvous", "rendezvous_timeout", "last_call"):
            if getattr(options, name) is not None:
                raise CommandError(
                    f"--{name.replace('_', '-')} is for jobs of several machines. Give --nnodes, "
                    "or leave it out."
                )
        return
    if options.nnodes.least < 1:
        raise CommandError(f"Expected at least 1 for --nnodes. Received: {options.nnodes}")
    if options.nnodes.most < options.nnodes.least:
        raise CommandError(f"Expected MIN:MAX for --nnodes. Received: {options.nnodes}")
    if options.last_call is not None and not options.nnodes.may_change:
        raise CommandError("--last-call is for --nnodes MIN:MAX. Leave it out.")
    if options.rendezvous is None:
        raise CommandError(
            "--nnodes needs --rendezvous HOST:PORT, an address and a free port of one of the "
            "machines, the same on all."
        )
    require_alone("--nnodes", others)


def group_of(options: argparse.Namespace, newest: Callable[[], int | None]) -> NodeGroup:
    """Returns this machine's part in a job whose machines may change.

    Args:
        options: The command's options.
        newest: Returns the step of the newest state that this machine's workers have kept.

    Raises:
        CommandError: The rendezvous is not an address.
    """
    try:
        where = address_of(options.rendezvous)
    except ValueError as error:
        raise CommandError(str(error)) from error
    last_call = _LAST_CALL if options.last_call is None else options.last_call
    return NodeGroup(options.nnodes, where, last_call, newest)


def met(
    options: argparse.Namespace,
    workers: int,
    left: float,
    partners: Partners | None = None,
    group: NodeGroup | None = None,
) -> Node:
    """Meets the other machines.

    Args:
        options: The command's options.
        workers: The number of workers of this machine.
        left: Seconds that the job has left.
        partners: The records that this machine holds in memory. The slots of its own workers may be
            others afterwards.
        group: This machine's part in a job whose machines may change.

    Raises:
        CommandError: The machines cannot form a job.
    """
    timeout = min(options.rendezvous_timeout or _TIMEOUT, left)
    try:
        about = about_program(options.script, options.module)
        return meet_nodes(
            options.nnodes,
            options.rendezvous,
            workers,
            about,
            timeout,
            host=options.host,
            partners=partners,
            group=group,
        )
    except (OpError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error


def environments(
    options: argparse.Namespace, node: Node, places: Sequence[int], of_all: int
) -> list[dict[str, str]]:
    """Returns the additional environment variables of each worker of this machine.

    Args:
        options: The command's options.
        node: This machine, as it has met the others.
        places: The places of the workers that are started, each of which has GPUs of its own.
        of_all: The number of this machine's places.
    """
    own = range(node.first_worker, node.first_worker + len(places))
    workers = worker_environments(node.cluster, options.devices_per_worker, own=own)
    of_places = with_own_gpus([{}] * of_all)
    return [
        worker | of_places[place] | {KEY_VARIABLE: node.key}
        for worker, place in zip(workers, places, strict=True)
    ]
