"""The running jobs of this user: a file each, which says where it is watched.

The files are in a folder that only the user can enter. Who runs the job holds a lock on its file,
so that one which has been left behind, as after SIGKILL, is known as such.
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

#: `unison top` sends the token there.
_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d{1,5}")


class RunningJob(NamedTuple):
    """Where a job is watched.

    Attributes:
        process: The number of the process that runs it.
        program: What its workers run.
        address: Where it is watched, as host:port.
        token: What lets one see it.
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
    """Inside, the user's other processes find the job."""
    owner = os.getpid()
    _remove_left_behind()
    path = runtime_folder() / f"{job.process}-{job.address.rpartition(':')[2]}.json"
    with contextlib.ExitStack() as end:
        with atomic.aside(str(path)) as new:
            with new.opened(0o600) as file:
                # Under its name nobody finds it without the lock, as one that was left behind.
                lock(file)
                end.callback(os.close, os.dup(file.fileno()))  # which keeps the lock
                file.write(json.dumps(job._asdict()).encode())
            new.publish()
        try:
            yield
        finally:
            if os.getpid() == owner:  # and no child, which has a copy of this
                path.unlink(missing_ok=True)


def running_jobs() -> list[RunningJob]:
    """Returns the jobs that run, the oldest first; removes files that were left behind.

    Raises:
        OSError: The folder is somebody else's.
    """
    _remove_left_behind()
    found = []
    for path in runtime_folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError), path.open("rb") as file:
            found.append((path.stat().st_mtime, _read(file.read())))
    return [job for _, job in sorted(found)]


def _remove_left_behind() -> None:
    """Removes the files whose processes have ended without removing them."""
    atomic.remove_abandoned(os.path.join(runtime_folder(), ""))
    for path in runtime_folder().glob("*.json"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if lock(file, shared=True):
                path.unlink(missing_ok=True)


def _read(content: bytes) -> RunningJob:
    """Returns what a file says. Raises: ValueError, KeyError."""
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
