"""Files and folders that are written atomically, on this machine and through fsspec.

They are written under a temporary name, which identifies the writing process, until they are
complete and synced; then they are renamed. Temporary files of a killed process are removed by the
next process that writes to the same path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from typing import IO

from unison.storage import writers
from unison.storage.file_systems import file_system, is_remote, named_errors
from unison.storage.files import names_in, open_to_read, remove
from unison.storage.temporary_folders import temporary_folder

#: The suffix of the names of incomplete files.
_ASIDE = ".tmp"

#: Of Linux: the working folder, and the flag of `renameat2` that exchanges names.
_HERE, _EXCHANGE = -100, 2
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS}

#: The errors of file systems that cannot sync a folder.
_CANNOT_SYNC_FOLDERS = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP}


@contextlib.contextmanager
def replacing(path: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a file; when the block ends without an error, it replaces `path` atomically.

    Locally, this is a rename, after the bytes are synced. Elsewhere, it is what the file system
    supports: in object stores, a file appears when it is complete.

    Args:
        path: The path. Missing parent folders are created.
        mode: For a local file: its permissions, before the process' umask.

    Raises:
        PermissionDeniedError: The folder cannot be written.
        ResourceExhaustedError: The disk is full. An existing file at `path` is unchanged.

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
            # A separate instance: a transaction is state of the instance.
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
    """Yields the path of a new file with the same extension, for libraries that need a path.

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
def replacing_folder(path: str, last: str, others: Iterable[str] = ()) -> Iterator[str]:
    """Yields a new folder; when the block ends without an error, it replaces `path`.

    Locally, this is atomic, as in `replacing`. Elsewhere, files are written one by one: from the
    first to the last, the file `last` does not exist, without which readers ignore the folder.

    Args:
        path: The folder.
        last: The name of a file in it.
        others: The names of such files of other formats, which the folder may hold.
    """
    with named_errors(path):
        if is_remote(path):
            with temporary_folder("upload") as new_folder:
                yield new_folder
                for name in (last, *others):
                    remove(os.path.join(path, name))
                _upload(new_folder, path, last)
            return
        with aside(path) as new:
            os.mkdir(new.path)
            yield new.path
            for folder, _, names in os.walk(new.path):
                for name in names:
                    _sync(os.path.join(folder, name))
                sync_folder(folder)
            new.publish()


class Aside:
    """A new local file or folder with a temporary name until it is published.

    Args:
        path: Its final path.
        extension: The extension of the temporary name.

    Attributes:
        path: Its temporary path.
    """

    def __init__(self, path: str, extension: str = ""):
        self._target = os.path.abspath(path)
        self._folder, base = os.path.split(self._target)
        name = f".{base}.{writers.own_name()}-{secrets.token_hex(4)}{_ASIDE}{extension}"
        self.path = os.path.join(self._folder, name)

    @contextlib.contextmanager
    def opened(self, mode: int = 0o666) -> Iterator[IO[bytes]]:
        """Yields the file, which is new; its bytes are synced when the block ends."""
        with open(self.path, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Renames it atomically to its path; an existing file is replaced."""
        try:
            os.replace(self.path, self._target)  # also an empty folder
        except OSError:
            if not (os.path.isdir(self.path) and os.path.isdir(self._target)):
                raise
            _exchange(self.path, self._target)
        sync_folder(self._folder)

    def publish_if_absent(self) -> bool:
        """Renames a file atomically if nothing is at its path; returns whether it has."""
        try:
            os.link(self.path, self._target)
        except FileExistsError:
            return False
        sync_folder(self._folder)
        return True


@contextlib.contextmanager
def aside(path: str, extension: str = "") -> Iterator[Aside]:
    """Yields a new file or folder for a local path; unless it is published, it is deleted."""
    folder, base = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    _remove_abandoned_of(folder, re.escape(base))
    new = Aside(path, extension)
    try:
        yield new
    finally:
        _delete(new.path)


def _exchange(one: str, other: str) -> None:
    """Exchanges two local folders: atomically, if the system supports it."""
    with contextlib.suppress(AttributeError):  # on other systems than Linux
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
    """Deletes a local file, link or folder, if it exists and can be deleted."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)


def _upload(folder: str, remote: str, last: str) -> None:
    """Copies a local folder to fsspec's, with one of its files at the end."""
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
    """Deletes temporary local files that begin with `prefix` and were left by killed writers."""
    folder, base = os.path.split(prefix)
    if not is_remote(prefix):
        _remove_abandoned_of(folder, re.escape(base) + ".*")


def _remove_abandoned_of(folder: str, base: str) -> None:
    """Deletes temporary files whose final names match `base`, if their process has ended.

    Files of other machines or containers stay: whether their processes run is not known
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


def sync_folder(folder: str) -> None:
    """Waits until the names in a folder are on the disk, if its file system can say that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
