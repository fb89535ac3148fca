"""`ArraySpec`: a saved program's requirements for an array, and their check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.runtime.precision import device_dtype


class DoesNotFitError(TypeError):
    """An argument does not fit the program."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The known properties of an array: None is an unknown size.

    Attributes:
        shape: The sizes.
        dtype: The dtype.
        name: The name of the argument or result.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    name: str | None = None

    @classmethod
    def of(cls, spec: Any) -> ArraySpec:
        """Returns the spec of a `tf.TensorSpec`, a `jax.ShapeDtypeStruct`, an array, ...

        Raises:
            ValueError: The number of axes is unknown.
        """
        name = getattr(spec, "name", None)
        rank = getattr(spec.shape, "rank", 0)
        if spec.shape is None or rank is None:
            raise ValueError(
                f"A saved function needs to know how many axes its arguments have. Received: "
                f"{spec!r}. Give the sizes, with None for those that may be any: shape=[None, 3]."
            )
        return cls(tuple(spec.shape), device_dtype(spec.dtype), name)

    @property
    def is_batch(self) -> bool:
        """Whether the size of the first axis is unknown."""
        return bool(self.shape) and self.shape[0] is None

    def fits(self, array: Any) -> bool:
        """Whether `array` has the dtype and the sizes."""
        sizes = tuple(array.shape)
        return (
            array.dtype == self.dtype
            and len(sizes) == len(self.shape)
            and all(want in (None, size) for want, size in zip(self.shape, sizes, strict=True))
        )


def fitted(value: Any, spec: ArraySpec) -> Any:
    """Returns `value` as an array that fits `spec`. Raises: DoesNotFitError."""
    if callable(getattr(value, "__jax_array__", None)):
        value = value.__jax_array__()  # a variable
    if not isinstance(value, jax.Array):
        try:
            array = np.asarray(value, None if hasattr(value, "dtype") else spec.dtype)
        except (TypeError, ValueError):
            raise DoesNotFitError(f"Received: {shown(value)}") from None
        value = jnp.asarray(array, dtype=array.dtype)
    if not spec.fits(value):
        raise DoesNotFitError(f"Received: {shown(value)}")
    return value


def arrays_for(
    expected: Any, received: Any, as_array: Callable[[Any, ArraySpec], Any] = fitted
) -> list[Any]:
    """Returns the arrays in `received`, in the order of the specs in `expected`.

    Args:
        expected: A structure with a spec for every array.
        received: A structure with the arrays.
        as_array: Returns a value as an array that fits a spec.

    Raises:
        DoesNotFitError: They do not fit.
    """
    if isinstance(expected, ArraySpec):
        return [as_array(received, expected)]
    if isinstance(expected, dict):
        if not isinstance(received, dict) or received.keys() != expected.keys():
            raise DoesNotFitError(f"Received: {shown(received)}")
        pairs = [(expected[key], received[key]) for key in sorted(expected)]
        return [array for pair in pairs for array in arrays_for(*pair, as_array)]
    if isinstance(expected, list | tuple):
        if not isinstance(received, list | tuple) or len(received) != len(expected):
            raise DoesNotFitError(f"Received: {shown(received)}")
        pairs = list(zip(expected, received, strict=True))
        return [array for pair in pairs for array in arrays_for(*pair, as_array)]
    if type(received) is not type(expected) or received != expected:
        raise DoesNotFitError(f"Received: {shown(received)}")
    return []


def described(value: Any) -> Any:
    """Returns an `ArraySpec` for an array, and anything else unchanged."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return value
    dtype = getattr(value.dtype, "as_numpy_dtype", value.dtype)  # of TensorFlow's tensors
    return ArraySpec(tuple(value.shape), np.dtype(dtype))


def shown(structure: Any) -> str:
    """Returns arguments, or their specs, as text for messages."""
    structure = described(structure)
    if isinstance(structure, ArraySpec):
        sizes = ", ".join("None" if size is None else str(size) for size in structure.shape)
        return f"{structure.dtype.name}[{sizes}]"
    if isinstance(structure, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in structure.items()) + "}"
    if isinstance(structure, list | tuple):
        return "(" + ", ".join(map(shown, structure)) + ")"
    return repr(structure)


def filled(inputs: Any, arrays: Sequence[jax.Array]) -> Any:
    """Returns `inputs` with the specs replaced by the arrays, in order."""
    remaining = iter(arrays)
    return jax.tree.map(
        lambda leaf: next(remaining) if isinstance(leaf, ArraySpec) else leaf, inputs
    )
