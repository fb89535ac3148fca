"""Files by path, wherever fsspec reaches, and the names of files by pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import IO, Any, cast

from unison.data.leaves import as_leaf
from unison.errors import InvalidArgumentError
from unison.storage.file_systems import file_system, is_remote, named_errors
from unison.storage.patience import attempted

#: The number of bytes of a local file that are read at a time.
_BYTES_AT_ONCE = 1 << 18


def open_file(path: str, mode: str = "rb") -> IO[bytes]:
    """Opens a file.

    A remote file that is opened for reading is read ahead in a thread, and transient errors
    are retried; see `RemoteFile`.

    Args:
        path: A local path, or one with a protocol.
        mode: "rb", "wb" or "ab".

    Raises:
        NotFoundError: The file does not exist.
        PermissionDeniedError: Permission denied.
        UnavailableError: It could not be opened, after several retries.
        ImportError: The protocol needs a package that is not installed.

    Examples:
        >>> with open_file("memory://greeting.txt", "wb") as file:
        ...     _ = file.write(b"hello")
        >>> open_file("memory://greeting.txt").read()
        b'hello'
    """
    with named_errors(path):
        if not is_remote(path):
            return cast(IO[bytes], open(path, mode, _BYTES_AT_ONCE))
        system, inside = file_system(path)
        if mode != "rb":
            return cast(IO[bytes], system.open(inside, mode))
        from unison.data.files.remote import open_remote

        return open_remote(system, inside, path)


def matching_files(patterns: str | bytes | os.PathLike | Iterable[Any]) -> list[bytes]:
    """Returns the sorted names of the files that match a pattern, or one of several.

    On a web server, the files are those that its page for the folder links to.

    Raises:
        InvalidArgumentError: No file matches.
    """
    listed = as_leaf(os.fspath(patterns) if isinstance(patterns, os.PathLike) else patterns)
    texts = [listed.decode()] if isinstance(listed, bytes) else [item.decode() for item in listed]
    names = sorted({name for pattern in texts for name in _matching(pattern)})
    if not names:
        raise InvalidArgumentError(message=f"No files matched pattern: {', '.join(texts)}")
    return [name.encode() for name in names]


def _matching(pattern: str) -> list[str]:
    if not is_remote(pattern):
        return [name for name in glob.glob(pattern) if os.path.isfile(name)]
    return glob_remote(pattern, files_only=True)


def glob_remote(pattern: str, files_only: bool = False) -> list[str]:
    """Returns the sorted paths, with their protocol, that match a pattern with a protocol.

    Args:
        pattern: The pattern.
        files_only: Whether folders are left out.
    """
    with named_errors(pattern):
        system, inside = file_system(pattern)
        found = attempted(pattern, lambda: system.glob(inside, detail=True))
    protocol = pattern.partition("://")[0]
    return sorted(
        name if is_remote(name) else f"{protocol}://{name.lstrip('/')}"
        for name, info in found.items()
        if not files_only or info["type"] != "directory"
    )
