"""The running jobs of this user: a file each, which says where it is watched.

The files are in a folder that only the user can enter. Who runs the job holds a lock on its file,
so that one which has been left behind, as after SIGKILL, is known as such.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: An unfinished file that is younger may not be locked yet.
_SECONDS_TO_LOCK = 60.0


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


def folder() -> Path:
    """Returns this user's folder, which is made if need be.

    Raises:
        OSError: It cannot be made, or is somebody else's.
    """
    place = os.environ.get("XDG_RUNTIME_DIR")
    if place and os.access(place, os.W_OK):
        found = Path(place, "unison")
    else:
        found = Path(tempfile.gettempdir(), f"unison-{os.getuid()}")
    found.mkdir(mode=0o700, exist_ok=True)
    about = found.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"Expected a folder that only its owner can enter: {found}")
    return found


@contextlib.contextmanager
def published(job: RunningJob) -> Iterator[None]:
    """Inside, the user's other processes find the job."""
    owner = os.getpid()
    _remove_left_behind()
    path = folder() / f"{job.process}-{job.address.rpartition(':')[2]}.json"
    # Under its name nobody finds it without the lock, as one that was left behind.
    unfinished = path.with_suffix(".new")
    opened = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(opened, 0)
        os.write(opened, json.dumps(job._asdict()).encode())
        unfinished.rename(path)
        yield
    finally:
        if os.getpid() == owner:  # and no child, which has a copy of this
            for each in (unfinished, path):
                each.unlink(missing_ok=True)
        os.close(opened)


def running_jobs() -> list[RunningJob]:
    """Returns the jobs that run, the oldest first; removes files that were left behind.

    Raises:
        OSError: The folder is somebody else's.
    """
    _remove_left_behind()
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), path.open() as file:
            found.append((path.stat().st_mtime, _read(json.load(file))))
    return [job for _, job in sorted(found)]


def _remove_left_behind() -> None:
    """Removes the files whose processes have ended without removing them."""
    for path in folder().iterdir():
        if path.suffix not in (".json", ".new"):
            continue
        with contextlib.suppress(OSError), path.open("r+") as file:
            age = time.time() - os.fstat(file.fileno()).st_mtime
            if path.suffix == ".json" or age > _SECONDS_TO_LOCK:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # an OSError where it runs
                path.unlink(missing_ok=True)


def _read(told: Mapping[str, Any]) -> RunningJob:
    return RunningJob(
        int(told["process"]), str(told["program"]), str(told["address"]), str(told["token"])
    )
