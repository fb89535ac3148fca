"""Columns of features, from serialized Examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unison.data.examples.features import dtype_of_kind
from unison.data.examples.messages import message
from unison.data.examples.wire import Column, Kind, read_columns
from unison.errors import InvalidArgumentError

#: The number of Examples from which on it pays to parse them together.
_SIDE_BY_SIDE = 6

#: The names of the kinds in TensorFlow's messages, and the fields that hold them.
KIND_NAMES = {Kind.BYTES: "string", Kind.FLOAT: "float", Kind.INT64: "int64"}
_FIELDS = {Kind.BYTES: "bytes_list", Kind.FLOAT: "float_list", Kind.INT64: "int64_list"}
_NAMES_OF_FIELDS = {_FIELDS[kind]: name for kind, name in KIND_NAMES.items()}


def columns_of(serialized: Sequence[bytes], kinds: Mapping[str, Kind]) -> dict[str, Column]:
    """Returns features of serialized Examples.

    Args:
        serialized: The Examples.
        kinds: The features' keys and kinds.

    Raises:
        InvalidArgumentError: One is not an Example, or a feature is of another kind.
    """
    columns = None
    if len(serialized) >= _SIDE_BY_SIDE:
        columns = read_columns(serialized, {key.encode(): kind for key, kind in kinds.items()})
    if columns is not None:
        return dict(zip(kinds, columns, strict=True))
    features = [parsed("Example", text).features.feature for text in serialized]
    return {key: _column_of(features, key, kind) for key, kind in kinds.items()}


def parsed(name: str, serialized: bytes) -> Any:
    """Returns a serialized message as an object.

    Raises:
        InvalidArgumentError: It is not such a message.
    """
    try:
        return message(name).FromString(serialized)
    except Exception as error:
        if type(error).__name__ != "DecodeError":
            raise
        raise InvalidArgumentError(
            message=f"Could not parse example input as a tf.train.{name}, value: "
            f"{serialized[:64]!r}{'...' if len(serialized) > 64 else ''}"
        ) from error


def _column_of(features: Sequence[Any], key: str, kind: Kind) -> Column:
    found = [
        values_in(of_one[key], key, kind, index) if key in of_one else None
        for index, of_one in enumerate(features)
    ]
    return column_from(found, kind)


def values_in(feature: Any, key: str, kind: Kind, index: int) -> Sequence[Any] | None:
    """Returns the values of a `tf.train.Feature`; None if it has none of the kinds.

    Raises:
        InvalidArgumentError: They are of another kind.
    """
    field = feature.WhichOneof("kind")
    if field is None:
        return None
    if field != _FIELDS[kind]:
        raise InvalidArgumentError(
            message=f"Key: {key}, Index: {index}. Data types don't match. Data type: "
            f"{_NAMES_OF_FIELDS[field]} but expected type: {KIND_NAMES[kind]}"
        )
    return getattr(feature, field).value


def column_from(found: Iterable[Sequence[Any] | None], kind: Kind) -> Column:
    """Returns a column from the values of each Example."""
    counts = []
    values: list[Any] = []
    for of_one in found:
        counts.append(-1 if of_one is None else len(of_one))
        values += of_one or ()
    column = np.empty(len(values), dtype_of_kind(kind))
    column[:] = values
    return Column(np.array(counts, np.int64), column)
