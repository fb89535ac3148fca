"""Errors for Python control flow in compiled functions that depends on an array."""

from __future__ import annotations

import os
import traceback

import jax

#: The errors that JAX raises if Python needs a value that exists only when the program runs.
VALUE_WANTED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ControlFlowError(TypeError):
    """Python's `if`, `while`, `range()` or indexing depends on an array of a compiled function."""

    def __init__(self, error: BaseException):
        super().__init__(
            f"{_place_of(error)}: Python needs the value of an array here (in an `if`, `while`, "
            "`range()`, `int()`, NumPy function or list index), but the function is compiled, and "
            "the value is known only when it runs. Use tf.cond / jax.lax.cond or tf.where for a "
            "choice, tf.while_loop / jax.lax.fori_loop for a loop, or compute the value outside "
            "strategy.run and pass it as a Python number that the function closes over."
        )


def _place_of(error: BaseException) -> str:
    """Returns file, line number and text of the innermost line of user code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not own:
        return "In a function that strategy.run calls"
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno}, `{(frame.line or '').strip()}`"


def _is_library(filename: str) -> bool:
    return filename.startswith(_PACKAGE + os.sep) or "site-packages" in filename
