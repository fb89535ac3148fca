"""The checks, in order: numbers first, then jobs, then what is measured."""

from __future__ import annotations

import dataclasses

_HERE = "benchmarks.gpu"


@dataclasses.dataclass(frozen=True)
class Check:
    """A check, which runs in a process of its own.

    Attributes:
        name: Its name on the command line and in the file of results.
        title: What the page calls it.
        function: MODULE:FUNCTION: it takes a `Setting` and yields findings.
        seconds: How long it may take, of `SECONDS` for all.
        least_devices: On fewer devices there is nothing to check.
        computes: Whether its process uses the devices itself. That of another one must not hold
            the GPUs' memory, which those that it starts need.
    """

    name: str
    title: str
    function: str
    seconds: float
    least_devices: int = 1
    computes: bool = False


#: Finds out what there is; without it, no other check can run.
MACHINE = Check("machine", "The machine", f"{_HERE}.machine:describe", 40, computes=True)

CHECKS = (
    Check("parity", "Numbers of the parity set", f"{_HERE}.numbers:parity", 75),
    Check("random", "Numbers of random programs", f"{_HERE}.numbers:random", 55),
    Check("checkpoint", "Checkpoints", f"{_HERE}.jobs:checkpoint", 60),
    Check("interrupt", "Ctrl-C", f"{_HERE}.jobs:interrupt", 50),
    Check("killed", "A killed worker", f"{_HERE}.jobs:killed_worker", 75),
    Check("restarted", "A restart from memory", f"{_HERE}.jobs:restarted", 60),
    Check("fit-mlp", "fit of an MLP", f"{_HERE}.speed:mlp", 60),
    Check("run", "strategy.run", f"{_HERE}.speed:run", 45),
    Check("fit-cnn", "fit of a CNN", f"{_HERE}.speed:cnn", 60),
    Check("processes", "Several processes", f"{_HERE}.speed:processes", 75, least_devices=2),
    Check("prefetch", "The input's prefetch", f"{_HERE}.speed:prefetch", 60),
    Check("grouping", "Grouping's threshold", f"{_HERE}.grouping:threshold", 45, computes=True),
    Check("determinism", "Determinism", f"{_HERE}.jobs:determinism", 50),
    Check("memory", "Memory", f"{_HERE}.speed:memory", 45),
    Check("saving", "Saving", f"{_HERE}.speed:checkpoint_time", 45),
    # Most of it is compiling. The last one, since it has the time of three others.
    Check("fit-gpt", "fit of a GPT", f"{_HERE}.speed:gpt", 200),
)

#: Seconds for everything. The checks' own limits are for slow machines, and add up to more.
SECONDS = 480.0

#: A check that would have less than this part of its time is left out.
LEAST_PART = 0.4
