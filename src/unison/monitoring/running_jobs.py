"""The running jobs of this user: a file for each, with the address of its monitoring.

The files are in a folder that only the user can access. The process that runs the job holds a lock
on its file, so that a stale file, for example after SIGKILL, can be recognized.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from unison.net.runtime_folder import runtime_folder
from unison.storage import atomic
from unison.storage.decoding import parsed_json, plain_dict, plain_text, whole_number
from unison.storage.locks import lock

#: The form of the address, to which `unison top` sends the token.
_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}")


class RunningJob(NamedTuple):
    """The address of a job's monitoring.

    Attributes:
        process: The id of the process that runs it.
        program: Its workers' program.
        address: The address of its monitoring, as host:port.
        token: The secret for access to it.
    """

    process: int
    program: str
    address: str
    token: str

    @property
    def url(self) -> str:
        """The address of its page, with the token."""
        return f"http://{self.address}/?token={self.token}"


@contextlib.contextmanager
def published(job: RunningJob) -> Iterator[None]:
    """Makes the job visible to the user's other processes inside the context."""
    owner = os.getpid()
    _remove_left_behind()
    path = runtime_folder() / f"{job.process}-{job.address.rpartition(':')[2]}.json"
    with contextlib.ExitStack() as end:
        with atomic.aside(str(path)) as new:
            with new.opened(0o600) as file:
                # Locked before it gets its name, so that it is never seen as a stale file.
                lock(file)
                end.callback(os.close, os.dup(file.fileno()))  # keeps the lock
                file.write(json.dumps(job._asdict()).encode())
            new.publish()
        try:
            yield
        finally:
            if os.getpid() == owner:  # not in a forked child
                path.unlink(missing_ok=True)


def running_jobs() -> list[RunningJob]:
    """Returns the running jobs, the oldest first; removes stale files.

    Raises:
        OSError: The folder belongs to another user.
    """
    _remove_left_behind()
    found = []
    for path in runtime_folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError), path.open("rb") as file:
            found.append((path.stat().st_mtime, _read(file.read())))
    return [job for _, job in sorted(found)]


def _remove_left_behind() -> None:
    """Removes the stale files of processes that have ended without removing them."""
    atomic.remove_abandoned(os.path.join(runtime_folder(), ""))
    for path in runtime_folder().glob("*.json"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if lock(file, shared=True):
                path.unlink(missing_ok=True)


def _read(content: bytes) -> RunningJob:
    """Parses a file. Raises: ValueError, KeyError."""
    told = plain_dict(parsed_json(content))
    address = plain_text(told["address"])
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f"expected an address as host:port, received {address!r}")
    return RunningJob(
        whole_number(told["process"]),
        plain_text(told["program"]),
        address,
        plain_text(told["token"]),
    )
