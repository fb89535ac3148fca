"""Files: their names by pattern, and the lines of text files.

A path with `://` (`gs://`, `s3://`, `hdfs://`, `memory://`) is fsspec's; all others are local.
"""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, cast

from unison.data.leaves import as_leaf
from unison.data.plan import UNKNOWN, Plan, Stream, Transformation
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Leaves
from unison.errors import InvalidArgumentError, NotFoundError

#: How many bytes are read of a file at once.
_BYTES_AT_ONCE = 1 << 18


def matching_files(patterns: str | bytes | os.PathLike | Iterable[Any]) -> list[bytes]:
    """Returns the names of the files that a pattern, or one of several, matches, sorted.

    Raises:
        InvalidArgumentError: None does.
    """
    listed = as_leaf(os.fspath(patterns) if isinstance(patterns, os.PathLike) else patterns)
    texts = [listed.decode()] if isinstance(listed, bytes) else [item.decode() for item in listed]
    names = sorted({name for pattern in texts for name in _matching(pattern)})
    if not names:
        raise InvalidArgumentError(message=f"No files matched pattern: {', '.join(texts)}")
    return [name.encode() for name in names]


def _matching(pattern: str) -> Iterable[str]:
    if "://" not in pattern:
        return (name for name in glob.glob(pattern) if os.path.isfile(name))
    import fsspec

    system, path = fsspec.core.url_to_fs(pattern)
    return map(system.unstrip_protocol, system.glob(path))


class TextLines(Transformation):
    """The lines of text files, as `bytes` without their ends.

    Args:
        source: The plan of the files' names.
        compression: "", "GZIP" or "ZLIB".

    Raises:
        TypeError: The names are no text.
        InvalidArgumentError: There is no such compression.
    """

    def __init__(self, source: Plan, compression: str):
        super().__init__(source)
        signature = source.known_signature
        if signature is not None and [spec.dtype.kind for spec in signature.specs] != ["O"]:
            raise TypeError(
                f"Expected the names of files, as text. Received: {signature.element_spec}"
            )
        if compression not in _DECODERS:
            raise InvalidArgumentError(
                message=f"Expected a compression of {sorted(_DECODERS)}. Received: {compression!r}"
            )
        self._compression = compression

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return Signature(LEAF, (ArraySpec((), inputs[0].specs[0].dtype),))

    def cardinality(self) -> int:
        return UNKNOWN

    def _stream(self) -> Stream:
        return _TextLinesStream(self._input.stream(), self._compression)


class _TextLinesStream(Stream):
    def __init__(self, names: Stream, compression: str):
        self._names = names
        self._compression = compression
        self._lines: Iterator[bytes] | None = None

    def next(self) -> Leaves | None:
        while self._lines is not None or self._open_next():
            assert self._lines is not None
            line = next(self._lines, None)
            if line is not None:
                return (line,)
            self._lines = None
        return None

    def _open_next(self) -> bool:
        element = self._names.next()
        if element is not None:
            self._lines = _lines_of(element[0].decode(), self._compression)
        return element is not None


def _lines_of(name: str, compression: str) -> Iterator[bytes]:
    try:
        with _open(name) as file:
            for line in _DECODERS[compression](file):
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except FileNotFoundError as error:
        raise NotFoundError(message=f"{name}; No such file or directory") from error


def _open(name: str) -> IO[bytes]:
    if "://" not in name:
        return open(name, "rb", _BYTES_AT_ONCE)
    import fsspec

    return cast(IO[bytes], fsspec.open(name, "rb").open())


def _inflated_lines(file: IO[bytes]) -> Iterator[bytes]:
    inflater = zlib.decompressobj()
    rest = b""
    while compressed := file.read(_BYTES_AT_ONCE):
        *lines, rest = (rest + inflater.decompress(compressed)).split(b"\n")
        yield from lines
    rest += inflater.flush()
    if rest:
        yield rest


#: What gives the lines of a file, by TensorFlow's names of compressions.
_DECODERS: dict[str, Callable[[IO[bytes]], Iterable[bytes]]] = {
    "": lambda file: file,
    "GZIP": lambda file: gzip.GzipFile(fileobj=file),
    "ZLIB": _inflated_lines,
}
