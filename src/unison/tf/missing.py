"""What the face says about a name that it does not have."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_missing_from(
    module: str, instead: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module of the face.

    Args:
        module: The module's `__name__`.
        instead: What to use instead of some of TensorFlow's names.

    Example:
        >>> lookup = names_missing_from("unison.tf", {"GradientTape": "use jax.value_and_grad"})
        >>> lookup("GradientTape")
        Traceback (most recent call last):
            ...
        AttributeError: unison.tf has no 'GradientTape' yet: use jax.value_and_grad
    """

    def lookup(name: str) -> Any:
        raise AttributeError(
            f"{module} has no {name!r} yet: {(instead or {}).get(name) or _advice(module, name)}",
            name=name,
            obj=sys.modules.get(module),
        )

    return lookup


def _advice(module: str, name: str) -> str:
    there = [other for other in vars(sys.modules[module]) if not other.startswith("_")]
    similar = difflib.get_close_matches(name, there, n=1, cutoff=0.75)
    if similar:
        return f"did you mean {similar[0]!r}?"
    return "tensors are jax.Arrays, so what jax.numpy, jax or keras offer for it works on them"
