"""Files of a folder behind fsspec that are written and read as a whole, by many threads."""

from __future__ import annotations

import errno

from unison.errors import DataLossError
from unison.storage.file_systems import file_system, named_errors
from unison.storage.names import path_inside
from unison.storage.patience import attempted

#: The errors of object stores for a range of bytes in a file that has none.
_NO_RANGE = {errno.EINVAL}


class RemoteFolder:
    """A folder behind fsspec.

    Transient errors are retried, as for all remote files. The names of files are relative, with
    slashes, and no part of a URL: `a::b` is a file of that name.

    Args:
        url: Its URL, as `s3://bucket/run`.

    Examples:
        >>> folder = RemoteFolder("memory://examples/folder")
        >>> folder.write("a/b", b"12")
        >>> folder.read("a/b", 2)
        b'12'
    """

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self._system, root = file_system(self._url)
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        path_inside(self._url, *name.split("/"))
        return f"{self._root}/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Writes a file; its folder is made if the file system needs one.

        Raises:
            OpError: It cannot be written.
        """
        path, url = self._path(name), f"{self._url}/{name}"
        with named_errors(url):
            try:
                attempted(url, lambda: self._system.pipe_file(path, content), "written")
            except FileNotFoundError:
                self._system.makedirs(self._system._parent(path), exist_ok=True)
                attempted(url, lambda: self._system.pipe_file(path, content), "written")

    def read(self, name: str, size: int) -> bytes:
        """Returns the content of a file.

        Args:
            name: The file.
            size: Its size in bytes; no more are read of another one.

        Raises:
            DataLossError: It is missing, or has another size.
            OpError: It cannot be read.
        """
        path, url = self._path(name), f"{self._url}/{name}"

        def content() -> bytes:
            try:
                return self._system.cat_file(path, start=0, end=size + 1)
            except OSError as error:
                if error.errno not in _NO_RANGE:
                    raise
                return b""

        with named_errors(url):
            try:
                found = attempted(url, content)
            except FileNotFoundError:
                raise DataLossError(message=f"{url} is missing.") from None
        if len(found) != size:
            raise DataLossError(message=f"{url} has other than {size} bytes.")
        return found
