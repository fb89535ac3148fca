"""`tf.io.gfile`: files wherever fsspec reaches: local paths, `memory://`, `gs://`, `s3://`, ...

Remote files need fsspec's package for their protocol (`gcsfs`, `s3fs`, ...).
"""

from __future__ import annotations

import glob as local_glob
import os
import stat as file_modes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fsspec.registry
from fsspec.implementations.local import LocalFileSystem

from unison.data.files.paths import glob_remote
from unison.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from unison.storage.file_systems import file_system, is_remote, named_errors
from unison.tf.missing import names_missing_from
from unison.tf.text import text_of

__getattr__ = names_missing_from(__name__)


class FileStatistics(NamedTuple):
    """The properties of a file. TF: the result of `tf.io.gfile.stat`."""

    length: int
    mtime_nsec: int
    is_directory: bool


def _located(path: Any) -> tuple[Any, str, str]:
    """Returns the file system, the path in it, and the path as it was given."""
    given = text_of(path)
    return *file_system(given), given


def exists(path: Any) -> bool:
    """TF: `tf.io.gfile.exists`."""
    system, inside, _ = _located(path)
    return system.exists(inside)


def isdir(path: Any) -> bool:
    """TF: `tf.io.gfile.isdir`."""
    system, inside, _ = _located(path)
    return system.isdir(inside)


def glob(pattern: Any) -> list[str]:
    """Returns the files that match a pattern, or one of several, in sorted order.

    TF: `tf.io.gfile.glob`.
    """
    if isinstance(pattern, list | tuple):
        return [path for one in pattern for path in glob(one)]
    given = text_of(pattern)
    return glob_remote(given) if is_remote(given) else sorted(local_glob.glob(given))


def listdir(path: Any) -> list[str]:
    """Returns the names in a folder.

    Raises:
        NotFoundError: The folder does not exist.

    TF: `tf.io.gfile.listdir`.
    """
    system, inside, given = _located(path)
    if not system.isdir(inside):
        raise NotFoundError(message=f"Could not find directory {given}")
    with named_errors(given):
        entries = system.ls(inside, detail=False)
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)


def makedirs(path: Any) -> None:
    """Makes a folder and those above it, where they are not there yet.

    TF: `tf.io.gfile.makedirs`.
    """
    system, inside, given = _located(path)
    with named_errors(given):
        system.makedirs(inside, exist_ok=True)


def mkdir(path: Any) -> None:
    """Makes a folder in one that is there.

    Raises:
        AlreadyExistsError: There is something of that name.
        NotFoundError: The folder to put it in is not there.

    TF: `tf.io.gfile.mkdir`.
    """
    system, inside, given = _located(path)
    with named_errors(given):
        system.mkdir(inside, create_parents=False)


def remove(path: Any) -> None:
    """Deletes a file.

    Raises:
        NotFoundError: It does not exist.
        FailedPreconditionError: It is a folder: `rmtree` deletes those.

    TF: `tf.io.gfile.remove`.
    """
    system, inside, given = _located(path)
    if not system.exists(inside):
        raise NotFoundError(message=f"{given}; No such file or directory")
    if system.isdir(inside):
        raise FailedPreconditionError(message=f"{given}; Is a directory. Use rmtree.")
    with named_errors(given):
        system.rm_file(inside)


def rmtree(path: Any) -> None:
    """Deletes a folder and everything in it.

    Raises:
        NotFoundError: It does not exist.

    TF: `tf.io.gfile.rmtree`.
    """
    system, inside, given = _located(path)
    if not system.exists(inside):
        raise NotFoundError(message=f"{given}; No such file or directory")
    with named_errors(given):
        system.rm(inside, recursive=True)


def copy(src: Any, dst: Any, overwrite: bool = False) -> None:
    """Copies a file, also from one file system to another.

    Raises:
        NotFoundError: There is no `src`.
        AlreadyExistsError: `dst` is there, and `overwrite` is False.

    TF: `tf.io.gfile.copy`.
    """
    _check_free(dst, overwrite)
    with GFile(src, "rb") as source:
        contents = source.read()
    with GFile(dst, "wb") as target:
        target.write(contents)


def rename(src: Any, dst: Any, overwrite: bool = False) -> None:
    """Moves a file or folder.

    Raises:
        NotFoundError: There is no `src`.
        AlreadyExistsError: `dst` is there, and `overwrite` is False.

    TF: `tf.io.gfile.rename`.
    """
    _check_free(dst, overwrite)
    source, from_, given = _located(src)
    target, to, _ = _located(dst)
    if not source.exists(from_):
        raise NotFoundError(message=f"{given}; No such file or directory")
    if isinstance(source, LocalFileSystem) and isinstance(target, LocalFileSystem):
        with named_errors(given):
            os.replace(from_, to)
    elif type(source) is type(target):
        source.mv(from_, to, recursive=source.isdir(from_))
    else:
        copy(src, dst, overwrite)
        remove(src)


