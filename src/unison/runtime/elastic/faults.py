"""Lets something go wrong in a worker of an elastic job, at a point of its program.

The faults are told by an environment variable, so that the program needs no change; for people they
are in `unison.testing`. What has happened is written down before it does.
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
from unison.runtime.elastic import happenings
from unison.runtime.elastic.environment import elastic_environment

#: A JSON object: the `faults`, the `folder` for what has happened, and the `network` in which
#: nothing is cut.
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

#: The network of a process.
_NETWORK = "/proc/self/ns/net"


class InjectedError(RuntimeError):
    """What a fault of the kind "exception" raises."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one worker, once in a job.

    Args:
        kind: What happens: "kill" (SIGKILL), "terminate" (SIGTERM, as before a preemption), "stop"
            (SIGSTOP), "cut" (its network is down), "slow" (it sleeps), or "exception" (an
            `InjectedError` is raised).
        worker: The number of the worker, as in the lines that it prints.
        step: The fault waits until so many steps have taken effect.
        phase: Where in the program it happens: at the "start" of the worker; before it has a
            program "compile"d; before a "step" is launched, or with one on its way ("exchange");
            when it is known that a step has taken effect ("commit"); before a step of an
            evaluation ("evaluate"); before what the replicas have is "read", as when a variable is
            made; when a "checkpoint" is written; or in a "recovery": while the
            group stops, forms, or hands over the state.
        occurrence: At which of such points after `step`, counted from 1.
        seconds: How long it lasts, for "stop" and "cut" (None: for ever) and "slow".

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
            _check(False, f"no seconds for the kind {self.kind!r}, which is for ever", self.seconds)


def _check(is_so: bool, expected: str, received: object) -> None:
    if not is_so:
        raise InvalidArgumentError(message=f"Expected {expected}. Received: {received!r}")


def told(faults: Sequence[Fault], folder: Path, worker: int | None = None) -> dict[str, str]:
    """Returns the environment in which the workers of a job have faults.

    Args:
        faults: The faults; each happens once in the job, whoever takes its worker's place then.
        folder: Where it is written down that they have happened.
        worker: The number of the worker. Default: its place among those that the job's first
            command starts.
    """
    given = {
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "folder": str(folder),
        "network": _own_network(),
        "worker": worker,
    }
    return {VARIABLE: json.dumps(given)}


def fired(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns what was written down when faults happened, by their places in what was told."""
    found = {}
    for path in folder.glob("fault-*.json"):
        found[int(path.stem.removeprefix("fault-"))] = json.loads(path.read_text())
    return found


def listen() -> None:
    """Lets those faults happen to this worker that it was told, if there are any.

    Raises:
        InvalidArgumentError: They cannot be understood.
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
    happenings.listeners.append(injector)


class _Injector:
    """Waits for the points at which something is to go wrong.

    Args:
        faults: Those of all workers.
        worker: The number of this one.
        folder: Where it is written down that they have happened.
        network: The one in which nothing is cut: that of who tests.
    """

    def __init__(
        self, faults: Sequence[Fault], worker: int | None, folder: Path, network: str | None
    ):
        self._faults = faults
        self._folder = folder
        self._network = network
        self._is_happening = False
        self._step = 0
        #: How many of its points each fault of this worker still has to come to.
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
            raise InjectedError(f"This worker was to have an error: {fault}")
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
        """Writes down, on disk, that a fault happens; whether nobody has done so before."""
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
                message="A network is cut only where the worker has one of its own: a network "
                "namespace, and the command `ip`. This worker is in that of the one who tests it, "
                "or there are none here. Start it in one (`ip netns exec NAME`), or leave out "
                'faults of the kind "cut".'
            )


def _own_network() -> str | None:
    try:
        return os.readlink(_NETWORK)
    except OSError:
        return None


def _cut(seconds: float | None) -> None:
    """Takes the links of this process's network down, and up again after `seconds`."""
    links = [name for name in os.listdir("/sys/class/net") if name != "lo"]
    for link in links:
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
    if seconds is not None:
        _later(seconds, *(f"ip link set {link} up" for link in links))


def _later(seconds: float, *commands: str) -> None:
    """Has commands run by another process of this worker's group."""
    subprocess.Popen(
        ["sh", "-c", "; ".join([f"sleep {seconds:g}", *commands])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
