"""What a value is when there are several replicas: `PerReplica` and `Mirrored`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.runtime.placement import Placement


class DistributedValues:
    """A value with one component a replica; see `PerReplica` and `Mirrored`."""

    __slots__ = ("_values",)
    _values: tuple[Any, ...] | None

    def __init__(self, values: Sequence[Any]):
        values = tuple(values)
        if not values:
            raise ValueError(
                f"{type(self).__name__} needs one value a replica. Received: no values."
            )
        self._values = values

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, ordered by replica index."""
        assert self._values is not None
        return self._values

    def __repr__(self) -> str:
        lines = [f"  {index}: {value!r}" for index, value in enumerate(self.values)]
        return "\n".join([f"{type(self).__name__}:{{", *lines, "}"])


@jax.tree_util.register_pytree_node_class
class PerReplica(DistributedValues):
    """One value a replica; the values may differ, also in shape.

    As an argument of `strategy.run` each replica gets its own component. What `run` returns is
    kept as one array spread over the devices, and is cut into `.values` when asked for.

    Args:
        values: One array (or number) a replica, in order.

    Example:
        >>> PerReplica([1, 2])
        PerReplica:{
          0: 1
          1: 2
        }

    TF: `tf.distribute.DistributedValues` (`PerReplica`).
    """

    __slots__ = ("_placement", "_stacked")

    def __init__(self, values: Sequence[Any]):
        super().__init__(values)
        self._stacked: jax.Array | None = None
        self._placement: Placement | None = None

    @classmethod
    def from_stacked(cls, stacked: jax.Array, placement: Placement) -> PerReplica:
        """Returns the value whose component r is `stacked[r]`, which lies on device r."""
        value = cls.__new__(cls)
        value._values = None
        value._stacked = stacked
        value._placement = placement
        return value

    @property
    def values(self) -> tuple[Any, ...]:
        if self._values is None:
            assert self._placement is not None and self._stacked is not None
            self._values = self._placement.slices(self._stacked)
        return self._values

    def stacked(self, placement: Placement) -> jax.Array | None:
        """Returns the components as one array spread over `placement`, or None where their
        shapes or dtypes differ.

        Raises:
            ValueError: There are not as many components as replicas.
            TypeError: A component is neither an array nor a number.
        """
        if self._stacked is not None and self._placement == placement:
            return self._stacked
        values = [_as_array(value) for value in self.values]
        if len(values) != placement.num_replicas:
            raise ValueError(
                f"A PerReplica value needs one component for each of the {placement.num_replicas} "
                f"replicas. Received: {len(values)} components."
            )
        if len({(value.shape, value.dtype) for value in values}) > 1:
            return None
        if all(isinstance(value, np.ndarray) for value in values):
            stacked = placement.spread(np.stack(values))
        else:
            shards = [
                jax.device_put(value, device)[None]
                for value, device in zip(values, placement.devices, strict=True)
            ]
            shape = (placement.num_replicas, *values[0].shape)
            stacked = jax.make_array_from_single_device_arrays(shape, placement.per_replica, shards)
        if not any(isinstance(value, np.ndarray) for value in self.values):
            # Components that cannot change are placed once.
            self._stacked, self._placement = stacked, placement
        return stacked

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.values, None

    @classmethod
    def tree_unflatten(cls, _: None, values: Sequence[Any]) -> PerReplica:
        return cls(values)


@jax.tree_util.register_pytree_node_class
class Mirrored(DistributedValues):
    """The same value on every replica.

    TF: `tf.distribute.DistributedValues` (`Mirrored`).
    """

    __slots__ = ()

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.values, None

    @classmethod
    def tree_unflatten(cls, _: None, values: Sequence[Any]) -> Mirrored:
        return cls(values)


def _as_array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if not is_numeric(array.dtype):
        raise TypeError(
            f"The components of a PerReplica value must be arrays or numbers. Received: {value!r}"
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def is_numeric(dtype: np.dtype) -> bool:
    """Whether programs can compute with arrays of `dtype`."""
    return jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_


def is_distributed(value: Any) -> bool:
    """Whether `value` has one component a replica."""
    return isinstance(value, DistributedValues)
