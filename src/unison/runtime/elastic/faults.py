"""Fault injection in a worker of an elastic job, at a point of its program.

The faults are passed in an environment variable, so that the program does not change; the public
interface is `unison.testing`. Each fault is recorded before it happens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unison.errors import InvalidArgumentError
from unison.runtime.elastic import lifecycle
from unison.runtime.elastic.environment import elastic_environment

#: A JSON object: the `faults`, the `folder` for their records, and the `network` namespace that is
#: never cut.
VARIABLE: Final = "UNISON_FAULTS"

KINDS: Final = ("kill", "stop", "terminate", "cut", "slow", "exception")
PHASES: Final = (
    "start",
    "compile",
    "step",
    "exchange",
    "commit",
    "read",
    "evaluate",
    "checkpoint",
    "recovery",
)

_NEEDS_SECONDS = ("slow",)
_TAKES_SECONDS = ("slow", "stop", "cut")

#: The network namespace of a process.
_NETWORK = "/proc/self/ns/net"


class InjectedError(RuntimeError):
    """The error that a fault of the kind "exception" raises."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that happens in one worker, once in a job.

    Args:
        kind: The kind of fault: "kill" (SIGKILL), "terminate" (SIGTERM, as before a preemption),
            "stop" (SIGSTOP), "cut" (its network is down), "slow" (it sleeps), or "exception" (an
            `InjectedError` is raised).
        worker: The index of the worker, as in the prefix of its output.
        step: The number of steps that must have taken effect before the fault happens.
        phase: Where in the program it happens: at the "start" of the worker (first before it
            connects to the register, then once it has joined the job); before it "compile"s a
            program; before a "step" is launched, or while one is running ("exchange"); when it is
            known that a step has taken effect ("commit"); before a step of an evaluation
            ("evaluate"); before the replicas' values are "read", as when a variable is created;
            when a "checkpoint" is written; or during a "recovery": while the group stops, forms, or
            transfers the state.
        occurrence: At which occurrence of the phase after `step`, counted from 1.
        seconds: The duration, for "stop" and "cut" (None: forever) and "slow".

    Raises:
        InvalidArgumentError: There is no such fault.

    Examples:
        >>> Fault("kill", worker=1, step=20)
        Fault(kind='kill', worker=1, step=20, phase='step', occurrence=1, seconds=None)
    """

    kind: str
    worker: int
    step: int = 0
    phase: str = "step"
    occurrence: int = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        _check(self.kind in KINDS, f"a kind of {KINDS}", self.kind)
        _check(self.phase in PHASES, f"a phase of {PHASES}", self.phase)
        _check(self.worker >= 0, "a worker's number, from 0", self.worker)
        _check(self.step >= 0, "a number of steps", self.step)
        _check(self.occurrence >= 1, "an occurrence, from 1", self.occurrence)
        _check(self.seconds is None or self.seconds >= 0, "seconds from 0", self.seconds)
        if self.seconds is None and self.kind in _NEEDS_SECONDS:
            _check(False, f"seconds for the kind {self.kind!r}", None)
        if self.seconds is not None and self.kind not in _TAKES_SECONDS:
            _check(
                False, f"no seconds for the kind {self.kind!r}, which lasts forever", self.seconds
            )


def _check(is_so: bool, expected: str, received: object) -> None:
    if not is_so:
        raise InvalidArgumentError(message=f"Expected {expected}. Received: {received!r}")


def told(faults: Sequence[Fault], folder: Path, worker: int | None = None) -> dict[str, str]:
    """Returns the environment variables that inject faults into the workers of a job.

    Args:
        faults: The faults; each happens once in the job, also if its worker is restarted.
        folder: The folder for the records of the faults that have happened.
        worker: The index of the worker. Default: its index among those that the job's first command
            starts.
    """
    given = {
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "folder": str(folder),
        "network": _own_network(),
        "worker": worker,
    }
    return {VARIABLE: json.dumps(given)}


def fired(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the records of the faults that have happened, by index in the list of faults."""
    found = {}
    for path in folder.glob("fault-*.json"):
        found[int(path.stem.removeprefix("fault-"))] = json.loads(path.read_text())
    return found


