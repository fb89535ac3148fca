"""The output of `unison run`: the workers' lines, and its own messages."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from rich.console import Console
from rich.text import Text

#: The colours of the workers' names, used cyclically.
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class _Running(Protocol):
    @property
    def running(self) -> int: ...


class Terminal:
    """Standard output, for the workers' lines, and standard error, for messages.

    Args:
        no_color: Whether to print without colours. Otherwise NO_COLOR and the terminal determine
            it.
    """

    def __init__(self, no_color: bool):
        plain = True if no_color else None
        self._output = Console(highlight=False, soft_wrap=True, no_color=plain)
        self._messages = Console(stderr=True, highlight=False, soft_wrap=True, no_color=plain)
        self._lock = threading.Lock()

    def show(self, worker: int, line: str) -> None:
        """Prints a line of a worker; called in any thread."""
        if not self._output.is_terminal:
            with self._lock:
                print(f"[worker {worker}] {line}", flush=True)
            return
        name = (f"[worker {worker}] ", _COLOURS[worker % len(_COLOURS)])
        self._output.print(Text.assemble(name, Text.from_ansi(line)))

    def pass_on(self, line: str) -> None:
        """Prints a line that has its worker's name already; called in any thread."""
        if not self._output.is_terminal:
            with self._lock:
                print(line, flush=True)
            return
        self._output.print(Text.from_ansi(line))

    def say(self, message: str, style: str | None = None) -> None:
        """Prints a message; called in any thread."""
        self._messages.print(message, style=style, markup=False)

    def complain(self, message: str) -> None:
        """Prints an error message."""
        self.say(message, style="bold red")

    def progress(
        self, job: _Running, workers: int, noun: str = "worker"
    ) -> contextlib.AbstractContextManager[object]:
        """Shows, in a terminal, the number of a job's running workers, and the elapsed time."""
        if not self._output.is_terminal:
            return contextlib.nullcontext()
        return self._output.status(_Progress(job, workers, noun))


class _Progress:
    """The status line at the bottom of the terminal."""

    def __init__(self, job: _Running, workers: int, noun: str):
        self._noun = noun
        self._job = job
        self._workers = workers
        self._begin = time.monotonic()

    def __rich__(self) -> str:
        seconds = time.monotonic() - self._begin
        return f"{self._job.running} of {self._workers} {self._noun}s run, {seconds:.0f} s"
