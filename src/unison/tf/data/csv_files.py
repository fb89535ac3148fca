"""`CsvDataset` and `make_csv_dataset`: the columns of CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unison.data import AUTOTUNE
from unison.data.files import cycle_length_of, names_of_files
from unison.data.files.csv_records import CsvRecords
from unison.data.sources.csv_columns import (
    Column,
    CsvColumns,
    Fields,
    by_name,
    columns_in,
    names_of_columns,
)
from unison.data.structure import LEAF, flatten, tuple_of
from unison.errors import InvalidArgumentError
from unison.tf import dtypes
from unison.tf.data.dataset import Dataset, leaf_of


class CsvDataset(Dataset):
    """The records of CSV files, as tuples of the values of their columns.

    Args:
        filenames: The name of a file, several, or a dataset of names.
        record_defaults: For every column its dtype, if no field may be empty, or the value of an
            empty field.
        compression_type: "", "GZIP" or "ZLIB".
        buffer_size: Without effect.
        header: Whether the first record of every file is passed over.
        field_delim: What is between two fields.
        use_quote_delim: Whether quotation marks hold a field together.
        na_value: A field that counts as empty.
        select_cols: The places of the columns, rising; default: all.
        exclude_cols: Or the places of the columns that are left out.

    Raises:
        ValueError: Both are given, or there is another number of defaults.

    TF: `tf.data.experimental.CsvDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        record_defaults: Sequence[Any],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,
        field_delim: str = ",",
        use_quote_delim: bool = True,
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
        exclude_cols: Sequence[int] | None = None,
    ):
        count = len(record_defaults)
        if select_cols is not None and exclude_cols is not None:
            raise ValueError("Pass either select_cols or exclude_cols.")
        if select_cols is not None and len(select_cols) != count:
            raise ValueError(
                f"Expected as many select_cols as record_defaults, {count}. Received: "
                f"{list(select_cols)}"
            )
        num_fields = None if select_cols is not None else count + len(exclude_cols or ())
        places = select_cols
        if places is None:
            left_out = {*(exclude_cols or ())}
            places = [place for place in range(num_fields or 0) if place not in left_out]
        pairs = zip(places, record_defaults, strict=True)
        columns = [_column(place, default) for place, default in pairs]
        records = CsvRecords(names_of_files(filenames), header, use_quote_delim, compression_type)
        fields = Fields(field_delim, use_quote_delim, na_value)
        super().__init__(
            CsvColumns(records, columns, tuple_of(*[LEAF] * count), fields, num_fields)
        )


def _column(place: int, default: Any) -> Column:
    """Returns a column, given a dtype, an empty tensor, or a value."""
    if isinstance(default, dtypes.DType | type | np.dtype):
        dtype: np.dtype = np.dtype(dtypes.as_dtype(default).as_numpy_dtype)
        return Column(place, dtype)
    leaf = leaf_of(default)
    values = np.atleast_1d(np.array(leaf, object) if isinstance(leaf, bytes) else leaf)
    return Column(place, values.dtype, values[0] if values.size else None)


def make_csv_dataset(
    file_pattern: Any,
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[int | str] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
) -> Any:
    """Returns batches of CSV records: dictionaries of columns, or pairs of them and the labels.

    Args:
        file_pattern: A pattern of names of files, or several.
        batch_size: The number of records in a batch.
        column_names: The names of all columns; default: those in the header.
        column_defaults: For every selected column its dtype, if no field may be empty, or the
            value of an empty field; default: the narrowest dtype that holds the first records'
            fields, and 0 or empty text.
        label_name: The column of the labels.
        select_columns: The columns, by name or place; default: all.
        field_delim: What is between two fields.
        use_quote_delim: Whether quotation marks hold a field together.
        na_value: A field that counts as empty.
        header: Whether the first record of every file is its header.
        num_epochs: The number of passes over the records; None: without end.
        shuffle: Whether files and records are shuffled.
        shuffle_buffer_size: The size of the buffer for records.
        shuffle_seed: Determines the order.
        prefetch_buffer_size: The number of buffered batches; default: a few.
        num_parallel_reads: The number of files that are read at a time.
        sloppy: Without effect: the order is always the same.
        num_rows_for_inference: The number of records from which dtypes are inferred; None for all.
        compression_type: "", "GZIP" or "ZLIB".
        ignore_errors: Whether invalid records are left out.

    Raises:
        ValueError: A file does not exist, or the columns do not fit the files or each other.

    TF: `tf.data.experimental.make_csv_dataset`.
    """
    try:
        files = Dataset.list_files(file_pattern, shuffle=False)
    except InvalidArgumentError as error:
        raise ValueError(error.message) from error
    fields = Fields(field_delim, use_quote_delim, na_value)
    if column_names is None:
        if not header:
            raise ValueError("Files without a header (header=False) need column_names.")
        paths = list(files.as_numpy_iterator())
        column_names = names_of_columns(paths, fields, compression_type or "")
    if len({*column_names}) < len(column_names):
        raise ValueError(f"Expected columns of different names. Received: {list(column_names)}")
    places = _places_of(select_columns, column_names)
    if column_defaults is None:
        records = CsvRecords(files.plan, header, use_quote_delim, compression_type)
        most = num_rows_for_inference
        columns = columns_in(records, places, len(column_names), fields, most)
    elif len(column_defaults) != len(places):
        raise ValueError(
            f"Expected as many column_defaults as columns, {len(places)}. Received: "
            f"{len(column_defaults)}"
        )
    else:
        pairs = zip(places, column_defaults, strict=True)
        columns = [_column(place, default) for place, default in pairs]
    names = [column_names[place] for place in places]
    leaves, structure = flatten(by_name(names, columns, label_name))
    if shuffle:
        files = files.shuffle(len(files), shuffle_seed)
    cycle_length = cycle_length_of(num_parallel_reads)
    records = CsvRecords(files.plan, header, use_quote_delim, compression_type, cycle_length)
    num_fields = len(column_names) if select_columns is None else None
    dataset: Any = Dataset(CsvColumns(records, leaves, structure, fields, num_fields))
    if ignore_errors:
        dataset = dataset.ignore_errors()
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    dataset = dataset.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
    return dataset.prefetch(AUTOTUNE if prefetch_buffer_size is None else prefetch_buffer_size)


def _places_of(columns: Sequence[int | str] | None, names: Sequence[str]) -> list[int]:
    """Returns the places of the selected columns, rising."""
    if columns is None:
        return list(range(len(names)))
    for column in columns:
        if column not in (range(len(names)) if isinstance(column, int) else names):
            raise ValueError(
                f"Expected select_columns out of {list(names)}, or places from 0 to "
                f"{len(names) - 1}. Received: {column!r}"
            )
    places = [column if isinstance(column, int) else names.index(column) for column in columns]
    if len({*places}) < len(places):
        raise ValueError(f"Expected different select_columns. Received: {list(columns)}")
    return sorted(places)
