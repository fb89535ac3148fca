"""`tf.print`: also from inside a replica program, where every replica prints its own line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

import jax
import numpy as np

from unison.runtime.private_jax import nothing_is_traced
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.tensors import is_variable
from unison.tf.text import StringTensor


def print(
    *inputs: Any,
    output_stream: TextIO | str | None = None,
    end: str = "\n",
    sep: str = " ",
    summarize: int = 3,
    name: str | None = None,
) -> None:
    """Prints tensors, numbers, strings and nests of them, as TensorFlow prints them.

    Inside `strategy.run` (and `jax.jit`) the values are printed when the program runs, once by
    every replica. The lines of different replicas may interleave, and a line may come a moment
    after the call has returned; `jax.effects_barrier()` waits for all.

    Args:
        inputs: What to print.
        output_stream: A text stream, or "file://" and the path of a file to append to. Default:
            standard error, as in TensorFlow.
        end: Printed after the last input.
        sep: Printed between inputs.
        summarize: The number of elements at either end of each axis that are printed; -1 prints
            all.
        name: Without effect.

    Raises:
        ValueError: `output_stream` is neither.

    TF: `tf.print`.
    """
    if isinstance(output_stream, str):
        writes = _appending_to(output_stream)
    elif output_stream is None or hasattr(output_stream, "write"):
        writes = _streaming_to(output_stream)
    else:
        raise ValueError(
            "output_stream must be a text stream such as sys.stdout, or 'file://' and a path. "
            f"Received: {output_stream!r}"
        )
    leaves, structure = jax.tree.flatten([_printable(value) for value in inputs])
    is_traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]

    def write(*traced: Any) -> None:
        values = iter(traced)
        filled = [
            next(values) if comes_later else leaf
            for comes_later, leaf in zip(is_traced, leaves, strict=True)
        ]
        texts = jax.tree.unflatten(structure, [shown(leaf, summarize) for leaf in filled])
        # One write a line: replicas print from threads of their own.
        writes(sep.join(map(str, texts)) + end)

    if any(is_traced) or not nothing_is_traced():  # also what a compiled program always prints
        jax.debug.callback(write, *(leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)))
    else:
        write()


def _streaming_to(stream: TextIO | None) -> Callable[[str], None]:
    def write(text: str) -> None:
        chosen = sys.stderr if stream is None else stream
        chosen.write(text)
        chosen.flush()

    return write


def _appending_to(address: str) -> Callable[[str], None]:
    if not address.startswith("file://"):
        raise ValueError(f"output_stream must be 'file://' and a path. Received: {address!r}")

    def write(text: str) -> None:
        with open(address.removeprefix("file://"), "a", encoding="utf-8") as file:
            file.write(text)

    return write


def _printable(value: Any) -> Any:
    return jax.tree.map(_value, value) if isinstance(value, list | tuple | dict) else _value(value)


def _value(leaf: Any) -> Any:
    return leaf.__jax_array__() if is_variable(leaf) else leaf


class Shown:
    """Text whose `repr` has no quotes, so that tensors can be shown inside nests."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def shown(leaf: Any, summarize: int) -> Any:
    """Returns a tensor as `tf.print` writes it; other values unchanged."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    array = leaf.numpy() if isinstance(leaf, StringTensor) else np.asarray(leaf)
    if isinstance(array, bytes):
        return Shown(_number(array))
    if array.ndim == 0:
        return Shown(_number(array[()]))
    shows_all = summarize < 0
    text = np.array2string(
        array,
        formatter={"all": _number},
        max_line_width=sys.maxsize,
        threshold=sys.maxsize if shows_all else 0,
        edgeitems=max(summarize, 1),
    )
    # NumPy writes "[0 1 ... 8 9]" for one axis and aligns the rows of more.
    return Shown(text)


def _number(value: Any) -> str:
    """Writes a number as TensorFlow does: `1` for 1.0, else the digits that are needed."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, bytes):
        return f'"{value.decode(errors="replace")}"'
    if not np.issubdtype(type(value), np.floating):
        return str(value)
    is_double = np.dtype(type(value)).itemsize == 8
    few, enough = (15, 17) if is_double else (6, 9)
    short = f"{float(value):.{few}g}"
    return short if type(value)(short) == value else f"{float(value):.{enough}g}"


dispatch_on_ragged(globals(), ["print"])
