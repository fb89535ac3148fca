"""`Function`: a Python function as one compiled program, including the variables that it uses.

A function is compiled on trial. If it does something that only Python can do between programs
(running a strategy, taking the next batch, an `if` on an array's value), it runs eagerly in Python
instead, and the replica programs that it calls are still compiled.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax

from unison.conversion import allowing, called
from unison.eager_fallback import NeedsPythonError, on_trial
from unison.lifting import current_lift
from unison.program import (
    Arguments,
    ControlFlowError,
    ProgramCache,
    Static,
    describe_for_function,
)
from unison.runtime.private_jax import nothing_is_traced
from unison.strategies.context import in_cross_replica_context
from unison.strategies.default import default_strategy
from unison.tracebacks import filter_traceback

logger = logging.getLogger("unison")


class Function:
    """Calls a function as one compiled program wherever possible.

    * Outside any scope the function is compiled, once for each signature: the shapes and dtypes of
      arrays, the values of numbers and strings, the identity of everything else. Variables are read
      and assigned as if the function ran in Python. Its Python side effects happen when it is
      traced; variables may be created only in the first call.
    * A function that cannot be compiled runs eagerly in Python: one that calls `strategy.run`,
      iterates over a dataset, or assigns variables of several replicas; and, for the signature at
      hand only, one whose `if` or `while` depends on an array.
    * In a strategy's scope the function runs eagerly, too. Inside a replica program, a function
      that JAX traces, or a gradient tape, it becomes part of that.

    Args:
        python_function: A function of pytrees with arbitrary leaves.
        converts: Whether Python's control flow over arrays is converted; see `unison.autograph`.
            Otherwise the function runs eagerly for such a signature: effects on Python's objects
            happen as in any function then, and not when it is traced.

    Examples:
        >>> import unison
        >>> total = unison.Variable(0.0)
        >>> @unison.Function
        ... def add(x):
        ...     return total.assign_add(x)
        >>> add(2.0), float(total)
        (Array(2., dtype=float32), 2.0)
    """

    #: The name of the option `converts`.
    _option = "converts"

    def __init__(self, python_function: Callable[..., Any], converts: bool = False):
        if not callable(python_function):
            raise TypeError(f"Expected a function. Received: {python_function!r}")
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self._converts = converts
        self._compiled: dict[Any, None] = {}
        self._stepwise: set[Any] = set()
        self._is_stepwise = False

    @property
    def trace_count(self) -> int:
        """The number of signatures for which the function was traced or found to need Python."""
        return len(self._compiled.keys() | self._stepwise) + self._is_stepwise

    def signatures(self) -> list[tuple[tuple, dict[str, Any]]]:
        """Returns the arguments for which programs were compiled, with a `jax.ShapeDtypeStruct` for
        every array.
        """
        return [
            jax.tree.unflatten(
                structure,
                [
                    leaf.value
                    if isinstance(leaf, Static)
                    else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                    for leaf in descriptions
                ],
            )
            for structure, descriptions in self._compiled
        ]

    @filter_traceback
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_stepwise or not _may_compile():
            return self._run(*args, **kwargs)
        programs = _programs()
        try:
            arguments = Arguments.of(args, kwargs, programs.placement, describe_for_function)
            signature = (arguments.structure, arguments.descriptions)
            if signature in self._stepwise:
                return self._run(*args, **kwargs)
            with on_trial(), allowing(self._converts):
                result = programs.call(self, arguments, may_create=not self._compiled)
            self._compiled[signature] = None
            return result
        except NeedsPythonError as error:
            self._is_stepwise = True
            logger.debug("%s runs step by step: %s", self._name, error)
        except ControlFlowError as error:
            self._stepwise.add(signature)
            logger.warning(
                "%s is not compiled. It runs step by step%s, because at %s",
                self._name,
                "" if self._converts else f" ({self._option}=True converts its control flow)",
                error,
            )
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function itself, either to trace it or to run it eagerly."""
        return called(self.python_function, *args, **kwargs)

    def shapes_of_result(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result as `jax.ShapeDtypeStruct`s, without running it.

        Args:
            args: A `jax.ShapeDtypeStruct` or an example for every array, and the values of all
                other arguments.
            kwargs: Likewise.
        """
        programs = _programs()
        arguments = Arguments.of(args, kwargs, programs.placement, describe_for_function)
        with on_trial():
            return programs.shapes_of_result(self, arguments)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    @property
    def _name(self) -> str:
        return getattr(self.python_function, "__qualname__", repr(self.python_function))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"


class BoundFunction:
    """A `Function` that was applied to a method, bound to one instance.

    Its programs are cached by function and instance, like those of a bound method.
    """

    __func__: Function
    __self__: Any

    def __init__(self, function: Function, instance: Any):
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the method of the instance; Keras looks at that of a layer's `call`."""
        return inspect.signature(self.__func__.python_function.__get__(self.__self__))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"


def _may_compile() -> bool:
    """Whether a call is outside scopes and traces, and so may launch a one-replica program."""
    return current_lift() is None and not in_cross_replica_context() and nothing_is_traced()


@functools.cache
def _programs() -> ProgramCache:
    strategy = default_strategy()
    return ProgramCache(strategy.placement, strategy.replica_context)
