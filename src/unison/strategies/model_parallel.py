"""`ModelParallelStrategy`: replicas of several devices each, which can divide their state."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from unison.collectives import CommunicationOptions
from unison.partitioning import PartitionRules, map_named
from unison.pipelining import PACKED, STAGE_AXIS
from unison.runtime import device_strings
from unison.runtime.cluster_resolvers import ClusterResolver, TFConfigClusterResolver
from unison.runtime.elastic import is_elastic_worker
from unison.runtime.placement import OPTIMIZER, WEIGHTS
from unison.runtime.process_group import TIMEOUT
from unison.runtime.tpu.system import devices_of_topology
from unison.strategies.base import Strategy
from unison.strategies.multi_worker import (
    devices_of_workers,
    found_resolver,
    input_of_workers,
    says_alone,
)
from unison.variables import Variable

#: The name of the mesh axis of the replicas.
BATCH_AXIS = "batch"


class ModelParallelStrategy(Strategy):
    """Divides variables, and the computation with them, among the devices of each replica.

    The mesh axis `"batch"` is that of the replicas: each computes its part of the global batch, as
    under `MirroredStrategy`. The other axes are those of the devices of one replica. Rules define
    which of them divides which axis of a variable; XLA partitions the computation accordingly, and
    inserts the communication (tensor parallelism).

    In a cluster of several workers, each of which runs the same program, the mesh uses all devices
    of all workers; see `MultiWorkerMirroredStrategy`. The devices of a replica belong to one
    worker, or to several, which then read the same examples. In a cluster, create the strategy
    before the first JAX computation.

    Args:
        devices: All devices, which must belong to this process: strings as TensorFlow writes them
            (`"GPU:0"`), `jax.Device`s, or their number. Default: as many as the mesh needs,
            accelerators if there are any; in a cluster of several workers, all of their devices.
        mesh: The sizes of the mesh axes, by name, such as `{"batch": 2, "model": 4}`. `"batch"`
            defaults to as many replicas as there are devices for. Neighbors along the last axis are
            adjacent devices: those of one worker, as far as its devices go.
        rules: The mesh axes that divide variables, by name pattern: see
            `unison.partitioning.PartitionRules`; or a `keras.distribution.LayoutMap`. A variable
            that no rule matches is replicated on the devices of a replica, except that the stages
            of a `unison.keras.Pipeline` are divided along an axis `"stage"`.
        zero: The ZeRO stage, which defines what is divided among the replicas for Keras models
            (Rajbhandari et al. 2020): 0: nothing. 1: the optimizer's state. 2: gradients as well.
            3: the weights as well: each is gathered where it is used. A gradient exists within a
            step only, where it is reduce-scattered as soon as it is computed: 1 and 2 are the same
            program.
        topology: The name of a TPU slice, such as `"v5e:2x4"`, that is not available here: steps
            are compiled for it (see `unison.planning`), and running one raises an error.
        cluster_resolver: Describes the cluster. Default: that of the launcher that has started this
            process, unless devices or a topology are given.
        communication_options: How gradients are communicated, and whether to determine the fastest
            way in the first steps (`auto_tune`).

    Raises:
        ValueError: The mesh needs more devices than there are, or does not use all; neither does a
            replica have whole workers, nor a worker whole replicas; the workers may change; or a
            rule names an axis that the mesh does not have.
        UnavailableError: The other workers did not join in time.

    Examples:
        >>> import unison
        >>> strategy = unison.ModelParallelStrategy(
        ...     mesh={"batch": 2, "model": 2}, rules={"dense.*/kernel": (None, "model")}
        ... )
        >>> strategy.num_replicas_in_sync, strategy.mesh_shape
        (2, {'batch': 2, 'model': 2})
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | str | int | None = None,
        *,
        mesh: Mapping[str, int],
        rules: Mapping[str, Any] | None = None,
        zero: int = 0,
        topology: str | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        if zero not in range(4):
            raise ValueError(f"Expected a stage of ZeRO, 0 to 3. Received: zero={zero!r}")
        if topology is not None and devices is not None:
            raise ValueError(
                "Expected devices to run on, or a topology to compile for. Received: both, "
                f"{devices!r} and {topology!r}."
            )
        resolver = cluster_resolver or _resolver(devices, topology)
        of_workers = None
        if topology is not None:
            there = devices_of_topology(topology)
        else:
            if devices is None:
                of_workers = _devices_of_workers(resolver)
            there = of_workers or device_strings.select_devices(devices)
        chooses = devices is None and topology is None and of_workers is None
        #: The sizes of the mesh axes, by name.
        self.mesh_shape = _completed(mesh, len(there), chooses)
        core_axes = {name: size for name, size in self.mesh_shape.items() if name != BATCH_AXIS}
        input_workers = None
        if of_workers is not None:
            span = _workers_per_replica(of_workers, core_axes)
            if span > 1:  # stages send the least, so other axes lie within workers first
                core_axes = dict(sorted(core_axes.items(), key=lambda axis: axis[0] != STAGE_AXIS))
            input_workers = input_of_workers(TIMEOUT, span)
        stages = {f"{PACKED}$": (STAGE_AXIS,)} if STAGE_AXIS in core_axes else {}
        parsed = PartitionRules(rules or {}, core_axes, stages)
        super().__init__(
            there[: math.prod(self.mesh_shape.values())],
            core_axes=core_axes,
            input_workers=input_workers,
            may_be_alone=says_alone(resolver),
            communication_options=communication_options,
        )
        if of_workers is not None:
            self.cluster_resolver = resolver
        if rules or stages:
            self.placement.rules = parsed
        self.placement.zero = zero
        self.placement.shards_update = zero > 0

    def predicted_bytes(self, weights: Any, slots: int = 2) -> dict[str, int]:
        """Returns the bytes of weights and an optimizer's state on each device, from their shapes.

        Args:
            weights: A Keras model's `trainable_variables`; or arrays, or `jax.ShapeDtypeStruct`s,
                by name.
            slots: How many slot values the optimizer keeps per weight: 2 for Adam.

        Examples:
            >>> import jax, unison
            >>> strategy = unison.ModelParallelStrategy(
            ...     mesh={"batch": 2, "model": 2}, rules={"kernel": (None, "model")}, zero=1
            ... )
            >>> strategy.predicted_bytes({"kernel": jax.ShapeDtypeStruct((64, 64), "float32")})
            {'weights': 8192, 'optimizer': 8192}
        """
        if not isinstance(weights, Mapping):
            weights = {weight.path: weight for weight in weights}

        def total(stage: int) -> int:
            return sum(
                math.prod(
                    NamedSharding(
                        self.placement.mesh,
                        self.placement.division_at(stage, name, tuple(weight.shape)),
                    ).shard_shape(tuple(weight.shape))
                )
                * jnp.dtype(weight.dtype).itemsize
                for name, weight in weights.items()
            )

        return {"weights": total(WEIGHTS), "optimizer": slots * total(OPTIMIZER)}

    def create_variables(self, tree: Any, of_optimizer: bool = False, **options: Any) -> Any:
        """Returns a tree of variables initialized with the arrays of `tree`.

        Each is named by its path, such as `"encoder/0/kernel"`, which the rules may match.

        Args:
            tree: A pytree of arrays: the parameters of a Flax or Equinox model.
            of_optimizer: Whether they are an optimizer's state, which `zero=1` divides.
            options: As for `unison.Variable`: `aggregation`, ...

        Examples:
            >>> import numpy as np, unison
            >>> strategy = unison.ModelParallelStrategy(
            ...     mesh={"batch": 1, "model": 4}, rules={"kernel": (None, "model")}
            ... )
            >>> variables = strategy.create_variables({"kernel": np.ones((3, 8), "float32")})
            >>> variables["kernel"].name
            'kernel'
        """

        def create(name: str, leaf: Any) -> Variable:
            variable = Variable(leaf, name=name, **options)
            if of_optimizer:
                variable.cell.shard_at(OPTIMIZER, variable.cell.aval.shape)
            return variable

        with self.scope():
            return map_named(create, tree)


