"""Datasets of files of records: TFRecords, and fixed-length records."""

from __future__ import annotations

from typing import Any, Literal

from unison.data.dataset import Dataset
from unison.data.files import (
    FixedLengthRecords,
    SkippedRecords,
    TFRecords,
    cycle_length_of,
    names_of_files,
)
from unison.data.files.records import CHUNK


class TFRecordDataset(Dataset):
    """The records of TFRecord files, as `bytes`; their checksums are verified.

    Args:
        filenames: The name of a file, several, or a dataset of names.
        compression_type: "GZIP", "ZLIB", or nothing.
        buffer_size: The number of bytes of a file that are read at a time.
        num_parallel_reads: The number of files that are read at a time, each ahead in a thread,
            their records in turn; default: one file after another, without threads.
        on_corrupt: "raise" a `DataLossError` with the position of a corrupt record, or "skip" it:
            then reading continues with the next complete record, and `num_skipped` counts.

    Examples:
        >>> from unison.data.files import TFRecordWriter
        >>> with TFRecordWriter("memory://numbers.tfrecord") as writer:
        ...     for number in range(3):
        ...         writer.write(b"%d" % number)
        >>> list(TFRecordDataset("memory://numbers.tfrecord"))
        [b'0', b'1', b'2']

    TF: `tf.data.TFRecordDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        on_corrupt: Literal["raise", "skip"] = "raise",
    ):
        if on_corrupt not in ("raise", "skip"):
            raise ValueError(
                f'Expected on_corrupt to be "raise" or "skip". Received: {on_corrupt!r}'
            )
        self._skipped = SkippedRecords()
        records = TFRecords(
            names_of_files(filenames),
            compression_type,
            cycle_length_of(num_parallel_reads),
            buffer_size or CHUNK,
            self._skipped if on_corrupt == "skip" else None,
        )
        super().__init__(records)

    @property
    def num_skipped(self) -> int:
        """The number of corrupt records that this process has skipped, in all passes together."""
        return self._skipped.count


class FixedLengthRecordDataset(Dataset):
    """The records of files of fixed-length records, as `bytes`.

    Args:
        filenames: The name of a file, several, or a dataset of names.
        record_bytes: The length of a record.
        header_bytes: The number of bytes before the first record of a file.
        footer_bytes: The number of bytes after the last one.
        buffer_size: The number of bytes of a file that are read at a time.
        compression_type: "GZIP", "ZLIB", or nothing.
        num_parallel_reads: The number of files that are read at a time, each ahead in a thread,
            their records in turn; default: one file after another, without threads.

    TF: `tf.data.FixedLengthRecordDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
    ):
        records = FixedLengthRecords(
            names_of_files(filenames),
            int(record_bytes),
            int(header_bytes or 0),
            int(footer_bytes or 0),
            compression_type,
            cycle_length_of(num_parallel_reads),
            buffer_size or CHUNK,
        )
        super().__init__(records)
