"""A child process that answers in lines of JSON, and leaves nobody behind.

The contests' driver and the checks of `benchmarks.gpu` start their processes so.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import unison

ROOT = pathlib.Path(__file__).resolve().parents[1]

#: Where this process has the package from: the checkout, unless it is installed.
_PACKAGE = pathlib.Path(unison.__file__).resolve().parents[1]

_LINES_OF_ERRORS = 15

#: Seconds between the end of a process's output and its own.
_SECONDS_TO_END = 10.0


def python_path(*folders: str) -> str:
    """Returns a PYTHONPATH: the checkout's root, folders of it, and the package, if it is there."""
    source = [ROOT / "src"] if _PACKAGE == ROOT / "src" else []
    return os.pathsep.join(map(str, [ROOT, *source, *(ROOT / folder for folder in folders)]))


class ProcessEndedError(RuntimeError):
    """A process ended, or closed its output, while an answer was expected."""


class AnsweringProcess:
    """A process in a session of its own, whose standard output is a line of JSON for each answer.

    Args:
        command: The program and its arguments; it starts in the checkout's root.
        environment: All of its environment variables.
        name: How messages about it begin.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str = ""):
        self._name = name
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `end`
        self._process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the driver; and it may have children
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout

    def tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `read_answers` says more
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def read_answers(self) -> list[dict[str, Any]]:
        """Reads what there is to read; returns the answers that are complete.

        Raises:
            ProcessEndedError: There is nothing to read any more.
        """
        read = os.read(self.output.fileno(), 65536)
        if not read:
            try:
                how = f"ended with status {self._process.wait(_SECONDS_TO_END)}"
            except subprocess.TimeoutExpired:
                how = "has closed its output, and runs on"
            raise ProcessEndedError(f"{self._name}{how}{self.last_errors()}")
        *complete, self._unread = (self._unread + read).split(b"\n")
        return [json.loads(line) for line in complete]

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def end(self, seconds: float = 0.0) -> None:
        """Kills the process and what it started, and waits for it.

        Args:
            seconds: How long it has before, from SIGTERM on, to end what it has started itself.
        """
        if seconds:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._input, self.output, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def last_errors(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in lines[-_LINES_OF_ERRORS:])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Lets Ctrl-C and the like wait, so that no process is started and then not remembered."""
    arrived: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)
