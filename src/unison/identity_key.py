"""Keys that compare arrays and variables by identity, where `==` compares their values."""

from __future__ import annotations

from typing import Any


class Reference:
    """A hashable stand-in for an array or variable, equal only to another one for the same object.

    Examples:
        >>> import numpy as np
        >>> x, y = np.ones(2), np.ones(2)
        >>> Reference(x) == Reference(x), Reference(x) == Reference(y), Reference(x).deref() is x
        (True, False, True)

    TF: what `tf.Tensor.ref` and `tf.Variable.ref` return.
    """

    __slots__ = ("_referent",)

    def __init__(self, referent: Any):
        self._referent = referent

    def deref(self) -> Any:
        """Returns the array or variable."""
        return self._referent

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._referent is other._referent

    def __hash__(self) -> int:
        return id(self._referent)

    def __repr__(self) -> str:
        return f"<Reference to {self._referent!r}>"
