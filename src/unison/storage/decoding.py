"""Decoding files: invalid bytes raise one kind of error, and sizes are checked before use.

A decoder checks the values that it reads by `whole_number`, `dtype_named` and similar functions,
inside `decoding`, which converts unforeseen errors to a `DataLossError`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from unison.errors import DataLossError, OpError
from unison.interrupts import is_of_a_signal_handler

#: The maximum length of an invalid value in a message.
_SHOWN = 300

_MOST = 2**63 - 1

#: NumPy's maximum number of items of an array, some of whose axes may have the size 0.
MOST_ITEMS = 2**58

#: The maximum number of fields of a named tuple.
_MOST_FIELDS = 1000

#: `<f4`, `bfloat16`, `|S5`, `<M8[25us]`.
_DTYPE = re.compile(r"[<>=|]?[A-Za-z][A-Za-z0-9_]{0,24}(\[\w{1,8}\])?")

_NUMBERS = "biufc"


@contextlib.contextmanager
def decoding(where: str, remedy: str = "") -> Iterator[None]:
    """Inside, the errors of invalid bytes become one that names the file.

    Args:
        where: The source, usually the file's path.
        remedy: What the user can do, as a sentence.

    Raises:
        DataLossError: The block has raised an error other than those of `unison.errors`, of
            a missing package, of too little memory, or of a signal handler.

    Examples:
        >>> with decoding("state", "Remove it to begin from the start."):
        ...     {"step": 3}["epoch"]
        Traceback (most recent call last):
        unison.errors.DataLossError: state is corrupt: 'epoch' is missing. Remove it to begin ...
    """
    try:
        yield
    except (OpError, ImportError, MemoryError):
        raise
    except Exception as error:
        if is_of_a_signal_handler(error):
            raise
        raise corrupt(where, _reason(error), remedy) from error


def corrupt(where: str, reason: str, remedy: str = "") -> DataLossError:
    """Returns the error of a corrupt file."""
    reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}..."
    return DataLossError(message=f"{where} is corrupt: {reason}. {remedy}".rstrip())


def raised_by(error: Exception, *packages: str) -> bool:
    """Whether an error was raised in the code of some packages, and not in what it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in packages


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{str(error)[:_SHOWN]} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    is_plain = type(error) in (ValueError, EOFError) and error.args
    return str(error).rstrip(".") if is_plain else f"{type(error).__name__}: {error}".rstrip(": .")


def parsed_json(text: bytes | str) -> Any:
    """Returns the content of JSON text.

    Raises:
        ValueError: It is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None


def whole_number(value: object, least: int = 0, most: int = _MOST) -> int:
    """Returns a decoded value, if it is an integer within bounds.

    Raises:
        ValueError: It is something else: `True` and `2.0` are not integers here.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"expected a whole number from {least} to {most}, received {_shown(value)}"
        )
    return value


def real_number(value: object, least: float = -math.inf, most: float = math.inf) -> float:
    """Returns a decoded value, if it is a finite number within bounds.

    Raises:
        ValueError: It is something else.
    """
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer too large for a float
            number = float(value)
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"expected a number from {least} to {most}, received {_shown(value)}")
    return number


def plain_text(value: object) -> str:
    """Returns a decoded value, if it is text. Raises: ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"expected text, received {_shown(value)}")
    return value


def plain_bool(value: object) -> bool:
    """Returns a decoded value, if it is True or False. Raises: ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"expected True or False, received {_shown(value)}")
    return value


def plain_list(value: object, length: int | None = None) -> list[Any]:
    """Returns a decoded value, if it is a list of the given length. Raises: ValueError."""
    if not isinstance(value, list) or length not in (None, len(value)):
        what = "a list" if length is None else f"a list of {length} items"
        raise ValueError(f"expected {what}, received {_shown(value)}")
    return value


def plain_dict(value: object) -> dict[str, Any]:
    """Returns a decoded value, if it is a dictionary. Raises: ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a dictionary, received {_shown(value)}")
    return value


def named_tuple(name: object, fields: object) -> type:
    """Returns a class of named tuples: the same one for the same arguments.

    Args:
        name: Its decoded name.
        fields: The decoded names of its fields.

    Raises:
        ValueError: They are not valid names, or too many.
    """
    names = tuple(plain_text(field) for field in plain_list(fields))
    if len(names) > _MOST_FIELDS:
        raise ValueError(f"expected at most {_MOST_FIELDS} fields, received {len(names)}")
    return _named_tuple(plain_text(name), names)


@functools.lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    return collections.namedtuple(name, fields)


def shape_of(value: object) -> tuple[int, ...]:
    """Returns a decoded value, if it is the shape of an array. Raises: ValueError."""
    if not isinstance(value, list | tuple) or len(value) > 64:  # NumPy's maximum number of axes
        raise ValueError(f"expected the shape of an array, received {_shown(value)}")
    shape = tuple(whole_number(size) for size in value)
    if math.prod(filter(None, shape)) > MOST_ITEMS:
        raise ValueError(f"no array has the shape {_shown(shape)}")
    return shape


def bytes_of(shape: Sequence[int], dtype: np.dtype) -> int:
    """Returns the number of bytes of an array, without overflow."""
    return math.prod(shape) * dtype.itemsize


def dtype_named(name: object, kinds: str = _NUMBERS) -> np.dtype:
    """Returns the dtype of a decoded name.

    Args:
        name: A name or a code of NumPy's, or a name of one of JAX's additional dtypes.
        kinds: NumPy's letters of the allowed kinds. JAX's dtypes are always allowed.

    Raises:
        ValueError: The name is unknown, or of another kind: objects and structures
            are not arrays of numbers.

    Examples:
        >>> dtype_named("<f4"), dtype_named("bfloat16")
        (dtype('float32'), dtype(bfloat16))
    """
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise ValueError(f"expected the name of a dtype, received {_shown(name)}")
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ValueError(f"there is no dtype {name!r}") from None
    if not is_jaxs_own(dtype) and (
        dtype.kind not in kinds or dtype.names is not None or dtype.subdtype
    ):
        raise ValueError(f"expected the dtype of numbers, received {name!r}")
    return dtype


def name_of_dtype(dtype: np.dtype) -> str:
    """Returns a dtype's name for `dtype_named`."""
    # In NumPy's own notation, JAX's additional dtypes are bytes without a meaning, or unknown.
    return dtype.name if is_jaxs_own(dtype) else dtype.str


def is_jaxs_own(dtype: np.dtype) -> bool:
    """Whether a dtype is one of JAX's additional ones, such as bfloat16."""
    return dtype.type.__module__ == ml_dtypes.__name__


def _shown(value: object) -> str:
    text = repr(value)[:_SHOWN]
    return text if len(text) < 80 else f"{text[:80]}..."
