"""`TPUStrategy`: synchronous training on the cores of a TPU, or planning it without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from unison.collectives import CommunicationOptions
from unison.runtime.cluster_resolvers import ClusterResolver, TPUClusterResolver
from unison.runtime.placement import Placement
from unison.runtime.process_group import TIMEOUT
from unison.runtime.tpu.system import devices_of_topology, tpu_devices
from unison.runtime.tpu.topology import DeviceAssignment, coordinates_of
from unison.strategies.base import Strategy
from unison.strategies.multi_worker import input_of_workers

#: The prefix of the mesh axes of the cores of one replica, which have no names.
_CORE_AXIS = "core"


class TPUStrategy(Strategy):
    """One replica per TPU core or block of cores; every variable has an equal copy on each.

    Args:
        tpu_cluster_resolver: Describes the TPU. Default: a `TPUClusterResolver` for this machine's.
        experimental_device_assignment: Which cores compute which replica. Default: one core per
            replica.
        experimental_spmd_xla_partitioning: Accepted for compatibility with TensorFlow: the cores of
            a replica always share one program.
        topology: The name of a slice, such as `"v5e:2x4"`, that is not available here: steps are
            compiled for it (see `unison.planning`), and running one raises an error.
        sharded_update: Whether, in Keras training, each replica updates only its part of large
            weights and keeps only that part of the optimizer's state. The same number of bytes is
            sent, in two collectives.
        communication_options: How gradients are communicated, and whether to determine the fastest
            way in the first steps (`auto_tune`).

    Raises:
        NoTPUError: No TPU is available here, and no topology was given.
        UnknownSliceError: There is no slice of that name; the message lists the known ones.
        MissingTPULibraryError: libtpu, which compiles for TPUs, is not installed.
        ValueError: A topology and a resolver were given; or the cores of a replica are not all on
            one machine.

    Examples:
        ```
        strategy = unison.TPUStrategy(topology="v5e:2x4")
        with strategy.scope():
            model = build_and_compile_model()
        plan = unison.planning.plan_fit(model, images, labels)
        ```

    TF: `tf.distribute.TPUStrategy`.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        topology: str | None = None,
        sharded_update: bool = False,
        communication_options: CommunicationOptions | None = None,
    ):
        del experimental_spmd_xla_partitioning
        assignment = experimental_device_assignment
        if assignment is not None and not isinstance(assignment, DeviceAssignment):
            raise TypeError(
                "experimental_device_assignment must be a DeviceAssignment, such as "
                f"DeviceAssignment.build(topology, ...). Received: {assignment!r}"
            )
        if topology is not None and tpu_cluster_resolver is not None:
            raise ValueError(
                "Expected a TPU to run on, tpu_cluster_resolver, or one to compile for, topology. "
                f"Received: both, {tpu_cluster_resolver!r} and {topology!r}."
            )
        if topology is None:
            self.cluster_resolver = tpu_cluster_resolver or TPUClusterResolver()
            cores = tpu_devices(self.cluster_resolver)
        else:
            cores = devices_of_topology(topology)
        if assignment is not None:
            cores = _assigned(cores, assignment)
        cores_per_replica = 1 if assignment is None else assignment.num_cores_per_replica
        super().__init__(
            cores,
            core_axes=_unnamed_core_axes(cores_per_replica),
            may_be_alone=getattr(self.cluster_resolver, "is_local", False),
            communication_options=communication_options,
        )
        self.placement.shards_update = sharded_update
        if self.placement.spans_processes and jax.process_count() > 1:
            self.input_workers = input_of_workers(TIMEOUT)

    def experimental_split_to_logical_devices(
        self, tensor: jax.Array, partition_dimensions: Sequence[int]
    ) -> jax.Array:
        """Divides an array, and the computation on it, among the cores of its replica.

        Args:
            tensor: An array in a function that `run` calls.
            partition_dimensions: Into how many parts each axis is divided; their product is the
                number of cores of a replica.

        Raises:
            ValueError: The array cannot be divided among the cores in this way.

        TF: `tf.distribute.TPUStrategy.experimental_split_to_logical_devices`.
        """
        parts = tuple(partition_dimensions)
        cores = self.placement.cores_per_replica
        if len(parts) != tensor.ndim:
            raise ValueError(
                "Length of `partition_dimensions` must equal to the rank of `tensor.shape` "
                f"({tensor.ndim}). Received len(partition_dimensions)={len(parts)}."
            )
        for axis, (size, count) in enumerate(zip(tensor.shape, parts, strict=True)):
            if count < 1 or size % count:
                raise ValueError(
                    f"Tensor shape at `partition_dimensions[{axis}]` must be divisible by "
                    f"corresponding value specified by `partition_dimensions` ({count}). "
                    f"Received: {size}."
                )
        if math.prod(parts) != cores:
            raise ValueError(
                "The product of `partition_dimensions` should be the same as the number of "
                f"logical devices (={cores}). Received `partition_dimensions`={list(parts)}, and "
                f"their product is {math.prod(parts)}."
            )
        return _constrained(tensor, _spec(parts, self.placement), self.placement)

    def experimental_replicate_to_logical_devices(self, tensor: jax.Array) -> jax.Array:
        """Replicates an array on all cores of a replica.

        TF: `tf.distribute.TPUStrategy.experimental_replicate_to_logical_devices`.
        """
        return _constrained(tensor, PartitionSpec(), self.placement)

    def experimental_assign_to_logical_device(
        self, tensor: jax.Array, logical_device_id: int
    ) -> jax.Array:
        """Returns the array unchanged: all cores of a replica run the same XLA program.

        Args:
            tensor: An array.
            logical_device_id: The index of one of the cores.

        Raises:
            ValueError: There is no such core.

        TF: `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
        """
        cores = self.placement.cores_per_replica
        if not 0 <= logical_device_id < cores:
            raise ValueError(
                f"`logical_core_id` to assign must be lower then total number of logical devices "
                f"per replica. Received: logical device id {logical_device_id} but there are only "
                f"total of {cores} logical devices in replica."
            )
        return tensor


