"""Algorithms by which a strategy combines the values of its devices, as TensorFlow offers them.

The algorithms give the same sums up to round-off. A strategy uses the chosen one in
`ReplicaContext.all_reduce`, for the updates of its variables, and in `reduce` and `extended`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.cells import has_cell
from unison.collectives.communication import CommunicationOptions
from unison.collectives.components import reduce_components, sum_dtype
from unison.collectives.operations import ReduceOp, broadcast
from unison.collectives.packing import all_reduce_packed, reduce_packed
from unison.collectives.tree import all_reduce_tree
from unison.runtime import device_strings
from unison.runtime.placement import placement_in_scope
from unison.values import DistributedValues, Mirrored, PerReplica

#: The destinations of a result: devices (or their names), or a value or variable on them.
Destinations = Any


class CrossDeviceOps:
    """Combines values of several devices; the base class of the algorithms and of custom ones.

    A subclass defines in `sum_over_replicas` how replica programs sum. Outside of programs,
    `reduce_implementation`, `batch_reduce_implementation` and `broadcast_implementation` implement
    `reduce`, `batch_reduce` and `broadcast`.

    TF: `tf.distribute.CrossDeviceOps`.
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the components of `per_replica_value`.

        Args:
            reduce_op: A `ReduceOp` or its name.
            per_replica_value: A `PerReplica`; an array counts as one component.
            destinations: Devices (or names of devices), or a distributed value or variable on them.
            options: How the values are communicated.

        Returns:
            The result, as a `Mirrored` if there are several destinations.

        Raises:
            ValueError: There is no such operation or device.

        TF: `tf.distribute.CrossDeviceOps.reduce`.
        """
        op = ReduceOp.parse(reduce_op)
        return self.reduce_implementation(op, per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values, each for its destinations; see `reduce`.

        TF: `tf.distribute.CrossDeviceOps.batch_reduce`.
        """
        op = ReduceOp.parse(reduce_op)
        return self.batch_reduce_implementation(op, value_destination_pairs, options)

    def broadcast(self, tensor: Any, destinations: Destinations) -> Any:
        """Returns `tensor` on all `destinations`: a `Mirrored` if there are several.

        TF: `tf.distribute.CrossDeviceOps.broadcast`.
        """
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions | None,
    ) -> Any:
        """Implements `reduce`, for arguments that have been checked."""
        raise NotImplementedError(f"{type(self).__name__} does not implement reduce.")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """Implements `batch_reduce`, for arguments that have been checked."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Destinations) -> Any:
        """Implements `broadcast`."""
        count = _number_of(destinations)
        return tensor if count == 1 else Mirrored([tensor] * count)

    def sum_over_replicas(self, tensors: Sequence[jax.Array], axis_name: str) -> list[jax.Array]:
        """Returns the sums over the replicas of `tensors`, inside a replica program."""
        return all_reduce_packed(tensors, axis_name)


class _InPacks(CrossDeviceOps):
    """Sums tensors in packs of one buffer each.

    Args:
        num_packs: The number of packs; 0: one for each tensor.

    Raises:
        ValueError: `num_packs` is negative.
    """

    def __init__(self, num_packs: int = 1):
        if num_packs < 0:
            raise ValueError(f"num_packs must be 0 or more. Received: num_packs={num_packs}")
        self.num_packs = num_packs

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions | None,
    ) -> Any:
        total = reduce_components(reduce_op, _components(per_replica_value))
        return self.broadcast_implementation(total, destinations)

    def sum_over_replicas(self, tensors: Sequence[jax.Array], axis_name: str) -> list[jax.Array]:
        packs = _divided(list(tensors), self.num_packs or len(tensors))
        return [total for pack in packs for total in self._sum_of_pack(pack, axis_name)]

    def _sum_of_pack(self, pack: list[jax.Array], axis_name: str) -> list[jax.Array]:
        return all_reduce_packed(pack, axis_name, is_buffer_wanted=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


class NcclAllReduce(_InPacks):
    """Uses XLA's all-reduce: NCCL's on GPUs, which chooses rings and trees.

    XLA may combine small packs (on CPU it combines all).

    Args:
        num_packs: Into how many buffers the tensors are packed; 0: one for each tensor.

    TF: `tf.distribute.NcclAllReduce`.
    """


class HierarchicalCopyAllReduce(_InPacks):
    """Sums along a tree, in which pairs of devices exchange and add values.

    Args:
        num_packs: Into how many buffers the tensors are packed; 0: one for each tensor.

    TF: `tf.distribute.HierarchicalCopyAllReduce`.
    """

    def _sum_of_pack(self, pack: list[jax.Array], axis_name: str) -> list[jax.Array]:
        everybody = (tuple(range(lax.axis_size(axis_name))),)
        return reduce_packed(pack, lambda buffer: all_reduce_tree(buffer, everybody, axis_name))


class ReductionToOneDevice(CrossDeviceOps):
    """One device adds up the values of all, and sends the sum to the others.

    Every sum is added up in one place and in the order of the replicas.

    Args:
        reduce_to_device: The device that adds: its name, or a `jax.Device`. Default, and if it is
            not one of the replicas' devices: that of the first replica.
        accumulation_fn: A function of a list of arrays of one shape that adds them up. Default:
            one after the other.

    TF: `tf.distribute.ReductionToOneDevice`.
    """

    def __init__(
        self,
        reduce_to_device: str | jax.Device | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ):
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn or _in_turn

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Destinations,
        options: CommunicationOptions | None,
    ) -> Any:
        parts = _components(per_replica_value)
        if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
            total = reduce_components(reduce_op, parts)
        else:
            arrays = [_counted(jnp.asarray(part)) for part in parts]
            if self.reduce_to_device is not None:
                device = device_strings.resolve(self.reduce_to_device)
                arrays = [jax.device_put(array, device) for array in arrays]
            total = self.accumulation_fn(arrays)
            total = total / len(arrays) if reduce_op is ReduceOp.MEAN else total
        return self.broadcast_implementation(total, destinations)

    def sum_over_replicas(self, tensors: Sequence[jax.Array], axis_name: str) -> list[jax.Array]:
        place = self._place()
        adds = lax.axis_index(axis_name) == place

        def total(tensor: jax.Array) -> jax.Array:
            values = lax.all_gather(tensor, axis_name)
            summed = lax.cond(
                adds, lambda: self.accumulation_fn(list(values)), lambda: jnp.zeros_like(tensor)
            )
            return broadcast(summed, place, axis_name)

        return [total(tensor) for tensor in tensors]

    def _place(self) -> int:
        """Returns the index of the replica that adds."""
        devices = placement_in_scope().devices
        wanted = self.reduce_to_device
        chosen = None if wanted is None else device_strings.resolve(wanted)
        return devices.index(chosen) if chosen in devices else 0

    def __repr__(self) -> str:
        return f"ReductionToOneDevice({self.reduce_to_device!r})"


def _divided(tensors: list[jax.Array], count: int) -> list[list[jax.Array]]:
    """Returns `tensors` in `count` packs, or one each if there are fewer; the last is largest."""
    count = max(1, min(count, len(tensors)))
    starts = [index * (len(tensors) // count) for index in range(count)]
    ends = [*starts[1:], len(tensors)]
    return [tensors[start:end] for start, end in zip(starts, ends, strict=True)]


def _counted(array: jax.Array) -> jax.Array:
    """Returns an array that can be summed: Booleans are counted."""
    return array.astype(sum_dtype(array.dtype))


def _in_turn(values: list[Any]) -> Any:
    total, *others = values
    for value in others:
        total = total + value
    return total


def _components(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mirrored):
        return value.values[:1]
    return value.values if isinstance(value, PerReplica) else (value,)


def _number_of(destinations: Destinations) -> int:
    """Returns the number of destination devices."""
    if has_cell(destinations):
        return destinations.cell.placement.num_replicas
    if isinstance(destinations, DistributedValues):
        return len(destinations.components)
    if isinstance(destinations, str | jax.Device):
        destinations = [destinations]
    if isinstance(destinations, list | tuple):
        return len({device_strings.resolve(device) for device in destinations})
    return 1
