"""Values that `for` in a converted function goes through in the program, not in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from unison.cells import has_cell
from unison.program.control_flow import ControlFlowError
from unison.tracebacks import users_line


@dataclasses.dataclass
class Rows:
    """The slices of arrays along their first axes.

    Attributes:
        arrays: A tree of arrays with first axes of one size.
        length: That size.
    """

    arrays: Any
    length: int

    def __iter__(self) -> Iterator[Any]:
        return (self.at(index) for index in range(self.length))

    def __len__(self) -> int:
        return self.length

    def at(self, index: Any) -> Any:
        return jax.tree.map(lambda array: array[index], self.arrays)


@dataclasses.dataclass
class Counted:
    """Values whose number is known only when the program runs.

    Attributes:
        length: The number, an integer array.
        at: Maps the index to the value.
    """

    length: Any
    at: Callable[[Any], Any]

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ControlFlowError(
            f"{users_line()}: A range with an end that is known only when the program runs has no "
            "fixed size, which arrays of programs need. `for` goes through it, and `enumerate` and "
            "`zip` do. For a tensor, take the largest size and mask: tf.range(largest) < n."
        )

    __iter__ = __len__ = __getitem__ = __array__ = __jax_array__ = _refuse


def counted_range(start: Any, stop: Any, step: Any, dtype: Any = None) -> Counted:
    """Returns `start`, `start + step`, and so on, below `stop`."""
    start, stop, step = (jnp.asarray(part) for part in (start, stop, step))
    dtype = jnp.result_type(start, stop, step) if dtype is None else dtype
    if jnp.issubdtype(dtype, jnp.integer):
        wide = jnp.promote_types(dtype, jnp.int32)  # in which differences fit
        first, last, by = (part.astype(wide) for part in (start, stop, step))
        length = -((first - last) // by)
    else:
        length = jnp.ceil((stop - start) / step).astype(jnp.int32)
    start, step = start.astype(dtype), step.astype(dtype)
    return Counted(
        jnp.maximum(length, 0), lambda index: start + jnp.asarray(index).astype(dtype) * step
    )


def rows_of(value: Any) -> Rows | Counted | None:
    """Returns what `for` goes through in the program; None if Python does."""
    if isinstance(value, Rows | Counted):
        return value
    if has_cell(value):
        value = value.value()
    if isinstance(value, jax.Array) and value.ndim:
        return Rows(value, value.shape[0])
    return None


def zipped(parts: list[Rows | Counted]) -> Rows | Counted:
    """Returns tuples of the values of each part, as many as the shortest has."""
    if all(isinstance(part, Rows) for part in parts):
        length = min(len(part) for part in parts if isinstance(part, Rows))
        arrays = [part.arrays for part in parts if isinstance(part, Rows)]
        return Rows(jax.tree.map(lambda array: array[:length], tuple(arrays)), length)
    shortest = jnp.min(jnp.stack([jnp.asarray(part.length) for part in parts]))
    return Counted(shortest, lambda index: tuple(part.at(index) for part in parts))


def enumerated(part: Rows | Counted, start: Any = 0) -> Rows | Counted:
    """Returns pairs of the values' numbers, from `start`, and the values."""
    if isinstance(part, Rows):
        return Rows((start + jnp.arange(part.length), part.arrays), part.length)
    return Counted(part.length, lambda index: (start + index, part.at(index)))
