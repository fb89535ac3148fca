"""Reading, listing and removing files, on this machine and behind fsspec."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import IO, Any

from unison.errors import DataLossError, FailedPreconditionError
from unison.storage.file_systems import file_system, is_remote, named_errors


def open_to_read(path: str) -> IO[bytes]:
    """Opens a file that was saved.

    Raises:
        NotFoundError: It does not exist.
        PermissionDeniedError: It cannot be read.
        FailedPreconditionError: It is a folder, or a pipe or a device, which might be endless.
        InvalidArgumentError: It cannot exist: its name is too long, or its links are circular.
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
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # for a folder, Python raises an error
        return descriptor
    os.close(descriptor)
    raise FailedPreconditionError(message=f"{path}; Expected a file. It is a pipe or a device.")


def exists(path: str) -> bool:
    """Whether `path` is an existing file or folder."""
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
    """Deletes a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            system, name = _fresh(path)
            system.rm_file(name)
        else:
            os.remove(path)


def size_of_folder(path: str) -> int:
    """Returns the bytes of all files in a folder and in those inside."""
    if is_remote(path):
        system, name = _fresh(path)
        return system.du(name)
    return sum(
        os.path.getsize(os.path.join(parent, name))
        for parent, _, names in os.walk(path)
        for name in names
    )


def remove_folder(path: str) -> None:
    """Deletes a folder with all that is in it, if it exists. Links are not followed."""
    if is_remote(path):
        system, name = _fresh(path)
        with contextlib.suppress(FileNotFoundError):
            system.rm(name, recursive=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def identity_of(path: str) -> str | None:
    """Returns an identifier of the present version of a file; None if it does not exist.

    Processes that share a file system get the same.
    """
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            system, name = _fresh(path)
            return str(system.ukey(name))
        found = os.stat(path)
        return f"{found.st_size} {found.st_mtime_ns}"
    return None


def download(remote: str, folder: str) -> None:
    """Copies a folder of fsspec's into an existing local one.

    Raises:
        DataLossError: A name in it would be a path outside of the local folder.
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
    """Returns a file system without cached listings, and the path in it."""
    system, name = file_system(path)
    system.invalidate_cache()  # another instance would connect anew
    return system, name
