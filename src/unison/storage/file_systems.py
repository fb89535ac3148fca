"""The file system of a path, and the names of its errors in `unison.errors`.

A path with `://` (`gs://bucket/run`, `hdfs://...`, `memory://...`) is fsspec's; all others are
local.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import Any

from unison.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from unison.storage.patience import PATIENCE

#: The package to install for a protocol whose driver is missing.
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

#: The path cannot exist: a name in it is too long, or its links are circular.
_NO_NAME = {errno.ENAMETOOLONG, errno.ELOOP}

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_remote(path: str) -> bool:
    """Whether a path belongs to fsspec, and not to the local file system."""
    return "://" in path


def local_path_of(path: str) -> str | None:
    """Returns the path on this machine, of one that is local or behind `file://`; None: elsewhere.

    Examples:
        >>> local_path_of("/tmp/a"), local_path_of("file:///tmp/a"), local_path_of("memory://a")
        ('/tmp/a', '/tmp/a', None)
    """
    if not is_remote(path):
        return path
    system, name = file_system(path)
    protocols = {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}
    return name if "file" in protocols else None


def file_system(path: str, **options: Any) -> tuple[Any, str]:
    """Returns fsspec's file system for a path, and the path in it.

    Args:
        path: The path.
        options: Passed on to `fsspec.core.url_to_fs`.

    Raises:
        ImportError: The protocol needs a package that is not installed.
        InvalidArgumentError: Unknown protocol.
    """
    import fsspec

    protocol = path.partition("://")[0] if is_remote(path) else "file"
    given = fsspec.config.conf.get(protocol, {})
    options |= {key: value for key, value in _timeouts(protocol).items() if key not in given}
    try:
        return fsspec.core.url_to_fs(path, **options)
    except (ImportError, OSError) as error:
        # The driver of Hadoop is installed, but does not find Java.
        if not isinstance(error, ImportError) and not re.search("lib(jvm|hdfs)", str(error)):
            raise
        remedy = f"Install {_PACKAGES.get(protocol, 'what fsspec asks for')}"
        reason = str(error).partition("\n")[0]
        raise ImportError(
            f"No driver for {protocol}:// works here. {remedy}. ({reason})"
        ) from error
    except ValueError as error:
        if "rotocol" not in str(error):
            raise
        raise InvalidArgumentError(
            message=f"There is no file system for {protocol}://. Received: {path!r}"
        ) from error


def _timeouts(protocol: str) -> dict[str, Any]:
    """Returns the options for a driver's timeouts, which would be minutes otherwise."""
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


@contextlib.contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Converts the errors of file systems to those of `unison.errors`, with the path."""
    try:
        yield
    except OpError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(message=f"{path}; No such file or directory") from error
    except FileExistsError as error:
        raise AlreadyExistsError(message=f"{path}; File exists") from error
    except PermissionError as error:
        raise PermissionDeniedError(message=f"{path}; Permission denied") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FailedPreconditionError(message=f"{path}; {error.strerror or error}") from error
    except OSError as error:
        if error.errno in _NO_NAME:
            raise InvalidArgumentError(message=f"{path[:200]}; {error.strerror}") from error
        if error.errno not in _NO_SPACE:
            raise
        raise ResourceExhaustedError(
            message=f"No space is left to write {path}. What was there before is untouched."
        ) from error
