"""Where `unison run --address` starts a program's workers."""

from __future__ import annotations

import argparse
import contextlib
import os

from unison.runtime.launching import RayNodes, Room


def script_on_this_machine(options: argparse.Namespace) -> list[str]:
    """Returns what Python is started with here, without the program's arguments."""
    return ["-m", options.script] if options.module else [options.script]


def on_ray(
    options: argparse.Namespace,
    places: contextlib.ExitStack,
    workers: int | None,
    grace: float | None = None,
) -> tuple[list[str], RayNodes]:
    """Takes room on a Ray cluster, and has the program's folder sent there.

    Args:
        options: The command's.
        places: Ends what is taken.
        workers: How many there are. None: one a node.
        grace: See `RayNodes`.

    Returns:
        What Python is started with there, and the nodes.
    """
    script = script_on_this_machine(options)
    folder = os.getcwd()
    if not options.module:
        folder, name = os.path.split(os.path.abspath(options.script))
        script = [name]
    room = Room(workers, options.cpus_per_worker, options.gpus_per_worker)
    return script, places.enter_context(RayNodes(options.address, room, folder, grace))
