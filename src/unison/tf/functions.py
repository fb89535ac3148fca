"""`tf.function`.

Inside a replica program the function is called through: `strategy.run` traces and compiles it as
part of the step. Elsewhere it calls the Python function, whose calls of `strategy.run` are
compiled programs already. Compiling what lies around them, and AutoGraph (Python's `if` and `for`
on tensors), are not here yet.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, overload

#: The options of `tf.function`: they steer how TensorFlow makes graphs, of which there are none.
_OPTIONS = frozenset(
    "input_signature autograph jit_compile reduce_retracing experimental_implements "
    "experimental_autograph_options experimental_attributes experimental_relax_shapes "
    "experimental_compile experimental_follow_type_hints".split()
)


class Function:
    """A function that was decorated with `tf.function`.

    Attributes:
        python_function: What was decorated.
    """

    def __init__(self, python_function: Callable[..., Any]):
        if not callable(python_function):
            raise TypeError(f"tf.function needs a function. Received: {python_function!r}")
        functools.update_wrapper(self, python_function)
        self.python_function = python_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.python_function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A real bound method: `strategy.run` finds its compiled program again by function and
        # instance.
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<tf.function {getattr(self.python_function, '__qualname__', '?')}>"


@overload
def function(func: Callable[..., Any], **options: Any) -> Function: ...


@overload
def function(func: None = None, **options: Any) -> Callable[[Callable[..., Any]], Function]: ...


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Marks a function as part of the program; a decorator with or without arguments.

    Args:
        func: The function.
        options: `jit_compile=`, `input_signature=` and the others of TensorFlow; without effect.

    Raises:
        TypeError: An option that `tf.function` does not have.

    Example:
        >>> @function(jit_compile=True)
        ... def double(x):
        ...     return 2 * x
        >>> double(3)
        6

    TF: `tf.function`.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(
            f"tf.function takes the options {sorted(_OPTIONS)}. Received: {', '.join(unknown)}"
        )
    return Function if func is None else Function(func)
