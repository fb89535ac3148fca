"""The values of the variables of a function that a branch or a loop changes, as arrays and others.

A branch and a loop of a program pass arrays on. What else a variable holds (text, an object, None)
must be the same whichever way the program takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from malt.operators.variables import Undefined, UndefinedReturnValue

from unison.cells import has_cell
from unison.program.control_flow import ControlFlowError
from unison.tracebacks import users_line

#: The names under which converted functions keep what they will return; `malt` makes them, other
#: than all that the function refers to.
_RETURNED = re.compile(r"retval_(_\d+)?")

#: The types of Python's numbers. A variable that holds the same one either way stays a number.
NUMBERS = (bool, int, float, complex)


class StagingError(ControlFlowError):
    """A branch or a loop cannot be one of a program."""


def not_staged(what: str) -> StagingError:
    """Returns an error of the user's current line."""
    return StagingError(f"{users_line()}: This {what}")


def is_undefined(value: Any) -> bool:
    """Whether a variable has no value yet."""
    return isinstance(value, Undefined | UndefinedReturnValue)


def is_array(leaf: Any) -> bool:
    """Whether a program can compute a value like `leaf`: an array or a number."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUT"
    return isinstance(leaf, (*NUMBERS, jax.Array))


@dataclasses.dataclass(frozen=True)
class Kind:
    """The shape and dtype of an array, or of a number; a weak dtype yields to others."""

    shape: tuple[int, ...]
    dtype: Any
    is_weak: bool = dataclasses.field(compare=False)

    @classmethod
    def of(cls, leaf: Any) -> Kind:
        array = jnp.asarray(leaf)
        return cls(array.shape, array.dtype, array.weak_type)

    def joined(self, other: Kind) -> Kind | None:
        """Returns the kind of an array that is of this or of the other kind; None if none is."""
        if self.shape != other.shape:
            return None
        if self.dtype == other.dtype:
            return Kind(self.shape, self.dtype, self.is_weak and other.is_weak)
        if self.is_weak and other.is_weak:
            return Kind(self.shape, jnp.promote_types(self.dtype, other.dtype), True)
        if not (self.is_weak or other.is_weak):
            return None
        strong, weak = (other, self) if self.is_weak else (self, other)
        joined = jnp.result_type(strong.dtype, _example_number(weak.dtype))
        return Kind(self.shape, joined, False)

    def array(self, leaf: Any) -> jax.Array:
        """Returns a leaf as an array of this kind; a number stays weak, if this kind is."""
        array = jnp.asarray(leaf)
        return array if array.dtype == self.dtype and self.is_weak else array.astype(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _example_number(dtype: Any) -> Any:
    """Returns a number of Python's like those that have `dtype`."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return 0
    return 0.0 if jnp.issubdtype(dtype, jnp.floating) else 0j


@dataclasses.dataclass
class Symbol:
    """A variable of a function, with its value at some point of the trace.

    Attributes:
        name: Its name.
        value: Its value.
        leaves: The leaves of its value.
        structure: What is around them.
    """

    name: str
    value: Any
    leaves: list[Any] = dataclasses.field(init=False)
    structure: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.leaves, self.structure = jax.tree.flatten(
            self.value, is_leaf=lambda value: has_cell(value) or is_undefined(value)
        )

    @property
    def is_undefined(self) -> bool:
        return is_undefined(self.value)

    @property
    def is_returned(self) -> bool:
        """Whether it is what the function will return, which is only read once it is defined."""
        return _RETURNED.fullmatch(self.name) is not None

    @property
    def arrays(self) -> list[Any]:
        return [leaf for leaf in self.leaves if is_array(leaf)]

    @property
    def kinds(self) -> list[Kind | None]:
        """The kinds of its leaves; None for those that a program cannot compute."""
        return [Kind.of(leaf) if is_array(leaf) else None for leaf in self.leaves]

    def __str__(self) -> str:
        return "the returned value" if self.is_returned else repr(self.name)


def symbols_of(names: Sequence[str], values: Sequence[Any]) -> list[Symbol]:
    """Returns the variables with their values."""
    return [Symbol(name, value) for name, value in zip(names, values, strict=True)]


@dataclasses.dataclass
class Form:
    """The form that a variable has before and after a branch or a round of a loop.

    Attributes:
        structure: What is around its leaves.
        leaves: For each leaf its kind, or what it is if a program cannot compute it.
    """

    structure: Any
    leaves: list[Any]

    def fits(self, symbol: Symbol) -> bool:
        """Whether a variable has this form as it is."""
        kinds = [leaf if isinstance(leaf, Kind) else None for leaf in self.leaves]
        return symbol.structure == self.structure and symbol.kinds == kinds

    def arrays_of(self, symbol: Symbol) -> list[jax.Array]:
        """Returns the arrays of a variable; zeros if it has no value yet.

        Raises:
            StagingError: It has another structure.
        """
        if symbol.is_undefined or (not symbol.leaves and symbol.structure != self.structure):
            return [jnp.zeros(k.shape, k.dtype) for k in self.leaves if isinstance(k, Kind)]
        if symbol.structure != self.structure:
            raise not_staged(f"gives {symbol} another structure in each round.")
        return [
            kind.array(leaf)
            for kind, leaf in zip(self.leaves, symbol.leaves, strict=True)
            if isinstance(kind, Kind)
        ]

    def value(self, arrays: Iterator[Any]) -> Any:
        """Returns the value of the variable with the next of the arrays in it."""
        leaves = [next(arrays) if isinstance(leaf, Kind) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def form_of(symbol: Symbol) -> Form:
    """Returns the form of a variable that stays as it is."""
    return Form(
        symbol.structure,
        [
            leaf if kind is None else kind
            for leaf, kind in zip(symbol.leaves, symbol.kinds, strict=True)
        ],
    )


def joined(one: Symbol, other: Symbol, places: tuple[str, str], advice: str) -> Form:
    """Returns the form of a variable that is as `one` or as `other`.

    Args:
        one: The variable in one place.
        other: The variable in another place.
        places: What to call these places in an error: "before the loop".
        advice: What to do about it.

    Raises:
        StagingError: An array cannot be both, or something else differs.
    """
    if one.structure != other.structure:
        raise not_staged(
            f"gives {one} another structure: it is {_shown(one)} {places[0]}, and {_shown(other)} "
            f"{places[1]}. {advice}"
        )
    leaves: list[Any] = []
    for a, b, kind, other_kind in zip(
        one.leaves, other.leaves, one.kinds, other.kinds, strict=True
    ):
        if kind is None or other_kind is None:
            if not (kind is other_kind and _is_same(a, b)):
                raise not_staged(
                    f"changes {one}, which is {_shown(one)} {places[0]}, and {_shown(other)} "
                    f"{places[1]}: only arrays and numbers may differ."
                )
            leaves.append(a)
            continue
        both = kind.joined(other_kind)
        if both is None:
            raise not_staged(
                f"changes the shape or dtype of {one}: it is {kind} {places[0]}, and {other_kind} "
                f"{places[1]}. {advice}"
            )
        leaves.append(both)
    return Form(one.structure, leaves)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, str | bytes) and a == b)


def _shown(symbol: Symbol) -> str:
    if symbol.is_undefined:
        return "not defined"
    if len(symbol.leaves) == 1 and symbol.kinds[0] is not None:
        return str(symbol.kinds[0])
    return repr(symbol.value) if not symbol.arrays else str(symbol.structure)
