"""The changes of `unison.tf` in other libraries, made when it is imported.

JAX's arrays get the methods that TensorFlow's tensors have beyond NumPy's, operands that are lists
(`operands`), and slices whose bounds a compiled program computes (`slicing`). NumPy's functions of
them return NumPy's arrays and numbers, as of TensorFlow's tensors. JAX keeps a 64-bit dtype that is
named (see `unison.runtime.precision`), as TensorFlow does. The logical devices that the environment
states are those of whatever computes first. Errors that nobody catches are shown without the frames
of libraries (`unison.runtime.uncaught`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unison.identity_key import Reference
from unison.tf.tensor_spec import TensorShape
from unison.tf.variable_slices import assign_of
from unison.unsupported import UnsupportedMember


def _numpy(self: Any) -> np.ndarray | np.generic:
    """Returns the value as a NumPy array of the caller's own, or a NumPy scalar.

    Of a value inside a program that is being compiled, it raises what Python's `if` on it would:
    a `tf.function` then runs step by step, and `strategy.run` says where it was.

    TF: `tf.Tensor.numpy`.
    """
    return np.array(self)[()]


def _get_shape(self: Any) -> TensorShape:
    """Returns the shape as a `tf.TensorShape`. TF: `tf.Tensor.get_shape`."""
    return TensorShape(self.shape)


def _set_shape(self: Any, shape: Any) -> None:
    """Checks that `shape` is compatible with the tensor's. TF: `tf.Tensor.set_shape`."""
    TensorShape(self.shape).assert_is_compatible_with(shape)


def _ref(self: Any) -> Reference:
    """Returns a key for dictionaries and sets, equal for the same tensor only.

    TF: `tf.Tensor.ref`.
    """
    return Reference(self)


#: The members of graphs' tensors, and their replacements.
_UNSUPPORTED = {
    "eval": "there are no sessions: use tensor.numpy()",
    "graph": "there are no graphs",
    "name": "tensors have no names",
    "op": "there are no graphs: tensors do not know what made them",
}

#: The errors of `if`, `int()`, `range()` and their kin on a value that is being traced.
_NOTED: tuple[Any, ...] = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)

#: NumPy's functions of the shape and dtype of an array, which do not need its value.
_OF_SHAPE_AND_DTYPE = frozenset(
    (np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj, np.isrealobj)
)


def _array_function(
    self: jax.Array, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what one of NumPy's functions returns of arrays (`__array_function__`).

    By default NumPy calls the array's own method if it has one (`np.mean`, `np.squeeze`), so that
    some of its functions return a `jax.Array`: it cannot be the key of a dictionary, and is no
    `np.integer`. JAX itself relies on that (`jax.hessian` calls `np.reshape`).
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if func in _OF_SHAPE_AND_DTYPE or caller.partition(".")[0] == "jax":
        return func.__wrapped__(*args, **kwargs)
    args, kwargs = jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, (args, kwargs)
    )
    return func(*args, **kwargs)


def _noted(init: Callable[..., None]) -> Any:
    """Wraps the initialization of an error that Python wants a value; see `note_raised`."""

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        from unison.program.control_flow import note_raised  # later: its imports take longer

        init(self, *args, **kwargs)
        note_raised(self, sys._getframe(1))

    return noted


def patch_jax() -> None:
    """Gives JAX's arrays, and its values inside traced programs, TensorFlow's methods."""
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    if "UNISON_CPU_DEVICES" in os.environ:  # otherwise the import takes longer for nothing
        from unison.runtime.devices import hold_stated_devices

        hold_stated_devices()
    kinds: tuple[Any, ...] = (jax.Array, jax.core.Tracer)
    for kind in kinds:
        kind.numpy = _numpy
        kind.get_shape = _get_shape
        kind.set_shape = _set_shape
        kind.ref = _ref
        kind.experimental_ref = _ref
        kind.assign = property(assign_of)
    for name, instead in _UNSUPPORTED.items():
        member = UnsupportedMember(instead)
        member.__set_name__(jax.Array, name)
        setattr(jax.Array, name, member)
    arrays: Any = jax.Array
    arrays.__array_function__ = _array_function
    for error in _NOTED:
        error.__init__ = _noted(error.__init__)


def patch_operators(as_tensor: Callable[[Any, Any], Any]) -> None:
    """Extends the operators of JAX's arrays; `tensors` calls it, for its imports take longer.

    Args:
        as_tensor: Converts a list to an array of a dtype.
    """
    from unison.runtime.private_jax import ArrayImpl
    from unison.tf.operands import TAKE_LISTS, taking_lists
    from unison.tf.slicing import with_computed_bounds

    kinds: tuple[Any, ...] = (ArrayImpl, jax.core.Tracer)
    for kind in kinds:
        kind.__getitem__ = with_computed_bounds(kind.__getitem__)
        for name in TAKE_LISTS:
            setattr(kind, name, taking_lists(getattr(kind, name), as_tensor))
