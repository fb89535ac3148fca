"""Datasets in folders: the format of `save`, `snapshot` and `cache(filename)`.

    FOLDER/dataset.json               the index; written last, atomically
    FOLDER/run-ID/shard-NNNNN/leaf*   the tables of `column_files`
    FOLDER/run-ID.lock                locked while a process writes that run

The elements exist once `dataset.json` names their run, not before: an interrupted pass
leaves nothing that would be read. The first line is the CRC-32 of the rest. Several processes can
write at the same time, each its own run; the files of a process that was killed are removed by the
next process that writes (in local folders).
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from unison.data.caching.column_files import Table, TableRows, TableWriter, codec_of
from unison.data.caching.dataset_index import (
    RUN,
    DatasetIndex,
    as_json,
    read_index,
    structure_of,
    write_index,
)
from unison.data.files.paths import open_file
from unison.data.plan import Plan, Rows, RowsStream, Stream
from unison.data.ragged import RaggedArray
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import Leaves
from unison.errors import DataLossError, InvalidArgumentError, OpError
from unison.storage import files
from unison.storage.file_systems import is_remote
from unison.storage.locks import lock
from unison.storage.names import path_inside, remove_folder

logger = logging.getLogger(__name__)


class DatasetWriter:
    """Writes the elements of one pass to a folder.

    If it is dropped before `publish`, it removes its files.

    Args:
        folder: The folder; it is created with the first files.
        compression: See `codec_of`.
        said_when_dropped: The log message if there were files then; None for no message.
    """

    def __init__(
        self, folder: str, compression: str | None = None, said_when_dropped: str | None = None
    ):
        codec_of(compression)  # raises if the compression is unknown
        self._folder = folder
        self._compression = compression
        self._run = _Run(folder)
        self._shards: dict[int, TableWriter] = {}
        self._specs: tuple[ArraySpec, ...] = ()
        self._drop = weakref.finalize(self, self._run.remove, said_when_dropped)

    def add(self, block: Leaves, shard: int = 0) -> None:
        """Writes stacked elements to the shard with that number.

        Raises:
            TypeError: A leaf is ragged.
        """
        if any(isinstance(leaf, RaggedArray) for leaf in block):
            raise TypeError(
                "Ragged elements are not written to files. Write the elements before ragged_batch "
                "(or batch) makes them ragged, or map them to arrays: x.to_tensor()."
            )
        specs = tuple(ArraySpec(leaf.shape[1:], leaf.dtype) for leaf in block)
        if self._specs != specs:
            pairs = zip(self._specs or specs, specs, strict=True)
            self._specs = tuple(one.widened(two) for one, two in pairs)
        self._shard(shard).add(block)

    def publish(self, source: Plan, replaces: bool = False) -> None:
        """Makes the written elements the folder's dataset.

        Args:
            source: The plan of the elements. If there were none, and the plan does not know their
                signature, nothing is published.
            replaces: Whether it replaces an existing dataset. Otherwise, the existing one
                stays, and this one is dropped.

        Raises:
            ValueError: There is no dataset to replace.
        """
        before = read_index(self._folder)
        signature = source.known_signature
        if signature is None and (self._specs or replaces):
            signature = Signature(source.structure, self._specs)
        if signature is None or (before is not None and not replaces):
            self.discard()
            return
        self._run.begin()
        if not self._shards:
            self._shard(0)  # there are no elements
        places = {number: place for place, number in enumerate(self._shards)}
        shards = {
            _shard_folder(places[number]): self._shards[number].finish()
            for number in sorted(self._shards)
        }
        write_index(self._folder, self._run.name, self._compression, signature, shards)
        self._drop.detach()
        self._run.release()
        if before is not None:
            remove_folder(self._folder, before.run, RUN)

    def discard(self) -> None:
        """Removes the files, unless it has published them."""
        for shard in self._shards.values():
            shard.close()
        if self._drop.detach() is not None:
            self._run.remove()

    def _shard(self, number: int) -> TableWriter:
        if number not in self._shards:
            folder = f"{self._folder}/{self._run.name}/{_shard_folder(len(self._shards))}"
            self._shards[number] = TableWriter(folder, self._compression, self._run.begin)
        return self._shards[number]


def _shard_folder(place: int) -> str:
    return f"shard-{place:05d}"


class _Run:
    """The files of a pass, until they are published."""

    def __init__(self, folder: str):
        self._folder = folder
        self.name = f"run-{uuid.uuid4().hex[:12]}"
        self._has_begun = False
        self._process = os.getpid()
        self._lock: IO[bytes] | None = None

    def begin(self) -> None:
        """Creates the folder, unless this has already been done."""
        if self._has_begun:
            return
        self._has_begun = True
        if not is_remote(self._folder):
            os.makedirs(self._folder, exist_ok=True)
            _remove_abandoned_runs(self._folder)
            self._lock = open_file(f"{self._folder}/{self.name}.lock", "wb")
            lock(self._lock)

    def remove(self, message: str | None = None) -> None:
        """Removes the files, if there are any, and logs it."""
        if not self._has_begun or os.getpid() != self._process:
            return  # in a forked process, which does not own the files
        if message is not None:
            logger.warning(message)
        remove_folder(self._folder, self.name, RUN)
        if self._lock is not None:
            self.release()
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)  # if it is empty

    def release(self) -> None:
        """Releases the lock: nothing more is written."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._lock.name)
            self._lock.close()


