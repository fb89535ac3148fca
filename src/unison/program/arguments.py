"""The arguments of a program: each leaf's description, and the value passed for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from unison.cells import has_cell
from unison.eager_fallback import NeedsPythonError
from unison.program.compiling import MIRRORED, PER_REPLICA
from unison.program.identity import ById, key_of
from unison.runtime.placement import Placement
from unison.runtime.precision import array_type, device_array
from unison.values import Mirrored, PerReplica, is_distributed, is_numeric


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is part of the program, not of its input."""

    key: Any
    value: Any = dataclasses.field(compare=False)

    spec: ClassVar[PartitionSpec] = MIRRORED


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """An array that every replica gets."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False

    spec: ClassVar[PartitionSpec] = MIRRORED

    def aval(self, replica: int) -> Any:
        del replica
        return array_type(self.shape, self.dtype, self.weak_type)

    def of_replica(self, stored: Any, replica: int) -> Any:
        del replica
        return stored


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """One array per replica, all of one shape, stacked along a leading axis."""

    shape: tuple[int, ...]
    dtype: Any

    spec: ClassVar[PartitionSpec] = PER_REPLICA

    def aval(self, replica: int) -> Any:
        del replica
        return array_type(self.shape[1:], self.dtype)

    def of_replica(self, stored: Any, replica: int) -> Any:
        del replica
        return stored[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Ragged:
    """One array per replica, of different shapes; stored padded to a common shape."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: Any

    spec: ClassVar[PartitionSpec] = PER_REPLICA

    def aval(self, replica: int) -> Any:
        return array_type(self.shapes[replica], self.dtype)

    def of_replica(self, stored: Any, replica: int) -> Any:
        return stored[0][tuple(slice(size) for size in self.shapes[replica])]


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        structure: The structure of `(args, kwargs)`.
        descriptions: A description of every leaf; calls with equal descriptions share a program.
        operands: The value passed to the program for every leaf (None if static).
    """

    structure: Any
    descriptions: tuple[Any, ...]
    operands: list[Any]

    @classmethod
    def of(
        cls,
        args: tuple,
        kwargs: dict[str, Any],
        placement: Placement,
        describe: Callable[[Any, Placement], tuple[Any, Any]],
    ) -> Arguments:
        """Describes every leaf of `(args, kwargs)` by `describe`."""
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_distributed)
        described = [describe(leaf, placement) for leaf in leaves]
        return cls(
            structure,
            tuple([description for description, _ in described]),
            [operand for _, operand in described],
        )


def describe_for_function(leaf: Any, placement: Placement) -> tuple[Any, Any]:
    """Describes a leaf like `describe`, by the rules of `unison.functions`.

    A leaf that is not an array is part of the program, compared by value (numbers, strings) or by
    identity. A `jax.ShapeDtypeStruct` stands for an array if nothing is run.

    Raises:
        NeedsPythonError: The leaf has a component for each of several replicas.
        RuntimeError: The leaf is traced: this call is inside a function that JAX transforms.
    """
    if is_distributed(leaf):
        raise NeedsPythonError("A value of several replicas goes to programs of their strategy.")
    if isinstance(leaf, np.ndarray | np.generic) and is_numeric(leaf.dtype):
        leaf = device_array(leaf)
    if isinstance(leaf, jax.Array):
        return describe(leaf, placement)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Whole(leaf.shape, leaf.dtype), None
    return Static(key_of(leaf), leaf), None


def describe(leaf: Any, placement: Placement) -> tuple[Any, Any]:
    """Returns the leaf's description and what is passed to the program (None if static).

    Raises:
        TypeError: The leaf is not a valid argument of a program.
        RuntimeError: The leaf is traced: this call is inside a function that JAX transforms.
    """
    if isinstance(leaf, Mirrored):
        leaf = leaf.values[0]
    if isinstance(leaf, PerReplica):
        stacked = leaf.stacked(placement)
        if stacked is not None:
            return Stacked(stacked.shape, stacked.dtype), stacked
        padded, shapes = leaf.padded(placement)
        return Ragged(shapes, padded.dtype), padded
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, jax.core.Tracer):
            raise RuntimeError(INSIDE_A_TRANSFORMATION)
        if not placement.holds(leaf):
            leaf = placement.bring(leaf)
        # Random keys have no weak type.
        return Whole(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)), leaf
    if isinstance(leaf, bool | str | bytes):
        return Static((type(leaf), leaf), leaf), None
    if isinstance(leaf, int | float | complex) and not isinstance(leaf, np.generic):
        return Whole((), jnp.result_type(type(leaf)), weak_type=True), leaf
    if isinstance(leaf, np.ndarray | np.generic) and is_numeric(leaf.dtype):
        if leaf.dtype.itemsize == 8:
            leaf = device_array(leaf)
        return Whole(leaf.shape, leaf.dtype), leaf
    if has_cell(leaf):
        return Static(ById(leaf), leaf), None
    raise TypeError(
        "run() takes arrays, numbers, strings, variables and PerReplica values, in any nesting. "
        f"Received: {leaf!r} of type {type(leaf).__name__}. Let the function close over other "
        "objects (functools.partial, a lambda) instead of taking them as arguments."
    )


INSIDE_A_TRANSFORMATION = (
    "strategy.run() compiles the function that it gets, and cannot be called inside a function "
    "that JAX traces (jax.jit, jax.grad, jax.vmap, ...). Call it from plain Python, and use the "
    "transformation inside the function that it runs."
)


def classes_of(descriptions: Sequence[Any], num_replicas: int) -> tuple[list[int], list[int]]:
    """Groups the replicas by the shapes they get.

    Returns the class of every replica, and for every class the first replica in it.
    """
    ragged = [description for description in descriptions if isinstance(description, Ragged)]
    shapes = [tuple(leaf.shapes[replica] for leaf in ragged) for replica in range(num_replicas)]
    distinct = list(dict.fromkeys(shapes))
    return [distinct.index(shape) for shape in shapes], [shapes.index(shape) for shape in distinct]
