"""Files by path, wherever fsspec reaches, and the names of files by pattern.

A path with `://` (`gs://`, `s3://`, `hdfs://`, `http://`, `memory://`) is fsspec's; all others are
local.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

from unison.data.files.patience import PATIENCE, attempted
from unison.data.leaves import as_leaf
from unison.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)

#: How many bytes are read of a local file at once.
_BYTES_AT_ONCE = 1 << 18

#: What to install for a protocol whose driver is not there.
_PACKAGES = {
    "abfs": "adlfs",
    "gcs": "gcsfs (unison[gcs])",
    "gs": "gcsfs (unison[gcs])",
    "hdfs": "pyarrow, and Hadoop's libhdfs",
    "http": "aiohttp (unison[http])",
    "https": "aiohttp (unison[http])",
    "s3": "s3fs (unison[s3])",
    "s3a": "s3fs (unison[s3])",
}


def is_remote(path: str) -> bool:
    """Whether fsspec, and not the local file system, knows the path."""
    return "://" in path


def open_file(path: str, mode: str = "rb") -> IO[bytes]:
    """Opens a file.

    A file that is not local and opened for reading is read ahead in a thread, and what fails for
    the moment is tried again; see `RemoteFile`.

    Args:
        path: A local path, or one with a protocol.
        mode: "rb", "wb" or "ab".

    Raises:
        NotFoundError: There is no such file.
        PermissionDeniedError: It may not be opened.
        UnavailableError: It could not be opened, in several attempts.
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


def file_system(path: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a path, and the path in it.

    Raises:
        ImportError: The protocol needs something that is not installed.
        InvalidArgumentError: There is no such protocol.
    """
    import fsspec

    protocol = path.partition("://")[0] if is_remote(path) else "file"
    given = fsspec.config.conf.get(protocol, {})
    options = {key: value for key, value in _options(protocol).items() if key not in given}
    try:
        return fsspec.core.url_to_fs(path, **options)
    except (ImportError, OSError) as error:
        # The driver of Hadoop is found, and looks for Java in vain.
        if not isinstance(error, ImportError) and not re.search("lib(jvm|hdfs)", str(error)):
            raise
        mend = f"Install {_PACKAGES.get(protocol, 'what fsspec asks for')}"
        reason = str(error).partition("\n")[0]
        raise ImportError(f"No driver for {protocol}:// works here. {mend}. ({reason})") from error
    except ValueError as error:
        if "rotocol" not in str(error):
            raise
        raise InvalidArgumentError(
            message=f"There is no file system for {protocol}://. Received: {path!r}"
        ) from error


def _options(protocol: str) -> dict[str, Any]:
    """Returns what bounds the waiting of a driver, which would else wait for minutes."""
    if protocol in ("http", "https"):
        try:
            import aiohttp
        except ImportError:
            return {}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=PATIENCE.seconds, sock_read=PATIENCE.seconds
        )
        return {"client_kwargs": {"timeout": timeout}}
    if protocol in ("s3", "s3a"):
        seconds = PATIENCE.seconds
        return {"config_kwargs": {"connect_timeout": seconds, "read_timeout": seconds}}
    return {}


def matching_files(patterns: str | bytes | os.PathLike | Iterable[Any]) -> list[bytes]:
    """Returns the names of the files that a pattern, or one of several, matches, sorted.

    Of a web server, the files are found that its page for the folder links to.

    Raises:
        InvalidArgumentError: None does.
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
    """Returns the paths, with their protocol, that a pattern with a protocol matches, sorted.

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


@contextlib.contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Gives the errors of file systems their names in `unison.errors`, and the path's."""
    try:
        yield
    except (NotFoundError, AlreadyExistsError, PermissionDeniedError):
        raise
    except FileNotFoundError as error:
        raise NotFoundError(message=f"{path}; No such file or directory") from error
    except FileExistsError as error:
        raise AlreadyExistsError(message=f"{path}; File exists") from error
    except PermissionError as error:
        raise PermissionDeniedError(message=f"{path}; Permission denied") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FailedPreconditionError(message=f"{path}; {error.strerror or error}") from error
