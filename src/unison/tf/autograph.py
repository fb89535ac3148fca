"""`tf.autograph`: Python's control flow over tensors in compiled functions; see `unison.autograph`.

Functions run as they are written until Python wants a value that only the compiled program has: in
an `if`, a `while`, a `for` over `tf.range(n)`. They are converted then, like TensorFlow's.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any

from unison.autograph.directives import set_loop_options
from unison.conversion import called, converting
from unison.tf.missing import names_missing_from, namespace

__getattr__ = names_missing_from(__name__)


def _do_not_convert(func: Callable[..., Any] | None = None) -> Any:
    """Returns the function as one that is never converted, and nothing that it calls.

    >>> experimental.do_not_convert(len)([1, 2])
    2

    TF: `tf.autograph.experimental.do_not_convert`.
    """
    if func is None:
        return _do_not_convert

    @functools.wraps(func)
    def as_written(*args: Any, **kwargs: Any) -> Any:
        with converting(False):
            return func(*args, **kwargs)

    return as_written


def to_graph(entity: Callable[..., Any], recursive: bool = True, **options: Any) -> Any:
    """Returns the function as converted, whether or not Python wants the value of a tensor in it.

    Args:
        entity: A function.
        recursive: Without effect: what it calls is converted, too.
        options: `experimental_optional_features=`; without effect.

    TF: `tf.autograph.to_graph`.
    """

    @functools.wraps(entity)
    def converted(*args: Any, **kwargs: Any) -> Any:
        with converting():
            return called(entity, *args, **kwargs)

    return converted


def set_verbosity(level: int, alsologtostdout: bool = False) -> None:
    """Has no effect. TF: `tf.autograph.set_verbosity`."""


def trace(*args: Any) -> None:
    """Prints when the function is traced. TF: `tf.autograph.trace`."""
    builtins.print(*args)


experimental = namespace(
    "unison.tf.autograph.experimental",
    do_not_convert=_do_not_convert,
    set_loop_options=set_loop_options,
)
