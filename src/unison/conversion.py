"""Calls of the functions that users give to compiled programs, converted where they need it.

A program's functions are traced as they are. Only where Python needs the value of an array (in an
`if`, a `while`, a `for` over `range(n)`), which exists when the program runs, the trace is made
again, with the functions converted: see `unison.autograph`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from unison.thread_local import ThreadLocal

#: Whether the thread traces functions that are converted.
_is_converting = ThreadLocal(False)

#: Calls a function as converted, given its arguments; `unison.hooks` registers it.
_call_converted: list[Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]] = []

#: The reasons for which functions could not be converted, by their code.
refused: MutableMapping[types.CodeType, str] = weakref.WeakKeyDictionary()

#: Contexts that other modules add around calls of what is not converted, such as Keras' layers.
contexts_of_calls: list[Callable[[Any], AbstractContextManager[Any]]] = []


def convert_by(call: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]) -> None:
    """Registers what calls a function as converted."""
    _call_converted[:] = [call]


def is_converting() -> bool:
    """Whether this thread traces functions that are converted."""
    return _is_converting.value


def converting(enabled: bool = True) -> AbstractContextManager[bool]:
    """Context manager in which `called` converts functions, or does not."""
    return _is_converting.bound_to(enabled)


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`; inside `converting`, of the converted function."""
    if not _is_converting.value:
        return function(*args, **kwargs)
    return _call_converted[0](function, args, kwargs)
