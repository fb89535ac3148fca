"""Files and folders that become visible whole or not at all, on this machine and behind fsspec.

What is written lies aside, under a name that says which process writes it, until it is complete and
on the disk; then it takes its place by a rename. What a killed process leaves aside, the next one
that writes to the same path removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import IO

from unison.storage import writers
from unison.storage.file_systems import file_system, is_remote, named_errors
from unison.storage.files import names_in, open_to_read, remove
from unison.storage.temporary_folders import temporary_folder

#: How the names of files that are not complete end.
_ASIDE = ".tmp"

#: Of Linux: the working folder, and the flag of `renameat2` that exchanges names.
_HERE, _EXCHANGE = -100, 2
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS}

#: What file systems answer that cannot bring a folder to the disk by itself.
_CANNOT_SYNC_FOLDERS = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP}


@contextlib.contextmanager
def replacing(path: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a file; when the block ends without an error it takes the place of `path` at once.

    Locally that is a rename, after the bytes are on the disk. Elsewhere it is what the file system
    offers: object stores show a file when it is complete.

    Args:
        path: The path. Missing folders above it are made.
        mode: Of a local file: who may read and write it, before the process' umask.

    Raises:
        PermissionDeniedError: The folder cannot be written.
        ResourceExhaustedError: The disk is full. What was at `path` is still there.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with replacing(f"{folder}/numbers") as file:
        ...     _ = file.write(b"1 2 3")
        ...     os.path.exists(f"{folder}/numbers")
        False
        >>> open(f"{folder}/numbers", "rb").read()
        b'1 2 3'
    """
    with named_errors(path):
        if is_remote(path):
            # An instance of its own: a transaction is a state of the instance.
            system, name = file_system(path, skip_instance_cache=True)
            system.makedirs(system._parent(name), exist_ok=True)
            with system.transaction, system.open(name, "wb") as file:
                yield file
            return
        with aside(path) as new:
            with new.opened(mode) as file:
                yield file
            new.publish()


@contextlib.contextmanager
def replacing_path(path: str) -> Iterator[str]:
    """Yields the path of a new file of the same extension, for what writes to paths only.

    See `replacing`.
    """
    with named_errors(path):
        if is_remote(path):
            with temporary_folder("upload") as folder:
                copy = os.path.join(folder, os.path.basename(path))
                yield copy
                with open(copy, "rb") as written, replacing(path) as file:
                    shutil.copyfileobj(written, file)
            return
        name = os.path.basename(path)
        with aside(path, extension=name[name.find(".", 1) :] if "." in name[1:] else "") as new:
            yield new.path
            _sync(new.path)
            new.publish()


@contextlib.contextmanager
def replacing_folder(path: str, last: str) -> Iterator[str]:
    """Yields a new folder; when the block ends without an error it takes the place of `path`.

    Locally at once, as in `replacing`. Elsewhere file by file: from the first to the last of them
    there is no file `last`, without which readers take the folder for none.

    Args:
        path: The folder.
        last: The name of a file in it.
    """
    with named_errors(path):
        if is_remote(path):
            with temporary_folder("upload") as new_folder:
                yield new_folder
                remove(os.path.join(path, last))
                _upload(new_folder, path, last)
            return
        with aside(path) as new:
            os.mkdir(new.path)
            yield new.path
            for folder, _, names in os.walk(new.path):
                for name in names:
                    _sync(os.path.join(folder, name))
                _sync_folder(folder)
            new.publish()


class Aside:
    """A new local file or folder that nobody finds under its own path until it is published.

    Args:
        path: Where it is to be.
        extension: How the name of the file aside ends.

    Attributes:
        path: Where it is until then.
    """

    def __init__(self, path: str, extension: str = ""):
        self._target = os.path.abspath(path)
        self._folder, base = os.path.split(self._target)
        name = f".{base}.{writers.own_name()}-{secrets.token_hex(4)}{_ASIDE}{extension}"
        self.path = os.path.join(self._folder, name)

    @contextlib.contextmanager
    def opened(self, mode: int = 0o666) -> Iterator[IO[bytes]]:
        """Yields the file, which is new; its bytes are on the disk when the block ends."""
        with open(self.path, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Gives it its path at once; what was there is gone."""
        if os.path.isdir(self.path) and os.path.isdir(self._target):
            _exchange(self.path, self._target)
        else:
            os.replace(self.path, self._target)
        _sync_folder(self._folder)

    def publish_if_absent(self) -> bool:
        """Gives a file its path at once, if nothing is there; returns whether nothing was."""
        try:
            os.link(self.path, self._target)
        except FileExistsError:
            return False
        _sync_folder(self._folder)
        return True


@contextlib.contextmanager
def aside(path: str, extension: str = "") -> Iterator[Aside]:
    """Yields what is to be at a local path; unless it is published, the block's end deletes it."""
    folder, base = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    _remove_abandoned_of(folder, re.escape(base))
    new = Aside(path, extension)
    try:
        yield new
    finally:
        _delete(new.path)


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
    """Deletes a local file, link or folder, if it is there and can be deleted."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)


def _upload(folder: str, remote: str, last: str) -> None:
    """Copies a local folder to one that fsspec knows, one of its files at the end."""
    system, name = file_system(remote, skip_instance_cache=True)
    with temporary_folder("upload") as apart:
        os.rename(os.path.join(folder, last), os.path.join(apart, last))
        system.put(os.path.join(folder, ""), name, recursive=True)
        with (
            open_to_read(os.path.join(apart, last)) as written,
            replacing(os.path.join(remote, last)) as file,
        ):
            shutil.copyfileobj(written, file)


def remove_abandoned(prefix: str) -> None:
    """Deletes what writers of local files that begin with `prefix` left when they were killed."""
    folder, base = os.path.split(prefix)
    if not is_remote(prefix):
        _remove_abandoned_of(folder, re.escape(base) + ".*")


def _remove_abandoned_of(folder: str, base: str) -> None:
    """Deletes what is aside for files of which `base` matches the names, if nobody writes it.

    What another machine or container is writing stays: whether its processes run is not known
    here.
    """
    machine = re.escape(writers.machine())
    pattern = re.compile(rf"\.{base}\.{machine}-{writers.PROCESS}-[0-9a-f]+{re.escape(_ASIDE)}.*")
    for name in names_in(folder):
        found = pattern.fullmatch(name)
        if found and not writers.is_running(int(found[1]), found[2]):
            _delete(os.path.join(folder, name))


def _sync(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: str) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