def _assigned(cores: Sequence[jax.Device], assignment: DeviceAssignment) -> list[jax.Device]:
    """Returns the cores of the replicas, grouped by machine and by replica.

    Raises:
        ValueError: A replica's cores are on several machines, or one is not in the TPU.
    """
    at = {coordinates_of(core): core for core in cores}
    replicas = []
    for places in assignment.core_assignment.tolist():
        missing = [place for place in places if tuple(place) not in at]
        if missing:
            raise ValueError(
                f"Expected cores of this TPU, which has {len(cores)}. Received: an assignment with "
                f"{missing[0]}. Build it from this TPU's topology."
            )
        own = [at[tuple(place)] for place in places]
        machines = sorted({core.process_index for core in own})
        if len(machines) > 1:
            raise ValueError(
                "Expected the cores of a replica on one machine, which feeds them. Received: "
                f"{places}, on the machines {machines}. Choose a computation_shape that fits into "
                "the chips of one machine."
            )
        replicas.append(own)
    replicas.sort(key=lambda own: own[0].process_index)
    return [core for own in replicas for core in own]


def _spec(parts: Sequence[int], placement: Placement) -> PartitionSpec:
    """Returns a spec that divides an array into `parts`, by mesh axes with the right products."""
    axes = list(zip(placement.mesh.axis_names[1:], placement.mesh.devices.shape[1:], strict=True))
    entries = []
    for count in parts:
        chosen = []
        for factor in _prime_factors(count):
            axis = next(axis for axis in axes if axis[1] == factor)
            axes.remove(axis)
            chosen.append(axis[0])
        entries.append(tuple(chosen) or None)
    return PartitionSpec(*entries)


def _constrained(tensor: Any, spec: PartitionSpec, placement: Placement) -> Any:
    if placement.cores_per_replica == 1 or not isinstance(tensor, jax.core.Tracer):
        return tensor
    return lax.with_sharding_constraint(tensor, spec)


def _unnamed_core_axes(count: int) -> dict[str, int]:
    """Returns the axes of `count` cores: one for each prime factor, so that any way to divide a
    value between them has axes to name.

    Examples:
        >>> _unnamed_core_axes(6)
        {'core0': 2, 'core1': 3}
    """
    return {f"{_CORE_AXIS}{place}": size for place, size in enumerate(_prime_factors(count))}


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a positive number, the smallest first.

    Examples:
        >>> _prime_factors(12)
        [2, 2, 3]
    """
    factors = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
