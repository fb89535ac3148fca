"""Files that become visible whole or not at all, on this machine and behind fsspec.

A path with `://` (`gs://bucket/run`, `hdfs://...`, `memory://...`) is fsspec's; all others are
local.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from typing import IO, Any

from unison.data.files.paths import is_remote
from unison.errors import NotFoundError, PermissionDeniedError, ResourceExhaustedError
from unison.runtime.elastic.happenings import happened
from unison.runtime.temporary_folders import temporary_folder

#: How the names of files that are not complete end.
_ASIDE = ".tmp"

#: Of Linux: the working folder, and the flag of `renameat2` that exchanges names.
_HERE, _EXCHANGE = -100, 2
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS}

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
        with _aside(path) as aside, open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def replacing_path(path: str) -> Iterator[str]:
    """Yields the path of a new file of the same extension, for what writes to paths only.

    See `replacing`.
    """
    with _naming(path):
        if is_remote(path):
            with temporary_folder("upload") as folder:
                copy = os.path.join(folder, os.path.basename(path))
                yield copy
                with open(copy, "rb") as written, replacing(path) as file:
                    shutil.copyfileobj(written, file)
            return
        name = os.path.basename(path)
        with _aside(path, extension=name[name.find(".", 1) :] if "." in name[1:] else "") as aside:
            yield aside
            with open(aside, "rb") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def replacing_folder(path: str, last: str) -> Iterator[str]:
    """Yields a new folder; when the block ends without an error it takes the place of `path`.

    Locally at once, as in `replacing`. Elsewhere file by file: from the first to the last of them
    there is no file `last`, without which readers take the folder for none.

    Args:
        path: The folder.
        last: The name of a file in it.
    """
    with _naming(path):
        if is_remote(path):
            with temporary_folder("upload") as aside:
                yield aside
                remove(os.path.join(path, last))
                _upload(aside, path, last)
            return
        with _aside(path) as aside:
            os.mkdir(aside)
            yield aside
            for folder, _, names in os.walk(aside):
                for name in names:
                    with open(os.path.join(folder, name), "rb") as file:
                        os.fsync(file.fileno())
                _sync_folder(folder)


@contextlib.contextmanager
def _aside(path: str, extension: str = "") -> Iterator[str]:
    """Yields a path; what the block makes there takes the place of `path`."""
    folder, base = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    _remove_abandoned_of(folder, re.escape(base))
    process = os.getpid()
    writer = f"{_machine()}-{process}-{_born(process)}-{secrets.token_hex(4)}"
    aside = os.path.join(folder, f".{base}.{writer}{_ASIDE}{extension}")
    try:
        yield aside
        happened("checkpoint")
        if os.path.isdir(aside) and os.path.isdir(path):
            _exchange(aside, path)
        else:
            os.replace(aside, path)
    finally:
        _delete(aside)
    _sync_folder(folder)


def _exchange(one: str, other: str) -> None:
    """Gives each of two local folders the other's name: at once, where the system can."""
    with contextlib.suppress(AttributeError):  # elsewhere than on Linux
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        paths = _HERE, os.fsencode(one), _HERE, os.fsencode(other)
        if rename(*paths, _EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in _CANNOT_EXCHANGE:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), other)
    between = f"{one}.before"
    os.rename(other, between)
    os.rename(one, other)
    os.rename(between, one)


def _delete(path: str) -> None:
    """Deletes a local file or folder, if it is there and can be deleted."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)


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


def _upload(folder: str, remote: str, last: str) -> None:
    """Copies a local folder to one that fsspec knows, one of its files at the end."""
    filesystem, name = _remote(remote)
    with temporary_folder("upload") as apart:
        os.rename(os.path.join(folder, last), os.path.join(apart, last))
        filesystem.put(os.path.join(folder, ""), name, recursive=True)
        with (
            open(os.path.join(apart, last), "rb") as written,
            replacing(os.path.join(remote, last)) as file,
        ):
            shutil.copyfileobj(written, file)


def download(remote: str, folder: str) -> None:
    """Copies a folder that fsspec knows into a local one that exists."""
    filesystem, name = _remote(remote)
    filesystem.get(os.path.join(name, ""), folder, recursive=True)


def identity_of(path: str) -> str | None:
    """Returns what tells a file from another one that was there before; None if there is none.

    Processes that see one file system get the same.
    """
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            filesystem, name = _remote(path)
            return str(filesystem.ukey(name))
        found = os.stat(path)
        return f"{found.st_size} {found.st_mtime_ns}"
    return None


def remove_abandoned(prefix: str) -> None:
    """Deletes what writers of local files that begin with `prefix` left when they were killed."""
    folder, base = os.path.split(prefix)
    if not is_remote(prefix):
        _remove_abandoned_of(folder, re.escape(base) + ".*")


def _remove_abandoned_of(folder: str, base: str) -> None:
    """Deletes what is aside for files of which `base` matches the names, if nobody writes it.

    What another machine or container is writing stays: whether its processes live is not known
    here.
    """
    machine = re.escape(_machine())
    pattern = re.compile(rf"\.{base}\.{machine}-(\d+)-(\d+)-[0-9a-f]+{re.escape(_ASIDE)}.*")
    for name in names_in(folder):
        found = pattern.fullmatch(name)
        if found and not _lives(int(found[1]), found[2]):
            _delete(os.path.join(folder, name))


@functools.cache
def _machine() -> str:
    """Returns what tells the machine, since it started, and the container from all others."""
    host = re.sub(r"\W", "_", socket.gethostname())
    started = namespace = ""
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        with open("/proc/sys/kernel/random/boot_id") as file:
            started = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{host}-{hashlib.sha256(f'{started} {namespace}'.encode()).hexdigest()[:12]}"


def _born(process: int) -> str:
    """Returns when a process started, in the kernel's clock ticks; 0 where that is not known."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        # The name, in parentheses, may hold anything.
        return file.read().rpartition(b")")[2].split()[19].decode()
    return "0"


def _lives(process: int, born: str) -> bool:
    """Whether the process that started at `born` is there, and not another one of its number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _born(process) in (born, "0")


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
