"""A running `unison run`, what it writes, and its processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

#: Within which a job does what is waited for; the machine may be busy.
SECONDS = 120


def soon(look: Callable[[], object], why: Callable[[], object] = lambda: "") -> None:
    """Waits until something is so."""
    last = time.monotonic() + SECONDS
    while not look():
        assert time.monotonic() < last, f"not within {SECONDS} s: {why()}"
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    """Those that have the folder in their command line or their environment, guards included."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                if str(folder).encode() in told:
                    found.append(int(process.name))
    return found


class Command:
    """A running `unison run` and what it has written."""

    def __init__(self, *arguments: object, **environment: str):
        command = [sys.executable, "-m", "unison", "run", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.output: list[str] = []
        self.messages: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=told, daemon=True)
            for told in (
                (self.process.stdout, self.output),
                (self.process.stderr, self.messages),
            )
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        """Kills it; its guards end its workers."""
        self.process.kill()
        self.process.wait(SECONDS)

    @staticmethod
    def _read(stream, lines: list[str]) -> None:
        lines.extend(line.rstrip("\n") for line in stream)

    def says(self, pattern: str, after: int = 0) -> re.Match:
        """Waits until it writes what matches, as its message number `after` or later."""
        found = []

        def look() -> bool:
            lines = [*self.messages[after:], *self.output]
            found[:] = [match for line in lines if (match := re.search(pattern, line))]
            return bool(found)

        soon(look, lambda: (pattern, self.messages, self.output))
        return found[-1]

    def pid(self, worker: int) -> int:
        """Returns the process of a worker that runs."""
        return int(self.says(rf"^\[worker {worker}\] pid (\d+) ")[1])

    def ends(self) -> int:
        code = self.process.wait(SECONDS)
        for reader in self._readers:
            reader.join(SECONDS)
        return code
