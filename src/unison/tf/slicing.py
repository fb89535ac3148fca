"""Indices of tensors that a compiled program computes: `x[i:i + 3]`, `x[tf.shape(x)[0] - 1]`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.program.assertions import require
from unison.runtime.private_jax import constant_difference, constant_value
from unison.tf.tensor_spec import is_symbolic_size

_Getitem = Callable[[Any, Any], Any]


def with_computed_bounds(getitem: _Getitem) -> _Getitem:
    """Returns `getitem` of arrays, extended by slices with computed bounds and a fixed length, and
    by sizes that are symbols.

    The length is fixed if both bounds are computed from the same values, and what they differ by
    from constants. Elements beyond either end are not numbers (of integers, the smallest one; of
    booleans, False): TensorFlow's slice would be shorter, and count a negative bound from the end.
    """

    @functools.wraps(getitem)
    def extended(self: Any, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if any(_is_computed(entry) for entry in entries):
            taken, rest = _taken(self, entries)
            return taken[rest]
        try:
            return getitem(self, index)
        except IndexError:
            if not any(is_symbolic_size(entry) for entry in entries):
                raise
        computed = [jnp.asarray(e, jnp.int32) if is_symbolic_size(e) else e for e in entries]
        return getitem(self, tuple(computed))

    return extended


def places_of(index: Any, shape: tuple[int, ...]) -> Any:
    """Returns an index that a program computes as the places of the elements that it selects.

    An index without computed parts is returned as it is.

    Raises:
        InvalidArgumentError: It selects an element outside of `shape`; when the program runs.
    """
    entries = index if isinstance(index, tuple) else (index,)
    computed = [
        (entry, axis)
        for entry, axis in zip(entries, _axes(entries, len(shape)), strict=True)
        if isinstance(entry, jax.core.Tracer) or _is_computed(entry)
    ]
    if not computed:
        return index
    for entry, axis in computed:
        if isinstance(entry, jax.core.Tracer) and np.issubdtype(entry.dtype, np.integer):
            size = shape[axis]
            require((entry >= -size) & (entry < size), _outside, entry, np.int64(size))
    numbers = jnp.arange(math.prod(shape)).reshape(shape)
    places = numbers[index]
    require(places >= 0, _outside, places, np.int64(numbers.size))
    return jnp.unravel_index(places, shape)


def _outside(index: Any, size: Any) -> str:
    return f"Expected an index of an axis of {size} elements. Received: {index}"


def _is_computed(entry: Any) -> bool:
    return isinstance(entry, slice) and (
        isinstance(entry.start, jax.core.Tracer) or isinstance(entry.stop, jax.core.Tracer)
    )


def _taken(array: Any, entries: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns what computed slices of fixed length take, and the rest of the index."""
    remaining = list(entries)
    for place, axis in enumerate(_axes(entries, np.ndim(array))):
        entry = entries[place]
        if not _is_computed(entry):
            continue
        remaining[place] = entry = slice(
            *(_known(bound) for bound in (entry.start, entry.stop, entry.step))
        )
        if not _is_computed(entry):
            continue
        step = 1 if entry.step is None else entry.step
        start = 0 if entry.start is None else entry.start
        is_fixed = isinstance(step, int) and step > 0 and entry.stop is not None
        length = constant_difference(entry.stop, start) if is_fixed else None
        size = array.shape[axis]
        if length is None or length > size:
            received = entry if length is None else f"a length of {length}, of {size} elements"
            raise IndexError(
                "In a compiled program a slice has a length that is known when it is compiled, "
                f"and is not longer than the axis. Received: {received}. Write both bounds with "
                "the same start, as x[i:i + 3], or use tf.where, tf.gather or a mask on the whole "
                "tensor."
            )
        places = start + step * jnp.arange(-(-max(length, 0) // step))
        fill = False if array.dtype == np.bool_ else None
        taken = array.at[(slice(None),) * axis + (places,)]
        array = taken.get(mode="fill", fill_value=fill, wrap_negative_indices=False)
        remaining[place] = slice(None)
    return array, tuple(remaining)


def _known(bound: Any) -> Any:
    """Returns a bound that constants alone determine as a number."""
    if not isinstance(bound, jax.core.Tracer):
        return bound
    known = constant_value(bound)
    return bound if known is None else int(known)


def _axes(entries: tuple[Any, ...], rank: int) -> list[int]:
    """Returns the axis of the array at which each entry of an index begins."""
    widths = [_width(entry) for entry in entries]
    axes = []
    axis = 0
    for entry, width in zip(entries, widths, strict=True):
        axes.append(axis)
        axis += rank - sum(widths) if entry is Ellipsis else width
    return axes


def _width(entry: Any) -> int:
    """Returns of how many axes an entry of an index selects."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool | np.bool_):
        return 0
    is_mask = getattr(getattr(entry, "dtype", None), "kind", "") == "b"
    return np.ndim(entry) if is_mask else 1