def _check_free(path: Any, overwrite: bool) -> None:
    if not overwrite and exists(path):
        raise AlreadyExistsError(message=f"file already exists: {text_of(path)}")


def stat(path: Any) -> FileStatistics:
    """TF: `tf.io.gfile.stat`.

    Raises:
        NotFoundError: The file does not exist.
    """
    system, inside, given = _located(path)
    with named_errors(given):
        if isinstance(system, LocalFileSystem):
            found = os.stat(inside)
            is_folder = file_modes.S_ISDIR(found.st_mode)
            return FileStatistics(found.st_size, found.st_mtime_ns, is_folder)
        info = system.info(inside)
    changed = info.get("mtime") or info.get("created") or 0
    seconds = changed.timestamp() if hasattr(changed, "timestamp") else float(changed)
    return FileStatistics(info["size"] or 0, int(seconds * 1e9), info["type"] == "directory")


def walk(
    top: Any, topdown: bool = True, onerror: Callable[[Exception], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields every folder under `top` with the names of the folders and files in it.

    TF: `tf.io.gfile.walk`.
    """
    folder = text_of(top)
    try:
        names = listdir(folder)
    except NotFoundError as error:
        if onerror is not None:
            onerror(error)
        return
    folders = [name for name in names if isdir(join(folder, name))]
    files = [name for name in names if name not in folders]
    if topdown:
        yield folder, folders, files
    for name in folders:
        yield from walk(join(folder, name), topdown, onerror)
    if not topdown:
        yield folder, folders, files


def join(path: Any, *paths: Any) -> str:
    """TF: `tf.io.gfile.join`."""
    return os.path.join(text_of(path), *map(text_of, paths))


def get_registered_schemes() -> list[str]:
    """Returns the protocols that fsspec supports. TF: `tf.io.gfile.get_registered_schemes`."""
    return sorted({*fsspec.registry.known_implementations, *fsspec.registry.registry})


class GFile:
    """A file, opened when it is first used.

    Args:
        name: A path.
        mode: "r", "w", "a", "r+" or "w+", with "b" for bytes.

    Examples:
        >>> with GFile("memory://notes.txt", "w") as file:
        ...     file.write("first line")
        >>> GFile("memory://notes.txt").read()
        'first line'

    TF: `tf.io.gfile.GFile`.
    """

    def __init__(self, name: Any, mode: str = "r"):
        if mode.replace("b", "") not in ("r", "w", "a", "r+", "w+", "a+"):
            raise InvalidArgumentError(
                message=f"mode is not 'r' or 'w' or 'a', nor one of them with '+' or 'b': {mode!r}"
            )
        self._name = text_of(name)
        self._mode = mode
        self._opened: Any = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def mode(self) -> str:
        return self._mode

    @property
    def _file(self) -> Any:
        if self._opened is None:
            system, inside, given = _located(self._name)
            coding = {} if "b" in self._mode else {"encoding": "utf-8"}
            with named_errors(given):
                self._opened = system.open(inside, self._mode, **coding)
        return self._opened

    def read(self, n: int = -1) -> Any:
        """Returns `n` characters or bytes, or the rest."""
        if "r" not in self._mode and "+" not in self._mode:
            raise PermissionDeniedError(message=f"File isn't open for reading: {self._name}")
        return self._file.read(n)

    def readline(self) -> Any:
        return self._file.readline()

    def readlines(self) -> list[Any]:
        return self._file.readlines()

    def write(self, file_content: Any) -> None:
        """Writes text, or bytes to a file opened with "b"."""
        if self._mode in ("r", "rb"):
            raise PermissionDeniedError(message=f"File isn't open for writing: {self._name}")
        is_text_file = "b" not in self._mode
        if isinstance(file_content, bytes) and is_text_file:
            file_content = file_content.decode("utf-8")
        elif isinstance(file_content, str) and not is_text_file:
            file_content = file_content.encode("utf-8")
        self._file.write(file_content)

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return stat(self._name).length

    def seek(self, offset: int, whence: int = 0) -> None:
        self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        elif self._mode[0] == "w":
            self._file.close()  # a file that nothing was written to is there, too
        self._opened = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __next__(self) -> Any:
        return next(self._file)

    next = __next__

    def __enter__(self) -> GFile:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


Open = GFile
