"""The one place where operations of `unison.tf` find out that an argument is a `RaggedTensor`.

Modules of operations call `dispatch_on_ragged` at their end. Their functions then call the
implementations that `unison.tf.ragged` has registered, if an argument is ragged. Before there is a
ragged tensor, a call costs one test more.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unison.values import NotCombined


class Ragged:
    """Base of what makes a call one of ragged tensors: them, and their specifications."""

    __slots__ = ()


class CompositeTensor(Ragged, NotCombined):
    """Base of tensors that consist of several arrays: of `RaggedTensor`."""

    __slots__ = ()

    @property
    def flat_values(self) -> Any:
        """The values."""
        raise NotImplementedError

    def with_flat_values(self, new_values: Any) -> Any:
        """Returns a tensor with other values in the same rows."""
        raise NotImplementedError

    def parts(self) -> Iterable[Any]:
        """Returns the arrays, the values first."""
        raise NotImplementedError

    def of_parts(self, parts: Sequence[Any]) -> Any:
        """Returns a tensor of the same kind with other arrays."""
        raise NotImplementedError


#: Modules whose functions are names of `tf` itself.
_WITHOUT_NAME = frozenset("tf.looping tf.printing tf.selecting tf.shaping tf.tensors".split())

#: The implementations for ragged arguments, by the names of operations. An implementation gets the
#: operation for dense tensors, and then the arguments.
implementations: dict[str, Callable[..., Any]] = {}

#: Has an item once there is a ragged tensor, or a specification of one.
made: list[bool] = []


def dispatch_on_ragged(namespace: dict[str, Any], only: Iterable[str] | None = None) -> None:
    """Lets the public functions of a module take ragged tensors.

    Args:
        namespace: The module's `globals()`.
        only: The names of the functions; default: all that are defined in the module.
    """
    module = namespace["__name__"]
    for name, value in (
        list(namespace.items()) if only is None else [(n, namespace[n]) for n in only]
    ):
        is_own = isinstance(value, types.FunctionType) and value.__module__ == module
        if is_own and not name.startswith("_"):
            namespace[name] = _dispatching(value, name)


def _dispatching(function: types.FunctionType, name: str) -> Any:
    there_are, is_ragged, of_ragged = made, holds_ragged, _of_ragged

    def operation(*args: Any, **kwargs: Any) -> Any:
        if there_are and is_ragged(args, kwargs):
            return of_ragged(function, name, args, kwargs)
        return function(*args, **kwargs)

    # In the operation's own module, so that its examples are found there.
    dispatching = types.FunctionType(
        operation.__code__, function.__globals__, name, None, operation.__closure__
    )
    return functools.update_wrapper(dispatching, function)


def holds_ragged(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is ragged, or is a list or dictionary with a ragged tensor in it."""
    return any(map(_is_or_has, args)) or (bool(kwargs) and any(map(_is_or_has, kwargs.values())))


def _is_or_has(value: Any) -> bool:
    if isinstance(value, Ragged):
        return True
    if isinstance(value, list | tuple):
        return any(map(_is_or_has, value))
    return isinstance(value, dict) and any(map(_is_or_has, value.values()))


def _of_ragged(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    place = function.__module__.removeprefix("unison.")
    implementation = implementations.get(f"{place}.{name}")
    if implementation is None:
        public = f"tf.{name}" if place in _WITHOUT_NAME else f"{place}.{name}"
        raise ValueError(
            f"{public} does not take a RaggedTensor in Unison. Call it on the values, as "
            f"tf.ragged.map_flat_values({public}, x) does, or pad first: x.to_tensor()."
        )
    return implementation(function, *args, **kwargs)
