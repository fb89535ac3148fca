"""`unison run --in-memory-checkpoints`: the workers' state, in the memory of their hosts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unison.cli import nodes
from unison.cli.errors import CommandError, require_alone
from unison.cli.numbers import percentage
from unison.runtime.host_memory import DEFAULT_OVERHEAD, PROCESS, HostMemory
from unison.runtime.launching import Program, Start
from unison.runtime.launching.partners import Partners
from unison.runtime.launching.standby import StandbyWorkers
from unison.storage.temporary_folders import temporary_folder

#: JAX's variables for a cache of compiled programs, and what they are for a job that starts again:
#: all programs are kept.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_ALL_PROGRAMS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

#: Seconds between two looks for the workers' first records.
_SECONDS_BETWEEN_LOOKS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for checkpoints in memory."""
    group = parser.add_argument_group(
        "checkpoints in memory", "from which workers that are started again resume (--restarts)"
    )
    group.add_argument(
        "--in-memory-checkpoints",
        action="store_true",
        help="keep the state of training loops in the memory of the workers' machines, every few "
        "steps",
    )
    group.add_argument(
        "--checkpoint-overhead",
        type=percentage,
        metavar="PERCENT",
        help="how much of the time that may take, which determines how often it is done (default: "
        f"{100 * DEFAULT_OVERHEAD:g})",
    )


def is_asked(options: argparse.Namespace) -> bool:
    """Returns whether the state is kept in memory."""
    return bool(options.in_memory_checkpoints)


def check(options: argparse.Namespace, others: dict[str, bool]) -> None:
    """Rejects invalid options.

    Args:
        options: The command's options.
        others: Whether options for other kinds of jobs are given, by name.

    Raises:
        CommandError: The message states what is wrong, and the remedy.
    """
    if not is_asked(options):
        if options.checkpoint_overhead is not None and not options.regroups_by_restart:
            raise CommandError(
                "--checkpoint-overhead is for --in-memory-checkpoints. Give it, or leave both out."
            )
        return
    if not options.restarts and not options.regroups_by_restart:
        raise CommandError(
            "Checkpoints in memory are for workers that are started again. Give --restarts, or "
            "leave --in-memory-checkpoints out."
        )
    require_alone("--in-memory-checkpoints", others)


class Memory:
    """The memory of a job's workers on this machine, over all of their starts.

    Processes stand by that have imported what the program imports, to run it when the workers
    start again; and programs that were compiled once are taken from a cache.

    Args:
        options: The command's options.
        workers: The number of workers on this machine.
        job: Ends with the job.
        say: Called with what happens to the memory, in any thread.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        workers: int,
        job: contextlib.ExitStack,
        say: Callable[[str], None],
    ):
        percent = options.checkpoint_overhead
        overhead = DEFAULT_OVERHEAD if percent is None else percent / 100
        self._memory = job.enter_context(HostMemory(workers, overhead))
        #: The copies of other machines' records, and this one's there.
        self.partners: Partners | None = None
        if nodes.is_asked(options):
            may_regroup = bool(options.regroups_by_restart)
            self.partners = job.enter_context(Partners(self._memory, say, may_regroup))
        self._standbys = job.enter_context(StandbyWorkers())
        self._before: list[list[int]] = []
        self._programs: str | None = None
        if _CACHE not in os.environ:
            self._programs = job.enter_context(temporary_folder("programs"))

    def programs(self, programs: Sequence[Program]) -> list[Program]:
        """Returns the workers' programs, which keep their state in this memory."""
        return [
            dataclasses.replace(
                program,
                environment={
                    **self._cache(place),
                    **program.environment,
                    **self._memory.environment(place),
                },
            )
            for place, program in enumerate(programs)
        ]

    def begin(self, machines: int, at_start: int | None) -> None:
        """Notes what the next start of the workers is told.

        Args:
            machines: The number of the job's machines.
            at_start: The number of workers with which the whole job began, if it may change.
        """
        self._memory.is_copied = machines > 1
        self._memory.at_start = at_start

    def newest(self) -> int | None:
        """Returns the step of the newest state that this machine's workers have kept."""
        steps = [slots.steps()[:1] for slots in self._memory.slots]
        return min((newest for (newest,) in steps), default=None) if all(steps) else None

    @property
    def has_kept(self) -> bool:
        """Whether the workers have kept a state since they were started."""
        slots = zip(self._memory.slots, self._before, strict=True)
        return any(set(each.steps()) - set(before) for each, before in slots)

    def _cache(self, place: int) -> dict[str, str]:
        """Returns the variables with which a worker caches all programs, in a folder of its own."""
        if self._programs is None:
            return {}
        return {_CACHE: os.path.join(self._programs, str(place)), **_ALL_PROGRAMS}

    @property
    def start(self) -> Start:
        """Starts a worker: in a process that stands by, if there is one."""
        return self._standbys.start

    @contextlib.contextmanager
    def watched(self, programs: Sequence[Program]) -> Iterator[None]:
        """Inside, processes are prepared to stand by once the workers have kept their state."""
        is_over = threading.Event()
        self._before = before = [slots.steps() for slots in self._memory.slots]
        thread = threading.Thread(
            target=self._prepare_standbys,
            args=(programs, before, is_over),
            name="unison standbys",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _prepare_standbys(
        self, programs: Sequence[Program], before: list[list[int]], is_over: threading.Event
    ) -> None:
        waiting = dict(enumerate(programs))
        while waiting and not is_over.wait(_SECONDS_BETWEEN_LOOKS):
            for place, program in list(waiting.items()):
                told = self._about(place, before[place])
                if told is not None:
                    self._standbys.prepare(place, program, told["modules"], told["environment"])
                    del waiting[place]

    def _about(self, place: int, before: list[int]) -> dict[str, Any] | None:
        """Returns what a worker tells about its process in its first record of this start."""
        slots = self._memory.slots[place]
        if not set(slots.steps()) - set(before):
            return None
        with slots.records() as records:
            if not records:
                return None
            found: dict[str, Any] = json.loads(records[0].header["about"][PROCESS])
            return found