def listen() -> None:
    """Installs the faults that were configured for this worker, if any.

    Raises:
        InvalidArgumentError: The configuration cannot be parsed.
    """
    given = os.environ.get(VARIABLE)
    environment = elastic_environment()
    if given is None or environment is None:
        return
    try:
        found = json.loads(given)
        faults = [Fault(**fault) for fault in found["faults"]]
        own = environment.slot if found.get("worker") is None else found["worker"]
        injector = _Injector(faults, own, Path(found["folder"]), found.get("network"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            message=f"Expected {VARIABLE} as unison.testing sets it. Received: {given!r} "
            f"({type(error).__name__}: {error})."
        ) from error
    lifecycle.listeners.append(injector)


class _Injector:
    """Triggers faults when the worker reaches their points.

    Args:
        faults: The faults of all workers.
        worker: The index of this worker.
        folder: The folder for the records of the faults that have happened.
        network: The network namespace that is never cut: the tester's.
    """

    def __init__(
        self, faults: Sequence[Fault], worker: int | None, folder: Path, network: str | None
    ):
        self._faults = faults
        self._folder = folder
        self._network = network
        self._is_happening = False
        self._step = 0
        #: For each fault of this worker, how many occurrences of its phase remain until it happens.
        self._left = {
            place: fault.occurrence
            for place, fault in enumerate(faults)
            if fault.worker == worker and not self._path(place).exists()
        }

    def __call__(self, point: str, step: int | None, about: Mapping[str, Any]) -> None:
        if step is None:
            step = self._step
        self._step = step
        if self._is_happening:
            return
        for place in list(self._left):
            fault = self._faults[place]
            if fault.phase != point or step < fault.step:
                continue
            self._left[place] -= 1
            if self._left[place] == 0:
                del self._left[place]
                self._let_happen(place, step, about)

    def _let_happen(self, place: int, step: int, about: Mapping[str, Any]) -> None:
        fault = self._faults[place]
        if fault.kind == "cut":
            self._require_own_network()
        where = {name: value for name, value in about.items() if isinstance(value, str)}
        record = {**dataclasses.asdict(fault), "at_step": step, "pid": os.getpid(), **where}
        if not self._write(place, record):
            return
        self._is_happening = True
        try:
            self._do(fault)
        finally:
            self._is_happening = False

    def _do(self, fault: Fault) -> None:
        if fault.kind == "slow":
            assert fault.seconds is not None
            time.sleep(fault.seconds)
        elif fault.kind == "exception":
            raise InjectedError(f"Injected: {fault}")
        elif fault.kind == "cut":
            _cut(fault.seconds)
        elif fault.kind == "stop":
            if fault.seconds is not None:
                _later(fault.seconds, f"kill -CONT {os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
            os.kill(os.getpid(), number)

    def _path(self, place: int) -> Path:
        return self._folder / f"fault-{place}.json"

    def _write(self, place: int, record: Mapping[str, Any]) -> bool:
        """Records a fault on disk; returns whether it was not recorded before."""
        try:
            file = os.open(self._path(place), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with open(file, "w") as opened:
            opened.write(json.dumps(record))
            opened.flush()
            os.fsync(file)
        return True

    def _require_own_network(self) -> None:
        if _own_network() in (None, self._network) or shutil.which("ip") is None:
            raise InvalidArgumentError(
                message='Faults of the kind "cut" need a worker in a network namespace of its own, '
                "and the command `ip`. This worker shares the tester's namespace, or there are no "
                "namespaces here. Start it in one (`ip netns exec NAME`), or leave these faults "
                "out."
            )


def _own_network() -> str | None:
    try:
        return os.readlink(_NETWORK)
    except OSError:
        return None


def _cut(seconds: float | None) -> None:
    """Takes the network links of this process down, and up again after `seconds`."""
    links = [name for name in os.listdir("/sys/class/net") if name != "lo"]
    for link in links:
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
    if seconds is not None:
        _later(seconds, *(f"ip link set {link} up" for link in links))


def _later(seconds: float, *commands: str) -> None:
    """Runs commands after `seconds` in another process of this worker's process group."""
    subprocess.Popen(
        ["sh", "-c", "; ".join([f"sleep {seconds:g}", *commands])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
