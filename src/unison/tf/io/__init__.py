"""`tf.io`: files and decoding, on the host."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unison.data.files.compression import ZLIB_FORMATS, inflated_streams
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.tf import dtypes
from unison.tf.image_files import (
    decode_and_crop_jpeg,
    decode_bmp,
    decode_gif,
    decode_image,
    decode_jpeg,
    decode_png,
    decode_webp,
    encode_jpeg,
    encode_png,
    extract_jpeg_shape,
    is_jpeg,
)
from unison.tf.io import gfile
from unison.tf.io.parsing import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    RaggedFeature,
    SparseFeature,
    VarLenFeature,
    decode_json_example,
    parse_example,
    parse_sequence_example,
    parse_single_example,
    parse_single_sequence_example,
)
from unison.tf.io.records import TFRecordOptions, TFRecordWriter
from unison.tf.io.tensor_protos import parse_tensor, serialize_tensor
from unison.tf.missing import names_missing_from
from unison.tf.pending import PendingText
from unison.tf.tensors import convert_to_tensor, is_tensor, tensor_dtype
from unison.tf.text import StringTensor, text_of, texts_of

__all__ = [
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "RaggedFeature",
    "SparseFeature",
    "TFRecordOptions",
    "TFRecordWriter",
    "VarLenFeature",
    "decode_and_crop_jpeg",
    "decode_base64",
    "decode_bmp",
    "decode_compressed",
    "decode_csv",
    "decode_gif",
    "decode_image",
    "decode_jpeg",
    "decode_json_example",
    "decode_png",
    "decode_raw",
    "decode_webp",
    "encode_base64",
    "encode_jpeg",
    "encode_png",
    "extract_jpeg_shape",
    "gfile",
    "is_jpeg",
    "matching_files",
    "parse_example",
    "parse_sequence_example",
    "parse_single_example",
    "parse_single_sequence_example",
    "parse_tensor",
    "read_file",
    "serialize_tensor",
    "write_file",
]

__getattr__ = names_missing_from(__name__)


def read_file(filename: Any, name: str | None = None) -> StringTensor:
    """Returns the bytes of a file.

    Raises:
        NotFoundError: The file does not exist.

    TF: `tf.io.read_file`.
    """

    def content(path: Any) -> bytes:
        with gfile.GFile(path, "rb") as file:
            return bytes(file.read())

    if isinstance(filename, PendingText):
        return filename.each(content)
    needs_python("tf.io.read_file")
    return StringTensor(content(filename))


def write_file(filename: Any, contents: Any, name: str | None = None) -> None:
    """Writes text or bytes into a file; makes the folders above it. TF: `tf.io.write_file`."""
    needs_python("tf.io.write_file")
    path = text_of(filename)
    folder = path.rpartition("/")[0]
    if folder and not folder.endswith(":/"):
        gfile.makedirs(folder)
    with gfile.GFile(path, "wb") as file:
        file.write(StringTensor(contents).numpy())


def matching_files(pattern: Any, name: str | None = None) -> StringTensor:
    """Returns the files that match a pattern, sorted. TF: `tf.io.matching_files`."""
    patterns = [text_of(one) for one in StringTensor(pattern).reshape(-1)]
    return StringTensor(np.array(gfile.glob(patterns), dtype=object))


def decode_raw(
    input_bytes: Any,
    out_type: Any,
    little_endian: bool = True,
    fixed_length: int | None = None,
    name: str | None = None,
) -> Any:
    """Returns the numbers whose bytes the strings are, along a new last axis.

    Args:
        input_bytes: Strings of one length, unless `fixed_length` is given.
        out_type: The dtype of the numbers.
        little_endian: Whether the bytes are in little-endian order.
        fixed_length: Strings are cut, or filled up with zeros, to so many bytes.
        name: Without effect.

    Raises:
        InvalidArgumentError: The strings differ in length, or hold no whole number.

    TF: `tf.io.decode_raw`.
    """
    dtype = dtypes.named(out_type).newbyteorder("<" if little_endian else ">")
    found = tensor_dtype(out_type)

    def numbers(texts: np.ndarray) -> np.ndarray:
        return _numbers_in(texts, dtype, fixed_length).astype(found, copy=False)

    if isinstance(input_bytes, PendingText):
        return input_bytes.through(numbers)
    return convert_to_tensor(numbers(texts_of(input_bytes)))


def _numbers_in(texts: np.ndarray, dtype: np.dtype, fixed_length: int | None) -> np.ndarray:
    """Returns the numbers whose bytes are in texts, along a new last axis."""
    items = texts.ravel().tolist()
    if fixed_length is not None:
        items = [item[:fixed_length].ljust(fixed_length, b"\0") for item in items]
    lengths = set(map(len, items))
    if len(lengths) > 1 or any(length % dtype.itemsize for length in lengths):
        raise InvalidArgumentError(
            message="tf.io.decode_raw: expected strings of one length, a multiple of "
            f"{dtype.itemsize}. Received the lengths {sorted(lengths)}"
        )
    return np.frombuffer(b"".join(items), dtype).reshape((*texts.shape, -1))


def decode_csv(
    records: Any,
    record_defaults: Sequence[Any],
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    name: str | None = None,
) -> list[Any]:
    """Returns one tensor a column of the records.

    Args:
        records: Lines of text, of any shape.
        record_defaults: For every column, the value where a record has none, whose dtype the
            column has. An empty tensor, or a dtype, means that there is no such value.
        field_delim: What stands between the columns.
        use_quote_delim: Whether quoted fields may contain delimiters.
        na_value: A text that counts as none.
        select_cols: The columns to read. Default: all.
        name: Without effect.

    Raises:
        InvalidArgumentError: A record has another number of columns, lacks a value that it must
            have, or holds something that is no number.

    TF: `tf.io.decode_csv`.
    """
    lines = StringTensor(records)
    # Invalid UTF-8 is unchanged.
    texts = (item.decode(errors="surrogateescape") for item in lines.view(np.ndarray).flat)
    quoting: Any = csv.QUOTE_MINIMAL if use_quote_delim else csv.QUOTE_NONE
    try:
        rows = list(csv.reader(texts, delimiter=field_delim, quoting=quoting))
    except csv.Error as error:
        raise InvalidArgumentError(message=f"The records are not CSV: {error}") from error
    if select_cols is not None:
        rows = [[row[column] for column in select_cols] for row in rows]
    for index, row in enumerate(rows):
        if len(row) != len(record_defaults):
            raise InvalidArgumentError(
                message=f"Expect {len(record_defaults)} fields but have {len(row)} in record "
                f"{index}"
            )
    columns = []
    for field, default in enumerate(record_defaults):
        column = _Column(field, default)
        values = [column.value(index, row[field], na_value) for index, row in enumerate(rows)]
        columns.append(column.tensor(values, lines.shape))
    return columns


class _Column:
    """The format of the texts in one column of a table."""

    def __init__(self, field: int, default: Any):
        self._field = field
        self._default: Any = None
        if isinstance(default, dtypes.DType):
            self._dtype = default
        else:
            known = default if is_tensor(default) else convert_to_tensor(default)
            self._dtype = dtypes.as_dtype(known.dtype)
            self._default = known.reshape(-1)[0].numpy() if known.size else None

    def value(self, index: int, text: str, na_value: str) -> Any:
        if text in ("", na_value):
            if self._default is None:
                raise InvalidArgumentError(
                    message=f"Field {self._field} is required but missing in record {index}!"
                )
            return self._default
        if self._dtype == dtypes.string:
            return text.encode(errors="surrogateescape")
        try:
            value = int(text) if self._dtype.is_integer else float(text)
            return np.array(value, self._dtype.dtype)[()]
        except (ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                message=f"Field {self._field} in record {index} is not a valid "
                f"{self._dtype.name}: {text[:80]}"
            ) from error

    def tensor(self, values: list[Any], shape: tuple[int, ...]) -> Any:
        if self._dtype == dtypes.string:
            return StringTensor(np.array(values, dtype=object).reshape(shape))
        return convert_to_tensor(np.array(values, self._dtype.dtype).reshape(shape))


def encode_base64(input: Any, pad: bool = False, name: str | None = None) -> StringTensor:
    """Writes bytes in the alphabet that is safe in addresses. TF: `tf.io.encode_base64`."""

    def encoded(item: bytes) -> bytes:
        written = base64.urlsafe_b64encode(item)
        return written if pad else written.rstrip(b"=")

    return _mapped(encoded, input)


def decode_base64(input: Any, name: str | None = None) -> StringTensor:
    """TF: `tf.io.decode_base64`."""

    def decoded(item: bytes) -> bytes:
        try:
            return base64.urlsafe_b64decode(item + b"=" * (-len(item) % 4))
        except ValueError as error:
            raise InvalidArgumentError(
                message=f"Expected text in base64. Received: {item[:64]!r}: {error}"
            ) from error

    return _mapped(decoded, input)


def decode_compressed(bytes: Any, compression_type: str = "", name: str | None = None) -> Any:
    """Decompresses "GZIP" or "ZLIB"; with "", returns the bytes unchanged.

    Raises:
        DataLossError: It has not packed that; or that is more than 32 MiB, and than 16 times as
            much as was packed: it is taken for a decompression bomb.

    TF: `tf.io.decode_compressed`.
    """
    if compression_type not in ("", *ZLIB_FORMATS):
        raise ValueError(
            f"Expected the compression_type '', GZIP or ZLIB. Received: {compression_type!r}"
        )
    if not compression_type:
        return _mapped(lambda item: item, bytes)
    return _mapped(lambda item: inflated_streams(item, compression_type), bytes)


def _mapped(function: Callable[[bytes], bytes], value: Any) -> StringTensor:
    strings = StringTensor(value)
    results = np.empty(strings.shape, dtype=object)
    results.ravel()[:] = [function(item) for item in strings.view(np.ndarray).flat]
    return StringTensor(results)
