"""Python's control flow over arrays in compiled functions, which is converted or an error."""

from __future__ import annotations

import os
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from unison import conversion
from unison.cells import has_cell
from unison.thread_local import ThreadLocal

T = TypeVar("T")

#: The errors that JAX raises if Python needs a value that exists only when the program runs.
VALUE_WANTED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

#: The errors of the present trace that were raised in users' functions; None: nobody looks.
_raised: ThreadLocal[list[Exception] | None] = ThreadLocal(None)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class ControlFlowError(TypeError):
    """Python's `if`, `while`, `range()` or indexing depends on an array of a compiled function."""


def value_wanted(error: BaseException) -> ControlFlowError:
    """Returns an error that names the line where JAX's error was raised, and the remedy."""
    return ControlFlowError(f"{_place_of(error)}: {_GENERAL}{_unconverted(error)}")


_GENERAL = (
    "Python needs the value of an array here (in an `if`, `while`, `range()`, `int()`, NumPy "
    "function or list index), but the function is compiled, and the value is known only when it "
    "runs. Use tf.cond / jax.lax.cond or tf.where for a choice, tf.while_loop / "
    "jax.lax.fori_loop for a loop, or compute the value outside strategy.run and pass it as a "
    "Python number that the function closes over."
)


def note_raised(error: Exception, frame: types.FrameType | None) -> None:
    """Notes that Python has wanted a value, so that a user's `except` does not hide it.

    Args:
        error: The error that is about to be raised.
        frame: What raises it. Only errors of the user's own statements count: libraries try what
            they can do with a value.
    """
    errors = _raised.value
    while errors is not None and frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("jax", "jaxlib"):
            if not _is_library(frame.f_code.co_filename):
                errors.append(error)
            return
        frame = frame.f_back


def raising_caught(trace: Callable[[], T]) -> T:
    """Returns `trace()`; raises the error that a function of the user's has caught, if it has.

    The function could not tell it from an error of its own: TensorFlow's AutoGraph raises none.
    """
    with _raised.bound_to([]) as errors:
        result = trace()
    if errors:
        raise errors[0]
    return result


def converted(trace: Callable[[], T], first: BaseException) -> T:
    """Returns `trace()`, in which users' functions are converted.

    Args:
        trace: Traces functions that are called by `conversion.called`.
        first: The error of the trace without that.

    Raises:
        ControlFlowError: That is not enough.
    """
    if not conversion.may_convert():
        raise value_wanted(first) from first
    try:
        with conversion.converting():
            return raising_caught(trace)
    except VALUE_WANTED as error:
        raise value_wanted(error) from first


def converted_if_needed(trace: Callable[[], T]) -> T:
    """Returns `trace()`; see `converted`, which is used where Python needs a value."""
    try:
        return raising_caught(trace)
    except VALUE_WANTED as error:
        return converted(trace, error)


def known_truth(value: Any) -> bool | None:
    """Returns the truth of a value; None where the program that is being traced computes it."""
    if isinstance(value, bool):
        return value
    try:
        return bool(value.value() if has_cell(value) else value)
    except VALUE_WANTED:
        return None


def _unconverted(error: BaseException) -> str:
    """Returns the reasons for which functions that an error passed were not converted."""
    frames = traceback.walk_tb(error.__traceback__)
    reasons = {frame.f_code: conversion.refused.get(frame.f_code) for frame, _ in frames}
    return "".join(
        f" ({code.co_name} has not been converted: {reason})"
        for code, reason in reasons.items()
        if reason
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
