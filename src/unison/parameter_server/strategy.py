"""`ParameterServerStrategy`: variables on servers, functions on workers."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.collectives import ReduceOp
from unison.compression.quantized import Quantized
from unison.parameter_server.cells import RemotePlacement
from unison.parameter_server.compressed import check
from unison.parameter_server.partitioners import Partitioner
from unison.parameter_server.programs import is_tracing
from unison.parameter_server.store import Store
from unison.runtime.cluster import ClusterSpec
from unison.runtime.device_strings import select_devices
from unison.strategies import Strategy, context
from unison.strategies.default import default_strategy
from unison.values import PerReplica, is_distributed


class ParameterServerStrategy(Strategy):
    """Keeps variables on parameter servers; a `ClusterCoordinator` runs functions on workers.

    It is created in one process, the coordinator. Variables that are created in its scope are on
    the servers: undivided ones on the server that holds the fewest bytes, divided ones on several.
    Every worker computes gradients with the current values, and the servers update the variables
    with them in the order of arrival.

    Args:
        cluster_resolver: The resolver of the cluster, with servers (`ps`) and workers (`worker`).
            Default: `TF_CONFIG`, which `unison run --ps` sets.
        variable_partitioner: Determines the number of shards of each variable.
        timeout_seconds: The timeout for the servers to start; also for workers to connect while
            none is connected, and for heartbeats.
        max_staleness: The maximum number of scheduled functions that a worker may be ahead of the
            slowest one: faster ones wait (bounded staleness; Ho et al., 2013, "More effective
            distributed ML via a stale synchronous parallel parameter server"). Default: no limit.
        synchronous: Whether each scheduled function is a step of all workers together: every
            worker runs it, on its own batch, and the servers update the variables once, with the
            sum of the workers' pushes. A replica function then runs as one of
            `num_replicas_in_sync` replicas, as under `MirroredStrategy`: `optimizer.apply` sums
            gradients, `all_reduce` sums its argument, and the new values cannot be read before the
            step is over.
        backup_workers: With `synchronous`, the number of workers that a step does not wait for: it
            uses the first pushes, and later pushes for the same step are dropped, together with
            their batches (Chen et al., 2016, "Revisiting Distributed Synchronous SGD"; TF:
            `SyncReplicasOptimizer(replicas_to_aggregate=workers - backup_workers,
            total_num_replicas=workers)`).
        compression: The encoding of gradients, and of variables that workers pull: `bfloat16()`,
            `float16()`, `int8()` or `int4()` of `unison.compression`, whose rule selects the
            variables. Variables are rounded only for the transfer. Default: no compression.

    Raises:
        ValueError: The cluster has no servers or no workers, or this process is one of them; or
            there are not more workers than `backup_workers`.
        DeadlineExceededError: A server does not start in time.

    TF: `tf.distribute.ParameterServerStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Partitioner | None = None,
        timeout_seconds: float = 60.0,
        max_staleness: int | None = None,
        synchronous: bool = False,
        backup_workers: int = 0,
        compression: Quantized | None = None,
    ):
        if cluster_resolver is None:
            from unison.runtime.cluster_resolvers import TFConfigClusterResolver

            cluster_resolver = TFConfigClusterResolver()
        cluster = ClusterSpec(cluster_resolver.cluster_spec())
        _check(cluster, getattr(cluster_resolver, "task_type", None))
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                "Expected a partitioner, such as MinSizePartitioner(), for variable_partitioner. "
                f"Received: {variable_partitioner!r}"
            )
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"Expected at least 0 for max_staleness. Received: {max_staleness}")
        workers = cluster.num_tasks("worker")
        check(compression)
        _check_mode(workers, max_staleness, synchronous, backup_workers)
        (device,) = select_devices(None)[:1]
        self.cluster_resolver = cluster_resolver
        super().__init__([device], may_be_alone=True)  # the cluster has the others
        self.synchronous = synchronous
        self.timeout_seconds = timeout_seconds
        self.max_staleness = max_staleness
        addresses = [cluster.task_address("ps", index) for index in cluster.task_indices("ps")]
        self.worker_addresses = [
            cluster.task_address("worker", index) for index in cluster.task_indices("worker")
        ]
        #: The servers.
        self.store = Store(addresses, timeout_seconds, "coordinator", secrets.token_hex(8))
        in_sync = workers - backup_workers if synchronous else 1
        self._placement = RemotePlacement(
            device, self.store, variable_partitioner, in_sync, compression
        )
        self._programs.placement = self._placement
        #: Prevents the creation of two coordinators; see `ClusterCoordinator`.
        self.coordinator_lock = threading.Lock()
        self.coordinator: Any = None

    def __repr__(self) -> str:
        servers, workers = len(self.store.addresses), len(self.worker_addresses)
        return f"ParameterServerStrategy({workers} workers, {servers} servers)"

    def __reduce__(self) -> Any:
        """Pickles as the default strategy, which a dataset function then uses on a worker."""
        return default_strategy, ()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of workers whose gradients form an update: 1 in asynchronous training."""
        return self.num_replicas_now

    @property
    def num_replicas_now(self) -> int:
        return getattr(self._placement, "in_sync", 1)

    @property
    def remote_placement(self) -> RemotePlacement:
        """The placement of the variables."""
        assert isinstance(self._placement, RemotePlacement)
        return self._placement

    def keras_trainer(self) -> Callable[[Any, Strategy], Any]:
        from unison.parameter_server.keras_fit import ParameterServerTrainer

        trainer: Any = ParameterServerTrainer
        return trainer

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls `fn` on one replica: in a scheduled function, the worker's replica.

        See `Strategy.run`. Outside of scheduled functions it runs in the coordinator's process:
        the variables are fetched, and written back.
        """
        if not is_tracing():
            return super().run(fn, args, kwargs, options)
        context.require_cross_replica_context("strategy.run()")
        with self.replica_context():
            return fn(*args, **(kwargs or {}))

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """Combines the results of the workers of a step; see `Strategy.reduce`."""
        op = ReduceOp.parse(reduce_op)
        reduce_one = super().reduce

        def reduce_leaf(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica) and len(leaf.values) == self.num_replicas_in_sync:
                return _reduced(op, leaf.values, axis)
            return reduce_one(op, leaf, axis)

        return jax.tree.map(reduce_leaf, value, is_leaf=is_distributed)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        return value.values if isinstance(value, PerReplica) else (value,)


def _reduced(op: ReduceOp, values: Sequence[Any], axis: int | Sequence[int] | None) -> jax.Array:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"Results of workers are reduced by SUM or MEAN. Received: {op}")
    axes = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    total = sum(jnp.sum(value, axes) for value in values[1:]) + jnp.sum(values[0], axes)
    if op is ReduceOp.SUM:
        return total
    count = sum(math.prod(np.shape(value)[own] for own in axes) for value in values)
    return total / count


def _check_mode(
    workers: int, max_staleness: int | None, synchronous: bool, backup_workers: int
) -> None:
    if synchronous and max_staleness is not None:
        raise ValueError(
            "In synchronous mode no worker runs ahead: max_staleness has no meaning. Received: "
            f"synchronous=True, max_staleness={max_staleness}"
        )
    if backup_workers and not synchronous:
        raise ValueError(
            "Workers are waited for in synchronous mode only. Received: backup_workers="
            f"{backup_workers} without synchronous=True"
        )
    if not 0 <= backup_workers < workers:
        raise ValueError(
            f"Expected from 0 to {workers - 1} backup_workers, of {workers} workers in all. "
            f"Received: {backup_workers}"
        )


def _check(cluster: ClusterSpec, task_type: str | None) -> None:
    for job, what in (("ps", "parameter servers"), ("worker", "workers")):
        if job not in cluster.jobs or not cluster.num_tasks(job):
            raise ValueError(
                f"ParameterServerStrategy needs a cluster with at least one of the {what} (job "
                f"{job!r}). Received: {cluster}. `unison run --workers 2 --ps 1 SCRIPT` starts one."
            )
    if task_type in ("ps", "worker"):
        raise ValueError(
            "ParameterServerStrategy is made in the coordinator (the chief). This process is a "
            f"{task_type!r} task: let it serve, by tf.distribute.Server(cluster_spec, job_name, "
            "task_index).join()."
        )
