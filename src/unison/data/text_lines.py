"""`TextLineDataset`: the lines of text files."""

from __future__ import annotations

from typing import Any

from unison.data.dataset import Dataset
from unison.data.files import TextLines, cycle_length_of, names_of_files
from unison.data.files.records import CHUNK


class TextLineDataset(Dataset):
    """The lines of text files, as `bytes` without line terminators.

    Args:
        filenames: The name of a file, several, or a dataset of names.
        compression_type: "GZIP", "ZLIB", or nothing.
        buffer_size: The number of bytes of a file that are read at a time.
        num_parallel_reads: The number of files that are read at a time, each ahead in a thread,
            their lines in turn; default: one file after another, without threads.

    TF: `tf.data.TextLineDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
    ):
        names = names_of_files(filenames)
        cycle_length = cycle_length_of(num_parallel_reads)
        super().__init__(TextLines(names, compression_type, cycle_length, buffer_size or CHUNK))
