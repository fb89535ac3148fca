"""Files wherever fsspec reaches, and the records in them."""

from unison.data.files.fixed_length import FixedLengthRecords
from unison.data.files.paths import matching_files, open_file
from unison.data.files.records import FileRecords, cycle_length_of, names_of_files
from unison.data.files.text_lines import TextLines
from unison.data.files.tfrecords import (
    SkippedRecords,
    TFRecordOptions,
    TFRecords,
    TFRecordWriter,
)
from unison.storage.patience import PATIENCE, Patience

__all__ = [
    "PATIENCE",
    "FileRecords",
    "FixedLengthRecords",
    "Patience",
    "SkippedRecords",
    "TFRecordOptions",
    "TFRecordWriter",
    "TFRecords",
    "TextLines",
    "cycle_length_of",
    "matching_files",
    "names_of_files",
    "open_file",
]
