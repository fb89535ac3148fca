"""The folder of an elastic job: the files that outlive its processes.

- `lock`: held by the supervisor, so that only one runs the job.
- `workers.lock`: held as long as a worker is alive, also without a supervisor.
- `token`: the secret that authenticates workers; only its owner can read it.
- `address`: the current or last address of the register.
- `events.jsonl`: the job's events, one JSON object per line.
- `state`: the state that the workers saved when the job was interrupted; removed when it is done.
  Files `state-...` contain the parts that only one worker has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from unison.errors import UnavailableError
from unison.runtime.elastic.persisted_state import forget_kept
from unison.storage import atomic
from unison.storage.locks import lock
from unison.storage.temporary_folders import remove_left_behind

#: The files that a supervisor keeps open.
_KEPT_OPEN = ("lock", "workers.lock", "events.jsonl")

#: The prefix of the names of temporary folders.
_TEMPORARY = "unison-job-"

_TOKEN = re.compile("[0-9a-f]{32}")

#: The number of characters of an invalid file that a message shows.
_SHOWN = 64


class JobFolder:
    """The folder of a job that this process runs, as a context manager.

    Args:
        path: Its path; created if needed. None: a temporary folder, which is removed at the end
            unless it contains a state. Temporary folders without a state that killed processes have
            left behind are removed, too.
        patience: Seconds for the last workers of an earlier run of the job to end.
        on_wait: Called when there are such workers.

    Raises:
        UnavailableError: Another process runs the job, workers of an earlier one do not end, or the
            token is readable by others.

    Examples:
        >>> with JobFolder(None) as folder:
        ...     folder.note({"event": "started", "worker": 0})
        ...     folder.has_state
        False
    """

    def __init__(
        self, path: str | None, patience: float = 0.0, on_wait: Callable[[], None] = lambda: None
    ):
        self.is_temporary = path is None
        if path is None:
            remove_left_behind(_TEMPORARY, _KEPT_OPEN[:2], lambda left: (left / "state").exists())
            path = tempfile.mkdtemp(prefix=_TEMPORARY)
        self.path = Path(path).resolve()
        self._patience = patience
        self._on_wait = on_wait
        self._end = contextlib.ExitStack()
        self._journal = -1
        #: The file descriptor that the workers' processes keep open.
        self.workers_lock = -1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undoing:
            if self.is_temporary:
                undoing.callback(self._remove)
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                own_lock, self.workers_lock, self._journal = (
                    self._opened(name, undoing) for name in _KEPT_OPEN
                )
            except OSError as error:
                raise UnavailableError(
                    message=f"Cannot keep a job in {self.path}: {error}. Give another --folder."
                ) from error
            if not lock(own_lock):
                raise UnavailableError(
                    message=f"Another `unison run` runs the job of {self.path}. Wait for its end, "
                    "add workers to it with --join, or give another --folder."
                )
            if not lock(self.workers_lock):
                self._on_wait()
                if not lock(self.workers_lock, self._patience):
                    raise UnavailableError(
                        message=f"Workers of an earlier run of the job of {self.path} have not "
                        f"ended within {self._patience:g} s. End them, or give another --folder."
                    )
            self._end = undoing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    @property
    def has_state(self) -> bool:
        """Whether the workers have saved a state from which the job can resume."""
        return (self.path / "state").exists()

    def token(self) -> str:
        """Returns the secret that authenticates workers; an earlier run's, if there was one.

        Raises:
            UnavailableError: It is readable by others.
        """
        path = self.path / "token"
        if not path.exists():
            with atomic.aside(str(path)) as new:
                with new.opened(0o600) as file:
                    file.write(secrets.token_hex(16).encode())
                new.publish_if_absent()
        about = path.stat()
        if about.st_mode & 0o077 or about.st_uid != os.geteuid():
            raise UnavailableError(
                message=f"Expected a file that only its owner can read (mode 0600). Received: "
                f"{path} with mode {about.st_mode & 0o777:04o}. Remove it: a new one is made."
            )
        token = path.read_bytes().decode("ascii", "replace").strip()[:_SHOWN]
        if not _TOKEN.fullmatch(token):
            what = repr(token) if token else "an empty file"
            raise UnavailableError(
                message=f"Expected 32 hexadecimal digits in {path}. Received: {what}. Remove it: a "
                "new one is made."
            )
        return token

    def publish(self, address: str) -> None:
        """Writes the address of the register."""
        with atomic.replacing(str(self.path / "address")) as file:
            file.write(f"{address}\n".encode())

    def note(self, event: Mapping[str, Any]) -> None:
        """Adds a line to the journal; a full disk does not end the job."""
        line = json.dumps({"time": round(time.time(), 3), **event}) + "\n"
        with contextlib.suppress(OSError):
            os.write(self._journal, line.encode())

    def forget_state(self) -> None:
        """Removes the saved state: the job is done, and starts from the beginning next time."""
        forget_kept(str(self.path))

    def _opened(self, name: str, undoing: contextlib.ExitStack) -> int:
        opened = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        undoing.callback(os.close, opened)
        return opened

    def _remove(self) -> None:
        if not self.has_state:
            shutil.rmtree(self.path, ignore_errors=True)