def _resolver(devices: object, topology: object) -> ClusterResolver:
    """Returns the resolver of this process's launcher, if its devices may be those of workers."""
    is_of_workers = devices is None and topology is None
    return found_resolver() if is_of_workers else TFConfigClusterResolver()


def _devices_of_workers(resolver: ClusterResolver) -> list[jax.Device] | None:
    """Returns the devices of all workers, grouped by worker; None without other workers."""
    if is_elastic_worker():
        raise ValueError(
            "Expected a fixed set of workers, since each keeps parts of the variables that no "
            "other has. Received: ModelParallelStrategy under `unison run --min-workers`. Leave "
            "--min-workers out, or use MultiWorkerMirroredStrategy."
        )
    return devices_of_workers(resolver, TIMEOUT)


def _workers_per_replica(devices: Sequence[jax.Device], core_axes: Mapping[str, int]) -> int:
    """Returns how many workers compute a replica together: one, unless it needs several.

    Raises:
        ValueError: Neither does a worker have whole replicas, nor a replica whole workers.
    """
    cores = math.prod(core_axes.values())
    counts = {*collections.Counter(device.process_index for device in devices).values()}
    if all(count % cores == 0 for count in counts):
        return 1
    if len(counts) > 1 or cores % (count := min(counts)):
        raise ValueError(
            "Expected workers that have the devices of whole replicas, or replicas of all devices "
            f"of some workers. Received: workers with {' and '.join(map(str, sorted(counts)))} "
            f"devices, and replicas of {cores}, {dict(core_axes)}. Make these axes smaller or "
            "larger, or give each worker another number of devices (`unison run "
            "--devices-per-worker`)."
        )
    return cores // count


def _completed(mesh: Mapping[str, int], there: int, chooses: bool) -> dict[str, int]:
    """Returns the mesh with the replicas' axis first, for `there` devices.

    Raises:
        ValueError: The mesh is invalid, needs more devices, or needs fewer and `chooses` is False.
    """
    if not isinstance(mesh, Mapping) or not all(
        isinstance(size, int) and size > 0 for size in mesh.values()
    ):
        raise ValueError(
            "Expected the sizes of the mesh axes by name, such as {'batch': 2, 'model': 4}. "
            f"Received: {mesh!r}"
        )
    if "replica" in mesh:
        raise ValueError(
            f"Expected the replicas' mesh axis under the name {BATCH_AXIS!r}. Received: {mesh!r}"
        )
    per_replica = math.prod(size for name, size in mesh.items() if name != BATCH_AXIS)
    batch = mesh.get(BATCH_AXIS, max(1, there // per_replica))
    needed = batch * per_replica
    if needed > there or (needed < there and not chooses):
        raise ValueError(
            f"Expected a mesh for the {there} devices that there are. Received: {dict(mesh)}, "
            f"which takes {needed}. (Logical CPU devices: unison.set_logical_cpu_devices.)"
        )
    return {BATCH_AXIS: batch} | {n: size for n, size in mesh.items() if n != BATCH_AXIS}
