"""The workers that `unison run --env` shows how to start."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

from unison.cli.programs import KERAS_BACKEND, program_of
from unison.monitoring.first_worker import VARIABLE as MONITOR
from unison.net.addresses import LOOPBACK
from unison.runtime.devices import CPU_DEVICES_VARIABLE


@dataclasses.dataclass(frozen=True)
class Asked:
    """The program and workers to start.

    Attributes:
        program: The arguments of Python.
        workers: The number of workers. None: the recipe's default.
        devices_per_worker: The number of logical devices into which each worker splits its CPU;
            None: as configured.
        host: The address at which workers on this machine listen.
        is_monitored: Whether `unison top` may monitor them.
        restarts: How often all workers start again when one is lost.
        restarts_on_error: Whether they also start again when a program fails.
        gpus: The number of GPUs of each machine; None: the recipe says nothing about GPUs.
    """

    program: Sequence[str]
    workers: int | None = None
    devices_per_worker: int | None = None
    host: str = "127.0.0.1"
    is_monitored: bool = True
    restarts: int = 0
    restarts_on_error: bool = False
    gpus: int | None = None

    @property
    def options_on_ray(self) -> list[str]:
        """The options of `unison run --address`, beside the number of workers."""
        options = []
        if self.devices_per_worker:
            options += ["--devices-per-worker", str(self.devices_per_worker)]
        if self.gpus:
            options += ["--gpus-per-worker", str(self.gpus)]
        if self.restarts:
            options += ["--restarts", str(self.restarts)]
        if self.restarts_on_error:
            options.append("--restarts-on-error")
        if not self.is_monitored:
            options.append("--no-monitor")
        return options

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of every worker, wherever it is started."""
        found = {}
        if backend := os.environ.get(KERAS_BACKEND):
            found[KERAS_BACKEND] = backend
        if self.is_monitored:
            found[MONITOR] = "1"
        if self.devices_per_worker is not None:
            found[CPU_DEVICES_VARIABLE] = str(self.devices_per_worker)
        return found


def asked_for(options: argparse.Namespace) -> Asked:
    """Returns what the options of `unison run` ask for."""
    return Asked(
        program=program_of(options),
        workers=options.workers if options.nodes is None else options.nodes,
        devices_per_worker=options.devices_per_worker,
        host=options.host or LOOPBACK,
        is_monitored=not options.no_monitor,
        restarts=options.restarts or 0,
        restarts_on_error=options.restarts_on_error,
        gpus=options.gpus,
    )
