"""Calls in converted functions: what they call is converted, too, if it is the user's.

The functions of libraries, of Python and of Unison run as they are. So does a function whose source
cannot be found or rewritten: an array where Python wants a value is an error there, which says so.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import logging
import operator
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from malt.core import converter
from malt.impl.api import autograph_artifact, is_autograph_artifact
from malt.operators import py_builtins

from unison import conversion
from unison.autograph.operators import OPERATORS, FunctionScope, and_, or_
from unison.autograph.rows import counted_range, enumerated, rows_of, zipped
from unison.autograph.source import WHY_SUSPENDED, Transpiler
from unison.autograph.staging import is_staging, truth
from unison.autograph.symbols import is_array, not_staged
from unison.cells import has_cell
from unison.interrupts import is_of_a_signal_handler
from unison.program.control_flow import VALUE_WANTED, known_truth

logger = logging.getLogger("unison")

#: Functions of generators and coroutines, which cannot be rewritten.
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def converted_call(
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    scope: FunctionScope | None = None,
) -> Any:
    """Returns `function(*args, **kwargs)`, converted if it is the user's.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        scope: That of the function with the call in it.
    """
    kwargs = kwargs or {}
    if isinstance(function, functools.partial):
        keywords = {**function.keywords, **kwargs}
        return converted_call(function.func, (*function.args, *args), keywords, scope)
    if isinstance(function, types.BuiltinFunctionType | type):
        if scope is not None and function in _OF_THE_FRAME:
            return _OF_THE_FRAME[function](function, args, scope)
        overload = _OVERLOADS.get(function)
        return (overload or function)(*args, **kwargs)
    target, own = _python_function(function)
    made = None if target is None else _converted(target)
    if made is None:
        with contextlib.ExitStack() as stack:
            for context in conversion.contexts_of_calls:
                stack.enter_context(context(function))
            return function(*args, **kwargs)
    return made(*own, *args, **kwargs)


def _python_function(function: Any) -> tuple[types.FunctionType | None, tuple]:
    """Returns the function of Python behind a callable, and the first arguments of its call."""
    if isinstance(function, types.MethodType):
        inner, own = _python_function(function.__func__)
        return inner, (function.__self__, *own)
    if isinstance(function, types.FunctionType):
        return function, ()
    call = inspect.getattr_static(type(function), "__call__", None)
    return (call, (function,)) if isinstance(call, types.FunctionType) else (None, ())


def _converted(function: types.FunctionType) -> types.FunctionType | None:
    """Returns the function as converted; None if it is called as it is."""
    code = function.__code__
    if (
        is_autograph_artifact(function)
        or code in conversion.refused
        or conversion.is_of_a_library(function.__globals__.get("__name__"))
    ):
        return None
    if code.co_flags & _SUSPENDED:
        conversion.refused[code] = WHY_SUSPENDED
        return None
    try:
        return _transpiler().convert(function)
    except Exception as error:
        if is_of_a_signal_handler(error):
            raise
        conversion.refused[code] = str(error).strip() or type(error).__name__
        logger.debug("%s is not converted: %s", function.__qualname__, error)
        return None


@functools.cache
def _transpiler() -> Transpiler:
    return Transpiler(
        OPERATORS
        | {
            "converted_call": converted_call,
            "autograph_artifact": autograph_artifact,
            "ConversionOptions": converter.ConversionOptions,
            "Feature": converter.Feature,
            "STD": converter.STANDARD_OPTIONS,
        }
    )


#: Functions that look at the frame that calls them.
_OF_THE_FRAME: dict[Any, Callable[..., Any]] = {
    builtins.eval: py_builtins.eval_in_original_context,
    builtins.super: py_builtins.super_in_original_context,
    builtins.globals: lambda _, args, scope: py_builtins.globals_in_original_context(scope),
    builtins.locals: lambda _, args, scope: py_builtins.locals_in_original_context(scope),
}


# -- built-in functions of arrays ----------------------------------------------------------------


def _range(*args: Any) -> Any:
    try:
        return range(*map(operator.index, args))
    except VALUE_WANTED:
        start, stop, step = {1: (0, *args, 1), 2: (*args, 1)}.get(len(args), args)
        return counted_range(start, stop, step)


def _enumerate(iterable: Any, start: Any = 0) -> Any:
    rows = rows_of(iterable)
    return enumerate(iterable, start) if rows is None else enumerated(rows, start)


def _zip(*iterables: Any, strict: bool = False) -> Any:
    parts = [rows_of(iterable) for iterable in iterables]
    found = [part for part in parts if part is not None]
    if not parts or len(found) < len(parts) or strict:
        return zip(*iterables, strict=strict)
    return zipped(found)


def _int(*args: Any, **kwargs: Any) -> Any:
    try:
        return int(*args, **kwargs)
    except VALUE_WANTED:
        return jnp.asarray(args[0]).astype(jnp.int32)


def _float(*args: Any) -> Any:
    try:
        return float(*args)
    except VALUE_WANTED:
        return jnp.asarray(args[0]).astype(jnp.float32)


def _bool(*args: Any) -> Any:
    if args and known_truth(args[0]) is None:
        return truth(args[0])
    return bool(*args)


def _any(iterable: Any) -> Any:
    found: Any = False
    for value in iterable:
        found = or_(_constant(found), _constant(_bool(value)))
        if known_truth(found):
            return True
    return _bool(found)


def _all(iterable: Any) -> Any:
    found: Any = True
    for value in iterable:
        found = and_(_constant(found), _constant(_bool(value)))
        if known_truth(found) is False:
            return False
    return _bool(found)


def _next(*args: Any) -> Any:
    if is_staging():
        what = "takes the next value of an iterator in a branch or a loop, which only Python can."
        raise conversion.Refusal(not_staged(what))
    return next(*args)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _extreme(builtin: Callable[..., Any], pairwise: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1:
            args = (list(args[0]),)  # which an iterator gives once
        try:
            return builtin(*args, **kwargs)
        except VALUE_WANTED:
            values = args if len(args) > 1 else args[0]
            if kwargs or not all(is_array(value) or has_cell(value) for value in values):
                raise
            return functools.reduce(pairwise, values)

    return extreme


def _greater(one: Any, other: Any) -> Any:
    return jnp.where(jnp.asarray(other) > one, other, one)  # as Python compares, NaN too


def _less(one: Any, other: Any) -> Any:
    return jnp.where(jnp.asarray(other) < one, other, one)


_OVERLOADS: dict[Any, Callable[..., Any]] = {
    builtins.range: _range,
    builtins.enumerate: _enumerate,
    builtins.zip: _zip,
    builtins.int: _int,
    builtins.float: _float,
    builtins.bool: _bool,
    builtins.any: _any,
    builtins.all: _all,
    builtins.next: _next,
    builtins.max: _extreme(max, _greater),
    builtins.min: _extreme(min, _less),
}
