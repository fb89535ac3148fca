"""`tf.autograph`: the interface of TensorFlow's compiler of Python, which does not exist here.

Functions run as they are written. Where Python's `if` or `while` meets a value that only the
compiled program knows, `tf.function` runs the function step by step, and says so.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from unison.tf.missing import names_missing_from, namespace

__getattr__ = names_missing_from(__name__)


def _do_not_convert(func: Callable[..., Any] | None = None) -> Any:
    """Returns the function: nothing is converted. TF: `tf.autograph.experimental.do_not_convert`.

    >>> experimental.do_not_convert(len)([1, 2])
    2
    """
    return (lambda function: function) if func is None else func


def _set_loop_options(
    parallel_iterations: Any = None,
    swap_memory: Any = None,
    maximum_iterations: Any = None,
    shape_invariants: Any = None,
) -> None:
    """Has no effect: loops are Python's. TF: `tf.autograph.experimental.set_loop_options`."""


def set_verbosity(level: int, alsologtostdout: bool = False) -> None:
    """Has no effect. TF: `tf.autograph.set_verbosity`."""


def trace(*args: Any) -> None:
    """Prints when the function is traced. TF: `tf.autograph.trace`."""
    builtins.print(*args)


experimental = namespace(
    "unison.tf.autograph.experimental",
    do_not_convert=_do_not_convert,
    set_loop_options=_set_loop_options,
)
