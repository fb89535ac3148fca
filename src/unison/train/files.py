"""Files that become visible whole or not at all, on this machine and behind fsspec.

A path with `://` (`gs://bucket/run`, `hdfs://...`, `memory://...`) is fsspec's; all others are
local.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from typing import IO, Any

from unison.data.files.paths import is_remote
from unison.errors import NotFoundError, PermissionDeniedError, ResourceExhaustedError

#: How the names of files that are not complete end.
_ASIDE = ".tmp"

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Yields a file; when the block ends without an error it takes the place of `path` at once.

    Locally that is a rename, after the bytes are on the disk. Elsewhere it is what the file system
    offers: object stores show a file when it is complete.

    Raises:
        PermissionDeniedError: The folder cannot be written.
        ResourceExhaustedError: The disk is full. What was at `path` is still there.
    """
    with _naming(path):
        if is_remote(path):
            filesystem, name = _remote(path)
            filesystem.makedirs(filesystem._parent(name), exist_ok=True)
            with filesystem.transaction, filesystem.open(name, "wb") as file:
                yield file
            return
        folder, base = os.path.split(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        aside = os.path.join(folder, f".{base}.{os.getpid()}-{secrets.token_hex(4)}{_ASIDE}")
        try:
            with open(aside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(aside)
            raise
        _sync_folder(folder)


def open_to_read(path: str) -> IO[bytes]:
    """Opens a file.

    Raises:
        NotFoundError: There is none.
        PermissionDeniedError: It cannot be read.
    """
    with _naming(path):
        if is_remote(path):
            filesystem, name = _remote(path)
            return filesystem.open(name, "rb")
        return open(path, "rb")


def exists(path: str) -> bool:
    """Whether there is a file or a folder at `path`."""
    if is_remote(path):
        filesystem, name = _remote(path)
        return filesystem.exists(name)
    return os.path.exists(path)


def names_in(folder: str) -> list[str]:
    """Returns the names of the files in `folder`; none if it does not exist."""
    if is_remote(folder):
        filesystem, name = _remote(folder)
        if not filesystem.isdir(name):
            return []
        return [found.rstrip("/").rsplit("/", 1)[-1] for found in filesystem.ls(name, detail=False)]
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder or ".")
    return []


def remove(path: str) -> None:
    """Deletes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            filesystem, name = _remote(path)
            filesystem.rm_file(name)
        else:
            os.remove(path)


def upload(folder: str, remote: str) -> None:
    """Copies a local folder to one that fsspec knows."""
    filesystem, name = _remote(remote)
    filesystem.put(os.path.join(folder, ""), name, recursive=True)


def download(remote: str, folder: str) -> None:
    """Copies a folder that fsspec knows into a local one that exists."""
    filesystem, name = _remote(remote)
    filesystem.get(os.path.join(name, ""), folder, recursive=True)


def remove_abandoned(prefix: str) -> None:
    """Deletes what writers of local files that begin with `prefix` left when they were killed.

    Nobody else may be writing such files.
    """
    folder, base = os.path.split(prefix)
    for name in [] if is_remote(prefix) else names_in(folder):
        if name.startswith(f".{base}") and name.endswith(_ASIDE):
            remove(os.path.join(folder, name))


def _remote(path: str) -> tuple[Any, str]:
    import fsspec

    # An instance of its own: a transaction is a state of the instance.
    return fsspec.core.url_to_fs(path, skip_instance_cache=True)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Gives the operating system's errors their names in `unison.errors`."""
    try:
        yield
    except (NotFoundError, PermissionDeniedError, ResourceExhaustedError):
        raise
    except PermissionError as error:
        raise PermissionDeniedError(message=f"No permission for {path}: {error}") from error
    except FileNotFoundError as error:
        raise NotFoundError(message=f"No such file: {path} ({error})") from error
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise ResourceExhaustedError(
            message=f"No space is left to write {path}. What was there before is untouched."
        ) from error
