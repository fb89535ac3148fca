"""`tf.strings`: operations on text, computed on the host.

Patterns are Python's regular expressions; TensorFlow's (RE2) are the same where it has them. Of
several strings, the operations that cut them return a `tf.RaggedTensor`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unison.errors import InvalidArgumentError
from unison.fingerprint import fingerprint64
from unison.tf import dtypes
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.missing import names_missing_from
from unison.tf.printing import shown
from unison.tf.ragged.tensor import RaggedTensor
from unison.tf.tensors import convert_to_tensor
from unison.tf.text import StringTensor, text_of

__getattr__ = names_missing_from(__name__)


def _mapped(function: Callable[[bytes], Any], value: Any) -> np.ndarray:
    """Returns an array of the results of `function` for every string."""
    strings = StringTensor(value).view(np.ndarray)
    results = np.empty(strings.shape, dtype=object)
    results.ravel()[:] = [function(item) for item in strings.flat]
    return results


def _texts(function: Callable[[bytes], bytes], value: Any) -> StringTensor:
    return StringTensor(_mapped(function, value))


def _numbers(function: Callable[[bytes], Any], value: Any, dtype: Any) -> Any:
    return convert_to_tensor(_mapped(function, value).astype(dtypes.named(dtype)))


def _rows(rows: Sequence[Sequence[Any]], what: str) -> np.ndarray:
    """Returns rows of equal length as a matrix.

    Raises:
        InvalidArgumentError: Their lengths differ.
    """
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise InvalidArgumentError(
            message=f"{what}: the rows give {lengths[0]} to {lengths[-1]} parts. Pass a "
            "RaggedTensor, of which the result is ragged."
        )
    matrix = np.empty((len(rows), *lengths), dtype=object)
    for index, row in enumerate(rows):
        matrix[index] = row
    return matrix


def join(inputs: Sequence[Any], separator: str = "", name: str | None = None) -> StringTensor:
    """Joins the strings of several tensors, place by place.

    Examples:
        >>> join([["a", "b"], "x"], "-").numpy().tolist()
        [b'a-x', b'b-x']

    TF: `tf.strings.join`.
    """
    arrays = np.broadcast_arrays(*(StringTensor(part).view(np.ndarray) for part in inputs))
    if not arrays:
        return StringTensor(b"")
    joint = text_of(separator).encode()
    joined = arrays[0]
    for array in arrays[1:]:
        joined = joined + joint + array
    return StringTensor(joined)


def split(input: Any, sep: str | None = None, maxsplit: int = -1, name: str | None = None) -> Any:
    """Cuts a string, at white space or at `sep`, into a vector; several, into a ragged tensor.

    Examples:
        >>> split(["a b", "c"])
        <tf.RaggedTensor [[b'a', b'b'], [b'c']]>

    TF: `tf.strings.split`.
    """
    separator = None if sep is None or text_of(sep) == "" else text_of(sep).encode()

    def parts_of(item: bytes) -> list[bytes]:
        parts = item.split(separator, maxsplit)
        # As in TensorFlow, what is left behind the last cut is a part, also if it is empty.
        return [*parts, b""] if separator is None and len(parts) == maxsplit else parts

    return _cut(input, parts_of)


def lower(input: Any, encoding: str = "", name: str | None = None) -> StringTensor:
    """TF: `tf.strings.lower`."""
    return _texts(_recased(str.lower, bytes.lower, encoding), input)


def upper(input: Any, encoding: str = "", name: str | None = None) -> StringTensor:
    """TF: `tf.strings.upper`."""
    return _texts(_recased(str.upper, bytes.upper, encoding), input)


def _recased(
    of_text: Callable[[str], str], of_bytes: Callable[[bytes], bytes], encoding: str
) -> Callable[[bytes], bytes]:
    if encoding == "":
        return of_bytes  # ASCII letters only
    return lambda item: of_text(item.decode(encoding)).encode(encoding)


def strip(input: Any, name: str | None = None) -> StringTensor:
    """TF: `tf.strings.strip`."""
    return _texts(bytes.strip, input)


def length(input: Any, unit: str = "BYTE", name: str | None = None) -> Any:
    """Counts bytes, or characters where `unit` is "UTF8_CHAR". TF: `tf.strings.length`."""
    count = len if _counts_bytes(unit) else lambda item: len(item.decode(errors="replace"))
    return _numbers(count, input, dtypes.int32)


def _counts_bytes(unit: str) -> bool:
    if unit not in ("BYTE", "UTF8_CHAR"):
        raise ValueError(f"Expected the unit BYTE or UTF8_CHAR. Received: {unit!r}")
    return unit == "BYTE"


def substr(
    input: Any, pos: Any, len: Any, unit: str = "BYTE", name: str | None = None
) -> StringTensor:
    """Returns `len` bytes or characters from `pos` on; a negative `pos` counts from the end.

    Raises:
        InvalidArgumentError: `pos` lies outside a string.

    TF: `tf.strings.substr`.
    """
    in_bytes = _counts_bytes(unit)
    strings, starts, lengths = np.broadcast_arrays(
        StringTensor(input).view(np.ndarray), np.asarray(pos), np.asarray(len)
    )

    def part(item: bytes, start: int, length: int) -> bytes:
        text: Any = item if in_bytes else item.decode()
        if not -text.__len__() <= start <= text.__len__():
            raise InvalidArgumentError(
                message=f"tf.strings.substr: pos {start} out of range for string {item!r}"
            )
        start = start + text.__len__() if start < 0 else start
        cut = text[start : start + length]
        return cut if in_bytes else cut.encode()

    return StringTensor(np.frompyfunc(part, 3, 1)(strings, starts, lengths))


def regex_replace(
    input: Any, pattern: str, rewrite: str, replace_global: bool = True, name: str | None = None
) -> StringTensor:
    r"""Replaces the matches; `\1` in `rewrite` is the first group.

    TF: `tf.strings.regex_replace`.
    """
    compiled = re.compile(text_of(pattern).encode())
    # RE2's \0 is the whole match.
    replacement = re.sub(rb"\\0", rb"\\g<0>", text_of(rewrite).encode())
    count = 0 if replace_global else 1
    return _texts(lambda item: compiled.sub(replacement, item, count), input)


def regex_full_match(input: Any, pattern: str, name: str | None = None) -> Any:
    """Whether the whole string matches. TF: `tf.strings.regex_full_match`."""
    compiled = re.compile(text_of(pattern).encode())
    return _numbers(lambda item: compiled.fullmatch(item) is not None, input, dtypes.bool)


def to_number(input: Any, out_type: Any = dtypes.float32, name: str | None = None) -> Any:
    """Returns the numbers that strings write.

    Raises:
        InvalidArgumentError: A string writes none of this dtype.

    TF: `tf.strings.to_number`.
    """
    convert = int if dtypes.as_dtype(out_type).is_integer else float

    def number(item: bytes) -> Any:
        try:
            return convert(item)
        except ValueError as error:
            raise InvalidArgumentError(
                message=f"StringToNumberOp could not correctly convert string: {item.decode()}"
            ) from error

    return _numbers(number, input, out_type)


def as_string(
    input: Any,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> StringTensor:
    """Writes numbers as C's `printf` does: `%d`, `%f`, or `%e` and `%g` where asked.

    TF: `tf.strings.as_string`.
    """
    tensor = convert_to_tensor(input)
    if isinstance(tensor, StringTensor):
        return tensor
    letter = "e" if scientific else "g" if shortest else "f"
    digits = "" if precision < 0 else f".{precision}"
    room = "" if width < 0 else f"{fill}{width}"

    def written(number: Any) -> str:
        if isinstance(number, bool | np.bool_):
            return "true" if number else "false"
        if isinstance(number, complex | np.complexfloating):
            return f"({written(number.real)},{written(number.imag)})"
        if isinstance(number, int | np.integer):
            return f"%{room}d" % number
        return f"%{room}{digits}{letter}" % number

    array = np.asarray(tensor)
    return StringTensor(np.reshape([written(item) for item in array.ravel()], array.shape))


def format(
    template: str,
    inputs: Any,
    placeholder: str = "{}",
    summarize: int = 3,
    name: str | None = None,
) -> StringTensor:
    """Puts tensors, written as `tf.print` writes them, into the places of a template.

    Raises:
        ValueError: There are not as many inputs as places.

    TF: `tf.strings.format`.
    """
    values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    pieces = text_of(template).split(placeholder)
    if len(pieces) != len(values) + 1:
        raise ValueError(
            f"{len(pieces) - 1} placeholder(s) in template does not match {len(values)} tensor(s) "
            "provided as input"
        )
    texts = [*(str(shown(convert_to_tensor(value), summarize)) for value in values), ""]
    return StringTensor("".join(part for pair in zip(pieces, texts, strict=True) for part in pair))


def to_hash_bucket_fast(input: Any, num_buckets: int, name: str | None = None) -> Any:
    """Puts strings into buckets, by TensorFlow's fingerprint of them.

    Examples:
        >>> to_hash_bucket_fast(["Hello", "TensorFlow"], 3).tolist()
        [0, 2]

    TF: `tf.strings.to_hash_bucket_fast`.
    """
    return _numbers(lambda item: fingerprint64(item) % num_buckets, input, dtypes.int64)


def reduce_join(
    inputs: Any,
    axis: Any = None,
    keepdims: bool = False,
    separator: str = "",
    name: str | None = None,
) -> StringTensor:
    """Joins the strings along an axis, several one after the other, or all.

    TF: `tf.strings.reduce_join`.
    """
    strings = StringTensor(inputs).view(np.ndarray)
    joint = text_of(separator).encode()
    chosen = range(strings.ndim) if axis is None else np.atleast_1d(np.asarray(axis)).tolist()
    order = [index % strings.ndim for index in chosen]
    kept = [index for index in range(strings.ndim) if index not in order]
    rows = strings.transpose([*kept, *order]).reshape((*(strings.shape[i] for i in kept), -1))
    joined = np.empty(rows.shape[:-1], dtype=object)
    for place in np.ndindex(joined.shape):
        joined[place] = joint.join(rows[place])
    if keepdims:
        joined = joined.reshape([1 if i in order else n for i, n in enumerate(strings.shape)])
    return StringTensor(joined)


def unsorted_segment_join(
    inputs: Any, segment_ids: Any, num_segments: Any, separator: str = "", name: str | None = None
) -> StringTensor:
    """Joins the strings of every segment. TF: `tf.strings.unsorted_segment_join`."""
    strings, ids = StringTensor(inputs).view(np.ndarray), np.asarray(segment_ids)
    joint = text_of(separator).encode()
    return StringTensor([joint.join(strings[ids == index]) for index in range(int(num_segments))])


def bytes_split(input: Any, name: str | None = None) -> Any:
    """Cuts a string into its bytes; several, into a ragged tensor.

    TF: `tf.strings.bytes_split`.
    """
    return _cut(input, lambda item: [bytes([byte]) for byte in item])


def unicode_split(
    input: Any,
    input_encoding: str,
    errors: str = "replace",
    replacement_char: int = 65533,
    name: str | None = None,
) -> Any:
    """Cuts a string into its characters; several, into a ragged tensor.

    TF: `tf.strings.unicode_split`.
    """

    def characters(item: bytes) -> list[bytes]:
        return [
            character.encode(input_encoding) for character in item.decode(input_encoding, errors)
        ]

    return _cut(input, characters)


def _cut(value: Any, parts_of: Callable[[bytes], list[bytes]]) -> Any:
    """Returns the parts of a string; of several, as rows of a ragged tensor."""
    strings = StringTensor(value)
    rows = [parts_of(item) for item in strings.view(np.ndarray).flat]
    if strings.ndim == 0:
        return StringTensor(rows[0])
    flat = StringTensor([part for row in rows for part in row])
    return _ragged(flat, list(map(len, rows)), strings.shape)


def _ragged(flat: Any, lengths: list[int], shape: tuple[int, ...]) -> Any:
    """Returns rows of these lengths for every element of a tensor of a shape."""
    return RaggedTensor.of_uniform_axes(flat, lengths, shape)


def unicode_decode(
    input: Any,
    input_encoding: str,
    errors: str = "replace",
    replacement_char: int = 65533,
    replace_control_characters: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the code points of a string; of several, a ragged tensor.

    TF: `tf.strings.unicode_decode`.
    """
    strings = StringTensor(input)
    rows = [
        [ord(character) for character in item.decode(input_encoding, errors)]
        for item in strings.view(np.ndarray).flat
    ]
    codes = convert_to_tensor(np.array([code for row in rows for code in row], np.int32))
    return codes if strings.ndim == 0 else _ragged(codes, list(map(len, rows)), strings.shape)