class KeptDataset:
    """A dataset in a folder.

    Args:
        folder: The folder.
        index: The content of its `dataset.json`.
        expected: The expected signature of the elements; None for the stored one.

    Raises:
        DataLossError: Its files are corrupt.
        InvalidArgumentError: The elements have another signature.
    """

    def __init__(self, folder: str, index: DatasetIndex, expected: Signature | None = None):
        #: The signature of the elements.
        self.signature = index.signature
        if expected is not None:
            _check_fits(folder, self.signature, expected)
            self.signature = expected
        #: The elements, shard by shard.
        self.shards = [
            Saved(
                Table(path_inside(folder, index.run, name), table, index.compression),
                self.signature,
            )
            for name, table in index.shards
        ]

    def __len__(self) -> int:
        return sum(shard.cardinality() for shard in self.shards)


class Saved(Plan):
    """The elements of a table."""

    def __init__(self, table: Table, signature: Signature):
        self._signature = signature
        self._is_mapped = table.is_mapped
        #: The elements by index; fast only if their files are memory-mapped.
        self.table_rows = TableRows(table)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._signature

    def cardinality(self) -> int:
        return len(self.table_rows)

    def rows(self) -> Rows | None:
        return self.table_rows if self._is_mapped else None

    def _stream(self) -> Stream:
        return RowsStream(self.table_rows)


def read_dataset(folder: str, expected: Signature | None = None) -> KeptDataset | None:
    """Returns the dataset in a folder; None if there is none.

    Args:
        folder: The folder.
        expected: The expected signature of the elements; None for the stored one.

    Raises:
        DataLossError: Its files are corrupt.
        InvalidArgumentError: The elements have another signature.
    """
    index = read_index(folder)
    if index is None:
        return None
    try:
        return KeptDataset(folder, index, expected)
    except DataLossError as error:
        raise DataLossError(message=f"{error} Remove {folder}, and write it again.") from error


def _check_fits(folder: str, kept: Signature, expected: Signature) -> None:
    # A file has the name and the fields of a named tuple, not its class.
    has_structure = structure_of(as_json(expected.structure)) == kept.structure
    dtypes = [getattr(spec, "dtype", None) for spec in expected.specs]
    if not has_structure or dtypes != [spec.dtype for spec in kept.specs]:
        raise InvalidArgumentError(
            message=f"The elements kept in {folder} differ from the expected ones. Expected: "
            f"{expected.element_spec}. Received: {kept.element_spec}. Remove the folder if another "
            "pipeline has written it, or choose another folder."
        )


def _remove_abandoned_runs(folder: str) -> None:
    """Removes the runs of processes that ended before they had published them."""
    for path in Path(folder).glob("run-*.lock"):
        if not RUN.fullmatch(path.stem):
            continue
        with contextlib.suppress(OSError, OpError), files.open_to_read(str(path)) as file:
            if lock(file) and path.with_suffix("").exists():  # otherwise, its process runs
                remove_folder(folder, path.stem, RUN)
                path.unlink()
