"""What a value is when there are several replicas: `PerReplica` and `Mirrored`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.precision import device_dtype


class DistributedValues:
    """A value with one component a replica; see `PerReplica` and `Mirrored`.

    TF: `tf.distribute.DistributedValues`.
    """

    __slots__ = ("_components", "_values")
    _components: tuple[Any, ...] | None

    def __init__(self, values: Sequence[Any]):
        components = tuple(values)
        if not components:
            raise ValueError(
                f"{type(self).__name__} needs one value a replica. Received: no values."
            )
        self._components = components
        self._values: tuple[Any, ...] | None = None

    @property
    def components(self) -> tuple[Any, ...]:
        """The components, ordered by replica index, each where it lies."""
        assert self._components is not None
        return self._components

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, ordered by replica index, on one device: they can be computed with
        each other. They are brought there when this is asked for first.
        """
        if self._values is None:
            self._values = _on_one_device(self.components)
        return self._values

    def __repr__(self) -> str:
        lines = [f"  {index}: {value!r}" for index, value in enumerate(self.values)]
        return "\n".join([f"{type(self).__name__}:{{", *lines, "}"])


@jax.tree_util.register_pytree_node_class
class PerReplica(DistributedValues):
    """One value a replica; the values may differ, also in shape.

    As an argument of `strategy.run` each replica gets its own component. What `run` returns is
    kept as one array spread over the devices, and is cut into `.components` when asked for.

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
        value._components = value._values = None
        value._stacked = stacked
        value._placement = placement
        return value

    @property
    def components(self) -> tuple[Any, ...]:
        if self._components is None:
            assert self._placement is not None and self._stacked is not None
            self._components = self._placement.slices(self._stacked)
        return self._components

    def stacked(self, placement: Placement) -> jax.Array | None:
        """Returns the components as one array spread over `placement`, or None where their
        shapes or dtypes differ.

        Raises:
            ValueError: There are not as many components as replicas.
            TypeError: A component is neither an array nor a number.
        """
        if self._stacked is not None and self._placement == placement:
            return self._stacked
        values = [_as_array(value) for value in self.components]
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
        if not any(isinstance(value, np.ndarray) for value in self.components):
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


class ReplicaLocal(DistributedValues):
    """The values of all replicas, inside a traced `merge_call`, known by this replica's own.

    Args:
        local: This replica's component.
    """

    __slots__ = ("local",)

    def __init__(self, local: Any):
        super().__init__([local])
        self.local = local

    @property
    def components(self) -> tuple[Any, ...]:
        """All replicas' components; reading them gathers."""
        gathered = lax.all_gather(self.local, REPLICA_AXIS)
        count = lax.axis_size(REPLICA_AXIS)
        return tuple(jax.tree.map(operator.itemgetter(index), gathered) for index in range(count))

    def __repr__(self) -> str:
        return f"ReplicaLocal({self.local!r})"


def _on_one_device(components: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `components` with all concrete arrays on the device of the first."""
    arrays = [value for value in components if _is_concrete(value)]
    if len({value.sharding for value in arrays}) < 2:
        return components
    home = arrays[0].sharding
    return tuple(
        jax.device_put(value, home) if _is_concrete(value) else value for value in components
    )


def _is_concrete(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def _as_array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if not is_numeric(array.dtype):
        raise TypeError(
            f"The components of a PerReplica value must be arrays or numbers. Received: {value!r}"
        )
    return array.astype(device_dtype(array.dtype), copy=False)


def is_numeric(dtype: np.dtype) -> bool:
    """Whether programs can compute with arrays of `dtype`."""
    return jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_


def is_distributed(value: Any) -> bool:
    """Whether `value` has one component a replica."""
    return isinstance(value, DistributedValues)
