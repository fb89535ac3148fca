"""`--address`: the options for workers on a Ray cluster, and their allocation there."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Collection

from unison.cli.errors import CommandError
from unison.cli.programs import script_of
from unison.runtime.launching import RayNodes, Room

#: Seconds for which workers that are started again wait for nodes to be added to the cluster.
SECONDS_FOR_NODES = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of workers on a Ray cluster."""
    group = parser.add_argument_group("on a Ray cluster")
    group.add_argument(
        "--address",
        metavar="RAY",
        help="start the workers there: auto, HOST:PORT from one of its nodes, or ray://HOST:PORT "
        "from elsewhere; the program's folder is sent there",
    )
    group.add_argument(
        "--cpus-per-worker",
        type=int,
        metavar="CPUS",
        help="how many of its CPUs a worker takes (default: its share of a node's)",
    )
    group.add_argument("--gpus-per-worker", type=int, metavar="GPUS", help="the same for GPUs")


def check(options: argparse.Namespace) -> None:
    """Rejects invalid options.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    for name, number, least in (
        ("--cpus-per-worker", options.cpus_per_worker, 1),
        ("--gpus-per-worker", options.gpus_per_worker, 0),
    ):
        if number is not None and number < least:
            raise CommandError(f"Expected at least {least} for {name}. Received: {number}")
        if number is not None and options.address is None:
            raise CommandError(f"{name} is for Ray clusters. Give --address, or leave it out.")


def on_ray(
    options: argparse.Namespace,
    places: contextlib.ExitStack,
    workers: int | None,
    grace: float | None = None,
    at_least: int | None = None,
    patience: float = 0.0,
    on_wait: Callable[[str], None] = lambda text: None,
    undecided: Collection[str] = (),
) -> tuple[list[str], RayNodes]:
    """Allocates resources on a Ray cluster, and sends the program's folder there.

    Args:
        options: The command's options.
        places: The stack that releases the resources.
        workers: The number of workers. None: one per node.
        grace: See `RayNodes`.
        at_least: See `RayNodes`.
        patience: See `RayNodes`.
        on_wait: See `RayNodes`.
        undecided: See `RayNodes`.

    Returns:
        The arguments of Python on the nodes, and the nodes.
    """
    script = script_of(options)
    folder = os.getcwd()
    if not options.module:
        folder, name = os.path.split(os.path.abspath(options.script))
        script = [name]
    room = Room(workers, options.cpus_per_worker, options.gpus_per_worker)
    nodes = RayNodes(
        options.address,
        room,
        folder,
        grace,
        at_least=at_least,
        patience=patience,
        on_wait=on_wait,
        undecided=undecided,
    )
    return script, places.enter_context(nodes)
