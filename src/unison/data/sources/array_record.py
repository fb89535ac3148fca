"""`from_array_record`: the records of ArrayRecord files, by index."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unison.data.files import matching_files
from unison.data.plan import Plan, Rows
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Leaves
from unison.errors import DataLossError, InvalidArgumentError
from unison.storage.file_systems import is_remote


class ArrayRecordFiles(Plan):
    """The records of ArrayRecord files, as `bytes`.

    Args:
        patterns: The names of local files, or patterns.

    Raises:
        ImportError: Grain is not installed.
        InvalidArgumentError: No file matches, or one is not local.
        DataLossError: A file is damaged.
    """

    identity = ("_length",)

    def __init__(self, patterns: Any):
        try:
            from grain.sources import ArrayRecordDataSource
        except ImportError as error:
            raise ImportError(
                'from_array_record needs Grain: pip install "unison[grain]"'
            ) from error
        #: The files.
        self.paths = paths = [name.decode() for name in matching_files(patterns)]
        remote = [path for path in paths if is_remote(path)]
        if remote:
            raise InvalidArgumentError(
                message="ArrayRecord files are read by index, from local disks only. Copy them. "
                f"Received: {remote[0]!r}"
            )
        with _named_damage(paths):
            self._rows = _ArrayRecordRows(ArrayRecordDataSource(paths), paths)
            self._length = len(self._rows)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return Signature(LEAF, (ArraySpec((), np.dtype(object)),))

    def cardinality(self) -> int:
        return self._length

    def of_file(self, path: str) -> ArrayRecordFiles:
        """Returns the plan of the records of one file."""
        return ArrayRecordFiles(path)

    def rows(self) -> Rows:
        return self._rows


class _ArrayRecordRows(Rows):
    def __init__(self, source: Any, paths: list[str]):
        self._source = source
        self._paths = paths
        self._length = len(source)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Leaves:
        records = np.empty(len(indices), object)
        with _named_damage(self._paths):
            records[:] = self._source.__getitems__(indices.tolist())
        return (records,)

    def element(self, index: int) -> Leaves:
        with _named_damage(self._paths):
            return (self._source[index],)


@contextlib.contextmanager
def _named_damage(paths: list[str]) -> Iterator[None]:
    """Raises the errors of the reader for corrupt files as a DataLossError."""
    try:
        yield
    except RuntimeError as error:
        raise DataLossError(
            message=f"ArrayRecord files cannot be read: {error}. Files: {paths}"
        ) from error
