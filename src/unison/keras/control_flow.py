"""Python's control flow over arrays in the layers, models and steps that users write.

Keras calls their methods, so these are not seen by what converts the functions that functions call
(`unison.autograph`). While functions are converted, the objects have converted methods.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
from keras.src import backend

from unison import conversion
from unison.captured import noting_captured
from unison.keras.values import values_in
from unison.program.control_flow import VALUE_WANTED, ControlFlowError, converted_if_needed

T = TypeVar("T")

#: The methods of layers and models with which users describe what is computed.
_METHODS = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def teach_control_flow() -> None:
    """Lets Keras convert layers where they need it, and not assign where it asks for shapes."""
    conversion.contexts_of_calls.append(methods_converted)
    for kind in (*VALUE_WANTED, ControlFlowError):
        # Keras would make another error of it, which it cannot, and say nothing of the cause.
        kind._keras_call_info_injected = True  # type: ignore[union-attr]
    backend.compute_output_spec = _for_shapes(backend.compute_output_spec)


def _for_shapes(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' `compute_output_spec`, which calls a function for the shapes of its results.

    It is converted if needed, and what it assigns is not assigned.
    """

    @functools.wraps(compute)
    def compute_output_spec(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def computed() -> Any:
            named = getattr(fn, "__name__", "")
            own = getattr(getattr(fn, "__self__", None), named, fn)
            with noting_captured():
                return compute(
                    lambda *args, **kwargs: values_in(own(*args, **kwargs)), *args, **kwargs
                )

        return with_methods_converted(getattr(fn, "__self__", fn), computed)

    return compute_output_spec


def with_methods_converted(layer: Any, trace: Callable[[], T]) -> T:
    """Returns `trace()`; where Python needs a value, with the methods of `layer` converted."""

    def traced() -> T:
        with methods_converted(layer):
            return trace()

    return converted_if_needed(traced)


@contextlib.contextmanager
def methods_converted(layer: Any) -> Iterator[None]:
    """Inside, the methods of a layer, and of those in it, are converted, if functions are."""
    given: list[tuple[Any, str]] = []
    if conversion.is_converting() and isinstance(layer, keras.layers.Layer):
        for each in layer._flatten_layers():
            for name in _METHODS:
                if _is_the_users(getattr(type(each), name, None)) and name not in vars(each):
                    object.__setattr__(each, name, _converted(getattr(each, name)))
                    given.append((each, name))
    try:
        yield
    finally:
        for each, name in given:
            object.__delattr__(each, name)


def _converted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return conversion.called(method, *args, **kwargs)

    return called


def _is_the_users(method: Any) -> bool:
    return isinstance(method, types.FunctionType) and not conversion.is_of_a_library(
        method.__globals__.get("__name__")
    )
