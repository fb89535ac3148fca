"""Columns of Arrow tables (Parquet files, Hugging Face datasets) as the leaves of elements.

An element is a dictionary of columns; a column of structs is a dictionary inside it. Text is
`bytes`, a list is an array with one more axis, a dictionary-encoded column is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from unison.data.caching.columns import Column
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Structure
from unison.errors import InvalidArgumentError


def import_pyarrow(what: str) -> Any:
    """Returns the package pyarrow.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f'{what} needs pyarrow: pip install "unison[parquet]"') from error
    return pyarrow


def signature_of(schema: Any) -> Signature:
    """Returns the signature of the rows of tables with a schema.

    Raises:
        InvalidArgumentError: A column's type has no corresponding array.
    """
    names = sorted(schema.names)
    parts = [_signature_of(schema.field(name).type, name) for name in names]
    specs = tuple(spec for part in parts for spec in part.specs)
    children = tuple(part.structure for part in parts)
    return Signature(Structure(dict, children, tuple(names), tuple(schema.names)), specs)


def columns_of(table: Any, first_row: int) -> list[Column]:
    """Returns the leaves of the rows of a table.

    Args:
        table: The table, or a batch of records.
        first_row: The number of its first row, for messages.

    Raises:
        InvalidArgumentError: A value is missing.
    """
    columns: list[Column] = []
    for name in sorted(table.schema.names):
        column = table.column(name)
        if hasattr(column, "combine_chunks"):
            column = column.combine_chunks()
        columns.extend(_columns_of(column, name, first_row))
    return columns


def _signature_of(kind: Any, name: str) -> Signature:
    import pyarrow as pa

    kind = _plain(kind)
    if pa.types.is_struct(kind):
        fields = sorted(kind, key=lambda field: field.name)
        parts = [_signature_of(field.type, f"{name}.{field.name}") for field in fields]
        keys = tuple(field.name for field in fields)
        order = tuple(field.name for field in kind)
        structure = Structure(dict, tuple(part.structure for part in parts), keys, order)
        return Signature(structure, tuple(spec for part in parts for spec in part.specs))
    shape: list[int | None] = []
    item = kind
    while _is_list(item):
        shape.append(item.list_size if pa.types.is_fixed_size_list(item) else None)
        item = _plain(item.value_type)
    dtype = _dtype_of(item)
    # With nested lists, only the outermost may have different lengths.
    if dtype is None or None in shape[1:]:
        raise InvalidArgumentError(
            message=f"The column {name!r} is of the type {kind}, which no array holds. Leave it "
            "out (columns=[...]), or write it as numbers, text, or lists of fixed size."
        )
    return Signature(LEAF, (ArraySpec(tuple(shape), dtype),))


def _columns_of(array: Any, name: str, first_row: int) -> Iterator[Column]:
    import pyarrow as pa

    array = _decoded(array)
    if array.null_count:
        row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise InvalidArgumentError(
            message=f"The column {name!r} has no value in row {row}. Elements have no missing "
            "values: fill them (pyarrow.compute.fill_null), or leave the column out "
            "(columns=[...])."
        )
    if pa.types.is_struct(array.type):
        for field in sorted(array.type, key=lambda field: field.name):
            yield from _columns_of(array.field(field.name), f"{name}.{field.name}", first_row)
        return
    rows = len(array)
    shape: list[int] = []
    sizes = None
    if _is_list(array.type) and not pa.types.is_fixed_size_list(array.type):
        lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        array = _decoded(array.flatten())
        sizes = lengths[:, None]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = _decoded(array.flatten())
    if array.null_count:
        raise InvalidArgumentError(
            message=f"The lists of the column {name!r} have missing values, in or behind row "
            f"{first_row}. Elements have none: fill them, or leave the column out (columns=[...])."
        )
    if sizes is not None and len({*sizes[:, 0].tolist()}) == 1:
        shape, sizes = [int(sizes[0, 0]), *shape], None
    elif sizes is not None:
        sizes = np.hstack([sizes, np.tile(np.array(shape, np.int64), (len(sizes), 1))])
    yield Column(_items_of(array), rows, None if sizes is not None else shape, sizes)


def _items_of(array: Any) -> np.ndarray:
    """Returns the numbers or texts of an array, without a copy if possible."""
    import pyarrow as pa

    if _dtype_of(array.type) == np.dtype(object):
        return array.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
    return array.to_numpy(zero_copy_only=False)


def _decoded(array: Any) -> Any:
    """Returns an array, decoded."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _plain(kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _dtype_of(kind: Any) -> np.dtype | None:
    import pyarrow as pa

    types = pa.types
    if any(
        is_text(kind)
        for is_text in (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_fixed_size_binary,
        )
    ):
        return np.dtype(object)
    is_number = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    # Not `to_pandas_dtype`, which requires pandas in older versions of pyarrow.
    return pa.array([], kind).to_numpy(zero_copy_only=False).dtype if is_number else None
