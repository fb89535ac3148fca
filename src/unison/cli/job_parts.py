"""The part of a job that one command of `unison run` starts, as often as the job starts."""

from __future__ import annotations

import argparse
import contextlib
import time

from unison.cli import hosts, in_memory, nodes, programs, ray_places, top
from unison.cli.asked import asked_for
from unison.cli.job_run import JobRun
from unison.cli.recipes import local_environments
from unison.cli.terminal import Terminal
from unison.monitoring.launcher import Monitored
from unison.runtime.launching import (
    ProcessWorker,
    Program,
    RayNodes,
    Start,
    cores_of_workers,
    default_workers,
    worker_environments,
)
from unison.runtime.launching.node_group import NodeGroup


class MachinePart:
    """The job's workers on this machine, or all of them on a Ray cluster.

    Args:
        options: The command's options.
        job: Ends with the job: its monitoring outlives the workers.

    Attributes:
        places: Those of the workers that are started.
        has_too_few: Whether they are not enough to continue.
        group: This machine's part in a job whose machines may change.
    """

    def __init__(self, options: argparse.Namespace, job: contextlib.ExitStack):
        self._options = options
        self._job = job
        self._monitored: Monitored | None = None
        self._memory: in_memory.Memory | None = None
        self._undecided: list[str] = []
        self._of_all = workers = options.workers or default_workers()
        self.places = list(range(workers))
        self.has_too_few = False
        self.group: NodeGroup | None = None
        if in_memory.is_asked(options):
            terminal = Terminal(options.no_color)
            self._memory = in_memory.Memory(
                options, workers, job, lambda text: terminal.say(f"unison run: {text}")
            )

        if nodes.may_change(options) and self._memory is not None:
            group = nodes.group_of(options, self._memory.newest)
            self.group = job.enter_context(group)

    @property
    def has_kept(self) -> bool:
        """Whether the workers have kept a state in memory since they were started."""
        return self._memory is not None and self._memory.has_kept

    def run(self, ends: float) -> tuple[JobRun, int]:
        """Runs the workers until a time; returns the run, and its exit code."""
        options = self._options
        with contextlib.ExitStack() as inside:
            memory = self._memory
            ray = None
            if options.address is None:
                of_workers, start, first = self._local(ends)
            else:
                of_workers, ray = self._on_ray(inside, ends)
                start, first = ray.start, 0
            if memory is not None:
                of_workers, start = memory.programs(of_workers), memory.start
                inside.enter_context(memory.watched(of_workers))
            names = [f"worker {first + index}" for index in range(len(of_workers))]
            if self._monitored is None:
                monitored = self._job.enter_context(top.monitored(options, "workers", names))
                self._monitored = monitored
            else:
                self._monitored.starts_again(names, "all workers are started again")
            run = JobRun(
                self._monitored.programs(of_workers), start, options, first, is_over=self._is_over
            )
            code = run.wait(ends)
            self._undecided = [] if ray is None or run.failure is None else ray.undecided()
            return run, code

    def _is_over(self) -> bool:
        """Whether the machines of the job meet again."""
        return self.group is not None and self.group.is_over

    def _on_ray(self, inside: contextlib.ExitStack, ends: float) -> tuple[list[Program], RayNodes]:
        """Returns the programs of workers on a Ray cluster, and its nodes.

        Workers that are started again wait for a node that replaces a lost one.
        """
        options = self._options
        left = max(0.0, ends - time.monotonic())
        script, ray = ray_places.on_ray(
            options,
            inside,
            options.workers,
            patience=0.0 if self._monitored is None else min(ray_places.SECONDS_FOR_NODES, left),
            on_wait=lambda text: Terminal(options.no_color).say(f"unison run: {text}"),
            undecided=self._undecided,
        )
        arguments = ["-u", *script, *options.arguments]
        environments = worker_environments(ray.cluster, options.devices_per_worker, ray.cores)
        return [Program(arguments, own) for own in environments], ray

    def _local(self, ends: float) -> tuple[list[Program], Start, int]:
        """Returns the programs of workers here, what starts each, and the index of the first."""
        environments, first = self._environments(ends)
        cores = cores_of_workers(environments)
        arguments = ["-u", *programs.script_of(self._options), *self._options.arguments]
        of_workers = [
            Program(arguments, own, cores=near)
            for own, near in zip(environments, cores, strict=True)
        ]
        return of_workers, ProcessWorker, first

    def _environments(self, ends: float) -> tuple[list[dict[str, str]], int]:
        """Returns the additional environment variables of each worker of this machine, and the
        index of the first one in the job.
        """
        options, memory = self._options, self._memory
        first, machines, at_start = 0, 1, self._of_all
        if nodes.is_asked(options):
            partners = None if memory is None else memory.partners
            left = max(0.0, ends - time.monotonic())
            node = nodes.met(options, len(self.places), left, partners, self.group)
            if self.group is not None:
                self.group.watch()
            found = nodes.environments(options, node, self.places, self._of_all)
            first, machines = node.first_worker, node.machines
            at_start = node.at_start or self._of_all
        else:
            found = local_environments(asked_for(options), self.places)
        if memory is not None:
            memory.begin(machines, at_start if options.regroups_by_restart else None)
        return found, first

    def ended(self, code: int) -> None:
        """Tells those who watch how the job has ended."""
        if self.group is not None:
            self.group.leave(has_failed=code != 0)
        if self._monitored is not None:
            self._monitored.ended(code)


class HostsPart:
    """The commands of the job's machines, each of which starts, and monitors, its workers."""

    has_too_few = has_kept = False
    group = None

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self.places: list[int] = []

    def run(self, ends: float) -> tuple[JobRun, int]:
        """Runs the commands until a time; returns the run, and its exit code."""
        made, named = hosts.programs(self._options)
        run = JobRun(made, ProcessWorker, self._options, hosts=named)
        return run, run.wait(ends)

    def ended(self, code: int) -> None:
        """Does nothing: the machines' commands have told it."""
