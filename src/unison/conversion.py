"""Calls of the functions that users give to compiled programs, converted where they need it.

A program's functions are traced as they are. Only where Python needs the value of an array (in an
`if`, a `while`, a `for` over `range(n)`), which exists when the program runs, the trace is made
again, with the functions converted: see `unison.autograph`.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from unison.thread_local import ThreadLocal

#: Whether the thread traces functions that are converted.
_is_converting = ThreadLocal(False)

#: Whether the thread's traces may be made again with converted functions.
_may_convert = ThreadLocal(True)

#: Calls a function as converted, given its arguments; `unison.hooks` registers it.
_call_converted: list[Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]] = []

#: The packages whose functions do without Python's control flow over arrays: those that Unison is
#: made of, and Python's own.
_LIBRARIES = frozenset(
    {"unison", "jax", "jaxlib", "keras", "numpy", "optax", "flax", "equinox", "malt"}
    | set(sys.stdlib_module_names) - {"__main__"}
)

#: The reasons for which functions could not be converted, by their code.
refused: MutableMapping[types.CodeType, str] = weakref.WeakKeyDictionary()

#: Contexts that other modules add around calls of what is not converted, such as Keras' layers.
contexts_of_calls: list[Callable[[Any], AbstractContextManager[Any]]] = []


def is_of_a_library(module: str | None) -> bool:
    """Whether a module is not the user's: its functions are not converted.

    Examples:
        >>> is_of_a_library("keras.layers"), is_of_a_library("__main__")
        (True, False)
    """
    return str(module).partition(".")[0] in _LIBRARIES


def convert_by(call: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]) -> None:
    """Registers what calls a function as converted."""
    _call_converted[:] = [call]


class Refusal(BaseException):
    """An error out of a branch or a loop that is being traced.

    Python would only meet it on the way that it takes, and the trace takes every way. So it is not
    an `Exception`, which the user's function might take for its own; `converting` makes it one.

    Args:
        error: The error.
    """

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


def may_convert() -> bool:
    """Whether a trace of this thread may be made again with converted functions."""
    return _may_convert.value and not _is_converting.value


def allowing(conversion: bool) -> AbstractContextManager[bool]:
    """Context manager in which traces may be made again with converted functions, or not."""
    return _may_convert.bound_to(conversion)


def is_converting() -> bool:
    """Whether this thread traces functions that are converted."""
    return _is_converting.value


@contextlib.contextmanager
def converting(enabled: bool = True) -> Iterator[None]:
    """Context manager in which `called` converts functions, or does not."""
    is_outermost = not _is_converting.value
    try:
        with _is_converting.bound_to(enabled):
            yield
    except Refusal as refusal:
        if is_outermost:
            raise refusal.error from refusal.error.__cause__
        raise


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`; inside `converting`, of the converted function."""
    if not _is_converting.value:
        return function(*args, **kwargs)
    return _call_converted[0](function, args, kwargs)
