"""Records what takes effect in a worker of an elastic job, for `unison.testing.check`.

Each process has its own file of JSON objects, one per line. The folder is passed in an environment
variable, so that the program does not change.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unison.runtime.elastic import lifecycle
from unison.runtime.elastic.environment import elastic_environment

#: The folder for the files.
VARIABLE: Final = "UNISON_HISTORY"

#: The points that are recorded.
_WRITTEN = frozenset({"view", "resumed", "commit", "left", "state", "examples"})


def listen() -> None:
    """Starts recording in this worker, if the environment variable is set."""
    folder = os.environ.get(VARIABLE)
    environment = elastic_environment()
    if folder is not None and environment is not None:
        lifecycle.listeners.append(Writer(Path(folder), environment.name))


class Writer:
    """A worker's file.

    Args:
        folder: The folder in which it is created.
        name: The worker's name.
    """

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name.replace(' ', '-')}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._name = name
        self._step = 0
        self._count = itertools.count()

    def __call__(self, point: str, step: int | None, about: Mapping[str, Any]) -> None:
        if point not in _WRITTEN:
            return
        if step is None:
            step = self._step
        self._step = step
        given = {name: value() if callable(value) else value for name, value in about.items()}
        line = {"number": next(self._count), "is": point, "worker": self._name, "step": step}
        # A single write: if the process is killed, the file still ends with a complete line.
        os.write(self._file, (json.dumps(line | given) + "\n").encode())
