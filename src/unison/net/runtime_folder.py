"""The user's private folder for running processes: sockets, secrets, the list of running jobs."""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile


def runtime_folder() -> pathlib.Path:
    """Returns the folder; creates it if necessary.

    Raises:
        OSError: It cannot be created, or other users can enter it.
    """
    place = os.environ.get("XDG_RUNTIME_DIR")
    if place and os.access(place, os.W_OK):
        found = pathlib.Path(place, "unison")
    else:
        found = pathlib.Path(tempfile.gettempdir(), f"unison-{os.getuid()}")
    found.mkdir(mode=0o700, exist_ok=True)
    about = found.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"Expected a folder that only its owner can enter: {found}")
    return found
