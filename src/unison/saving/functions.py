"""The functions of an object that are saved, and their signatures.

A `tf.function` is identified by its attributes: `python_function`, `input_signature` and
`get_concrete_function`; one of its signatures, by `structured_input_signature`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from unison.cells import has_cell
from unison.conversion import called
from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.specs import ArraySpec

#: The signature that is called by default.
DEFAULT_SIGNATURE = "serving_default"


def functions_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields the functions in the attributes of an object and of its class, by name."""
    names = dict.fromkeys([*vars(owner), *dir(type(owner))]) if hasattr(owner, "__dict__") else ()
    for name in names:
        # Without evaluating properties.
        if is_function(inspect.getattr_static(owner, name, None)):
            yield name, getattr(owner, name)


def is_function(value: Any) -> bool:
    """Whether `value` is a function that can be saved."""
    return isinstance(value, SavedFunction | SavedSignature) or (
        not isinstance(value, type)
        and hasattr(value, "python_function")
        and (is_concrete(value) or hasattr(value, "get_concrete_function"))
    )


def is_concrete(value: Any) -> bool:
    """Whether `value` is a function of one signature."""
    return hasattr(value, "structured_input_signature")


def input_signature_of(function: Any) -> tuple | None:
    """Returns the function's own input signature; None if it has none."""
    return getattr(function, "input_signature", None)


def concrete_functions_of(function: Any) -> list[Any]:
    """Returns the function for each signature with which it is known to be called."""
    if is_concrete(function):
        return [function]
    return list(getattr(function, "concrete_functions", ()))


def inputs_of(concrete: Any) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of one signature, with an `ArraySpec` for every array.

    Raises:
        ValueError: The number of axes of an array is unknown.
    """
    return jax.tree.map(
        lambda leaf: ArraySpec.of(leaf) if _describes_array(leaf) else leaf,
        concrete.structured_input_signature,
        is_leaf=_describes_array,
    )


def parameters_of(function: Any) -> inspect.Signature:
    """Returns the parameters with which the function is called, without those of its instance."""
    signature = inspect.signature(function.python_function)
    parameters = list(signature.parameters.values())
    if hasattr(function, "__self__") and not inspect.ismethod(function.python_function):
        parameters = parameters[1:]
    return inspect.Signature(
        [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    )


def as_signature(
    function: Callable[..., Any], inputs: tuple[tuple, dict[str, Any]]
) -> tuple[Callable[..., Any], tuple[tuple, dict[str, ArraySpec]]]:
    """Returns `function` as one of named arrays that returns a dictionary, and its arguments."""
    specs = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, ArraySpec)]
    names: list[str] = []
    for index, spec in enumerate(specs):
        name = spec.name or f"args_{index}"
        taken = sum(other.startswith(name) for other in names)
        names.append(f"{name}_{taken}" if taken else name)

    def signature(**arrays: Any) -> dict[str, Any]:
        remaining = (arrays[name] for name in names)
        args, kwargs = jax.tree.map(
            lambda leaf: next(remaining) if isinstance(leaf, ArraySpec) else leaf, inputs
        )
        return _named(called(function, *args, **kwargs))

    return signature, ((), dict(zip(names, specs, strict=True)))


def _named(result: Any) -> dict[str, Any]:
    """Returns the result of a function as a signature returns it."""
    if isinstance(result, dict) and all(isinstance(name, str) for name in result):
        return result
    leaves = jax.tree.leaves(result, is_leaf=has_cell)
    return {f"output_{index}": leaf for index, leaf in enumerate(leaves)}


def _describes_array(leaf: Any) -> bool:
    has_description = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return has_description and not isinstance(leaf, np.generic)
