"""Assigning a saved value to a variable, whatever the strategies of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import Cell, has_cell
from unison.errors import InvalidArgumentError
from unison.runtime.precision import device_dtype
from unison.train.checkpoint_formats import AnyArchive
from unison.train.chunk_plan import own_regions
from unison.train.orbax_archive import OrbaxArchive
from unison.train.record_archive import StoredCopies, StoredParts
from unison.train.sharded_archive import ShardedArchive
from unison.variables import Variable

#: The value of a variable in an archive.
Stored = np.ndarray | StoredParts | StoredCopies


def check_fits(variable: Any, shape: tuple[int, ...], dtype: np.dtype, where: str) -> None:
    """Checks that `variable` can hold a value.

    A 64-bit value fits a 32-bit variable if this program has no 64-bit dtypes, and a 64-bit
    integer always: TensorFlow counts in them.

    Raises:
        ValueError: The shapes differ.
        InvalidArgumentError: The dtypes differ.
    """
    name = getattr(variable, "path", variable.name)
    declared = variable.declared_shape if isinstance(variable, Variable) else variable.shape
    if not _agree(declared, shape):
        raise ValueError(
            f"Variable {name!r} has shape {declared}, and its value in the checkpoint "
            f"has shape {shape}. Restore into a model of the same sizes, or leave the variable out "
            f"of what is restored. Checkpoint: {where}"
        )
    wanted = jnp.dtype(variable.dtype)
    is_counter = (wanted, dtype) == (np.dtype(np.int32), np.dtype(np.int64))
    if wanted not in (dtype, device_dtype(dtype)) and not is_counter:
        raise InvalidArgumentError(
            message=f"Variable {name!r} has dtype {wanted}, and its value in the checkpoint has "
            f"dtype {dtype}. Make the variable of that dtype, and cast it after. Checkpoint: "
            f"{where}"
        )


def read_for(variable: Any, archive: AnyArchive, key: str) -> Stored:
    """Returns the value of a variable in a checkpoint, for `assign`.

    Of a variable that is divided over the devices, only the parts on this process's are read, if
    the checkpoint is in parts, too.

    Raises:
        DataLossError: What is read is corrupt.
        InvalidArgumentError: The value is an integer that the variable's dtype cannot hold.
    """
    is_deferred = getattr(variable, "_initializer", None) is not None
    if not isinstance(archive, ShardedArchive | OrbaxArchive) or is_deferred:
        return archive.read(key)
    cell = variable.cell if has_cell(variable) else None
    if type(cell) is not Cell or not cell.has_value or not cell.is_divided:
        return archive.read(key)
    stored = cell.stored()
    parts = archive.read_regions(key, list(own_regions(stored)))
    dtype = np.dtype(stored.dtype)
    if dtype != parts[0].dtype:
        for part in parts:
            _check_range(variable, part, dtype)
        parts = [part.astype(dtype) for part in parts]
    return StoredParts(cell.stored_form, parts)


def assign(variable: Any, value: Stored) -> None:
    """Assigns `value` from outside the replicas, also while a program is traced.

    A Keras variable whose initialization is deferred gets `value` as its initial value.

    Args:
        variable: The variable.
        value: Its value, the parts of its array on this process's devices, or the copies of the
            replicas that it had.

    Raises:
        InvalidArgumentError: The value is an integer that the variable's dtype cannot hold.
    """
    if isinstance(value, StoredParts):
        if getattr(variable, "_initializer", None) is None:
            with jax.ensure_compile_time_eval():
                variable.cell.restore_parts(value.form, value.parts, value.are_mapped)
            return
        (value,) = map(np.array, value.parts)  # a variable without devices has no parts yet
    if isinstance(value, StoredCopies):
        with jax.ensure_compile_time_eval():
            variable.cell.restore_copies(value.form, value.copies)
        return
    dtype = jnp.dtype(variable.dtype)
    if dtype != value.dtype:
        _check_range(variable, value, dtype)
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(value, dtype=dtype)
        if getattr(variable, "_initializer", None) is not None:
            variable._initializer = lambda shape, dtype: array
        elif has_cell(variable):
            variable.cell.restore(array)
        else:
            from unison.keras.variables import outside_the_traced_program

            with outside_the_traced_program():
                variable.assign(array)


def _check_range(variable: Any, value: np.ndarray, dtype: np.dtype) -> None:
    if np.issubdtype(dtype, np.integer) and not np.array_equal(value.astype(dtype), value):
        raise InvalidArgumentError(
            message=f"Variable {variable.name!r} of dtype {dtype} cannot hold its value in the "
            f"checkpoint, {value} of dtype {value.dtype}. Set jax_enable_x64."
        )


def _agree(declared: Any, shape: Sequence[int]) -> bool:
    """Whether a value may have `shape`; a declared size of None, or the shape ..., may be any."""
    return declared is ... or (
        len(declared) == len(shape)
        and all(wanted in (None, size) for wanted, size in zip(declared, shape, strict=True))
    )
