"""Reading, listing and removing files, on this machine and behind fsspec."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import IO, Any

from unison.errors import DataLossError, FailedPreconditionError
from unison.storage.file_systems import file_system, is_remote, named_errors


def open_to_read(path: str) -> IO[bytes]:
    """Opens a file that was saved.

    Raises:
        NotFoundError: There is none.
        PermissionDeniedError: It cannot be read.
        FailedPreconditionError: It is a folder, or a pipe or a device, which might never end.
        InvalidArgumentError: There can be none: its name is too long, or its links go in a circle.
    """
    with named_errors(path):
        if is_remote(path):
            system, name = _fresh(path)
            return system.open(name, "rb")
        return open(path, "rb", opener=_opened)


def _opened(path: str, flags: int) -> int:
    """Opens a local file without waiting for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # of the latter, Python raises an error
        return descriptor
    os.close(descriptor)
    raise FailedPreconditionError(message=f"{path}; Expected a file. It is a pipe or a device.")


def exists(path: str) -> bool:
    """Whether there is a file or a folder at `path`."""
    if is_remote(path):
        system, name = _fresh(path)
        return system.exists(name)
    return os.path.exists(path)


def names_in(folder: str) -> list[str]:
    """Returns the names of the files in `folder`; none if it does not exist."""
    if is_remote(folder):
        system, name = _fresh(folder)
        if not system.isdir(name):
            return []
        return [found.rstrip("/").rsplit("/", 1)[-1] for found in system.ls(name, detail=False)]
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder or ".")
    return []


def remove(path: str) -> None:
    """Deletes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            system, name = _fresh(path)
            system.rm_file(name)
        else:
            os.remove(path)


def identity_of(path: str) -> str | None:
    """Returns what tells a file from another one that was there before; None if there is none.

    Processes that see one file system get the same.
    """
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            system, name = _fresh(path)
            return str(system.ukey(name))
        found = os.stat(path)
        return f"{found.st_size} {found.st_mtime_ns}"
    return None


def download(remote: str, folder: str) -> None:
    """Copies a folder that fsspec knows into a local one that exists.

    Raises:
        DataLossError: A name in it would lead out of the local folder.
    """
    system, name = _fresh(remote)
    name = name.rstrip("/")
    for found in system.find(name):
        inside = str(found).removeprefix(f"{name}/")
        if any(part in ("", ".", "..") or "\0" in part for part in inside.split("/")):
            raise DataLossError(
                message=f"{remote} has a file named {inside!r}, which would lead out of the folder "
                "that it is copied to. Remove it."
            )
        local = os.path.join(folder, *inside.split("/"))
        os.makedirs(os.path.dirname(local), exist_ok=True)
        system.get_file(found, local)


def _fresh(path: str) -> tuple[Any, str]:
    """Returns a file system that has cached no listing yet, and the path in it."""
    return file_system(path, skip_instance_cache=True)