def unicode_encode(
    input: Any,
    output_encoding: str,
    errors: str = "replace",
    replacement_char: int = 65533,
    name: str | None = None,
) -> StringTensor:
    """Returns the string of the code points in the last axis. TF: `tf.strings.unicode_encode`."""
    codes = np.asarray(convert_to_tensor(input))
    texts = np.empty(codes.shape[:-1], dtype=object)
    for place in np.ndindex(texts.shape):
        texts[place] = "".join(map(chr, codes[place])).encode(output_encoding)
    return StringTensor(texts)


def unicode_transcode(
    input: Any,
    input_encoding: str,
    output_encoding: str,
    errors: str = "replace",
    replacement_char: int = 65533,
    replace_control_characters: bool = False,
    name: str | None = None,
) -> StringTensor:
    """TF: `tf.strings.unicode_transcode`."""
    return _texts(lambda item: item.decode(input_encoding, errors).encode(output_encoding), input)


def ngrams(
    data: Any,
    ngram_width: Any,
    separator: str = " ",
    pad_values: Any = None,
    padding_width: int | None = None,
    preserve_short_sequences: bool = False,
    name: str | None = None,
) -> StringTensor:
    """Joins every `ngram_width` neighbours of the last axis. TF: `tf.strings.ngrams`.

    Raises:
        ValueError: `pad_values` is given: pad the data before.
    """
    if pad_values is not None:
        raise ValueError("tf.strings.ngrams takes no pad_values in Unison: pad the data before.")
    strings = StringTensor(data).view(np.ndarray)
    joint = text_of(separator).encode()
    widths = [ngram_width] if isinstance(ngram_width, int) else list(ngram_width)
    if preserve_short_sequences and strings.shape[-1] < min(widths):
        widths = [strings.shape[-1]]

    def of_one(row: np.ndarray) -> list[bytes]:
        return [
            joint.join(row[start : start + width])
            for width in widths
            for start in range(len(row) - width + 1)
        ]

    if strings.ndim == 1:
        return StringTensor(of_one(strings))
    rows = [of_one(row) for row in strings.reshape(-1, strings.shape[-1])]
    return StringTensor(_rows(rows, "tf.strings.ngrams").reshape((*strings.shape[:-1], -1)))


dispatch_on_ragged(globals())
