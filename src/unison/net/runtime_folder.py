"""This user's folder for what running processes have to find: sockets, secrets, running jobs."""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile


def runtime_folder() -> pathlib.Path:
    """Returns the folder, which is made if it is not there.

    Raises:
        OSError: It cannot be made, or other users can enter it.
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
