"""`tf.print`: also from inside a replica program, where every replica prints its own line."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import jax
import numpy as np

from unison.tf.tensors import operand


def print(
    *inputs: Any,
    output_stream: TextIO | None = None,
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
        output_stream: A text stream. Default: standard error, as in TensorFlow.
        end: Printed after the last input.
        sep: Printed between inputs.
        summarize: How many elements to show at either end of each axis; -1 shows all.
        name: Without effect.

    Raises:
        ValueError: `output_stream` is no text stream.

    TF: `tf.print`.
    """
    del name
    if output_stream is not None and not hasattr(output_stream, "write"):
        raise ValueError(
            f"output_stream must be a text stream such as sys.stdout. Received: {output_stream!r}"
        )
    leaves, structure = jax.tree.flatten([_printable(value) for value in inputs])
    is_traced = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]

    def write(*traced: Any) -> None:
        values = iter(traced)
        filled = [
            next(values) if comes_later else leaf
            for comes_later, leaf in zip(is_traced, leaves, strict=True)
        ]
        shown = jax.tree.unflatten(structure, [_shown(leaf, summarize) for leaf in filled])
        stream = output_stream or sys.stderr
        # One write a line: replicas print from threads of their own.
        stream.write(sep.join(map(str, shown)) + end)
        stream.flush()

    if any(is_traced):
        jax.debug.callback(write, *(leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)))
    else:
        write()


def _printable(value: Any) -> Any:
    is_nest = isinstance(value, list | tuple | dict)
    return jax.tree.map(operand, value) if is_nest else operand(value)


class _Shown:
    """Text whose `repr` has no quotes, so that tensors can be shown inside nests."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(leaf: Any, summarize: int) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    array = np.asarray(leaf)
    if array.ndim == 0:
        return _Shown(_number(array[()]))
    shows_all = summarize < 0
    text = np.array2string(
        array,
        formatter={"all": _number},
        max_line_width=sys.maxsize,
        threshold=sys.maxsize if shows_all else 0,
        edgeitems=max(summarize, 1),
    )
    # NumPy writes "[0 1 ... 8 9]" for one axis and aligns the rows of more.
    return _Shown(text)


def _number(value: Any) -> str:
    """Writes a number as TensorFlow does: `1` for 1.0, else the digits that are needed."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if not np.issubdtype(type(value), np.floating):
        return str(value)
    is_double = np.dtype(type(value)).itemsize == 8
    few, enough = (15, 17) if is_double else (6, 9)
    short = f"{float(value):.{few}g}"
    return short if type(value)(short) == value else f"{float(value):.{enough}g}"
