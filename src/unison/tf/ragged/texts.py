"""Operations on ragged tensors of strings that change the number of strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unison.tf.ragged.arrays import axis_of
from unison.tf.ragged.partitions import splits_of_lengths
from unison.tf.ragged.rows import around, implements
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.text import StringTensor


@implements(
    "tf.strings.split",
    "tf.strings.bytes_split",
    "tf.strings.unicode_split",
    "tf.strings.unicode_decode",
)
def cut(operation: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> RaggedTensor:
    """Cuts every string of a ragged tensor into parts."""
    parts = operation(input.flat, *args, **kwargs)
    return within(input, parts)


def within(ragged: RaggedTensor, values: Any) -> RaggedTensor:
    """Returns the rows of a ragged tensor with other values, maybe ragged ones, as many."""
    pairs = zip(reversed(ragged.partitions), reversed(ragged.uniform_lengths), strict=True)
    for splits, uniform in pairs:
        values = around(values, splits, uniform)
    return values


@implements("tf.strings.ngrams")
def ngrams(operation: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> RaggedTensor:
    """Joins neighbours in every innermost row."""
    inner = _innermost(data, "tf.strings.ngrams")
    splits = inner.partitions[0]
    rows = [
        operation(inner.flat[start:end], *args, **kwargs)
        for start, end in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True)
    ]
    flat = StringTensor([part for row in rows for part in row.numpy()])
    lengths = np.array(list(map(len, rows)), splits.dtype)
    return _around_all_but_last(data, around(flat, splits_of_lengths(lengths)))


def _innermost(data: Any, what: str) -> Any:
    inner = data
    while is_ragged(inner.inner):
        inner = inner.inner
    if inner.flat.ndim > 1:
        raise ValueError(f"{what} of a RaggedTensor needs its last axis to be ragged.")
    return inner


def _around_all_but_last(data: RaggedTensor, values: Any) -> Any:
    pairs = zip(data.partitions[:-1], data.uniform_lengths[:-1], strict=True)
    for splits, uniform in reversed(list(pairs)):
        values = around(values, splits, uniform)
    return values


def _of_innermost_rows(data: Any, what: str, function: Callable[[Any], Any]) -> Any:
    """Returns a string for every innermost row."""
    inner = _innermost(data, what)
    splits = inner.partitions[0]
    values = np.empty(len(splits) - 1, object)
    bounds = zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True)
    values[:] = [function(inner.flat[start:end]).item() for start, end in bounds]
    return _around_all_but_last(data, StringTensor(values))


@implements("tf.strings.reduce_join")
def reduce_join(
    operation: Callable[..., Any],
    inputs: Any,
    axis: Any = None,
    keepdims: bool = False,
    separator: str = "",
    name: str | None = None,
) -> Any:
    """Joins the strings of every innermost row, or all."""
    if axis is None:
        return operation(inputs.flat, None, False, separator)
    if axis_of(axis, inputs.rank) != inputs.ragged_rank or keepdims:
        raise ValueError(
            "tf.strings.reduce_join of a RaggedTensor joins along its last axis, without "
            f"keepdims, in Unison. Received: axis={axis}, keepdims={keepdims}"
        )
    return _of_innermost_rows(
        inputs, "tf.strings.reduce_join", lambda row: operation(row, -1, False, separator)
    )


@implements("tf.strings.unicode_encode")
def unicode_encode(
    operation: Callable[..., Any], input: Any, output_encoding: str, *args: Any, **kwargs: Any
) -> Any:
    """Returns the string of the code points of every innermost row."""
    return _of_innermost_rows(
        input,
        "tf.strings.unicode_encode",
        lambda row: operation(row, output_encoding, *args, **kwargs),
    )


@implements("tf.strings.format")
def format_(
    operation: Callable[..., Any], template: str, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Puts tensors, of which some are ragged, into the places of a template."""
    values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    written = [
        repr(value).removeprefix("<tf.RaggedTensor ").removesuffix(">")
        if is_ragged(value)
        else value
        for value in values
    ]
    return operation(template, written, *args, **kwargs)
