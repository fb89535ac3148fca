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
    """Keeps variables on parameter servers; a `ClusterCoordinator` has workers run functions.

    It is made in one process, the coordinator. Variables that are created in its scope lie on the
    servers: whole ones on that which has least, divided ones on several. Every worker computes
    gradients with what it finds there, and the servers update the variables by them, as they come.

    Args:
        cluster_resolver: Names the cluster: its servers (`ps`) and workers (`worker`). Default:
            `TF_CONFIG`, as `unison run --ps` sets it.
        variable_partitioner: Says into how many shards a variable is divided.
        timeout_seconds: How long the servers may take to come; also for how long the coordinator
            waits for a worker while none is there, and for a sign of life.
        max_staleness: How many scheduled functions a worker may have begun that the slowest has
            not: faster ones wait (bounded staleness; Ho et al., 2013, "More effective distributed
            ML via a stale synchronous parallel parameter server"). Default: any number.
        synchronous: Whether each scheduled function is a step of all workers together: every
            worker runs it, on a batch of its own, and the servers update the variables once, by
            the sum of what the workers push. A replica function is then that of one of
            `num_replicas_in_sync` replicas, as under `MirroredStrategy`: `optimizer.apply` sums
            gradients, `all_reduce` sums what it is given, and nobody reads the new values before
            the step is over.
        backup_workers: With `synchronous`, how many workers a step does not wait for: it takes the
            first that have pushed, and what the others push for it later is dropped, with the
            batches that it was made of (Chen et al., 2016, "Revisiting Distributed Synchronous
            SGD"; TF: `SyncReplicasOptimizer(replicas_to_aggregate=workers - backup_workers,
            total_num_replicas=workers)`).
        compression: What gradients, and variables that workers look at, travel in: `bfloat16()`,
            `float16()`, `int8()` or `int4()` of `unison.compression`, whose rule says for which.
            Variables are rounded on their way only. Default: as they are.

    Raises:
        ValueError: The cluster has no servers or no workers, or this process is one of them; or
            there are not more workers than `backup_workers`.
        DeadlineExceededError: A server does not come in time.

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
        super().__init__([device], may_be_alone=True)  # the cluster names the others
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
        #: Guards against making two coordinators; see `ClusterCoordinator`.
        self.coordinator_lock = threading.Lock()
        self.coordinator: Any = None

    def __repr__(self) -> str:
        servers, workers = len(self.store.addresses), len(self.worker_addresses)
        return f"ParameterServerStrategy({workers} workers, {servers} servers)"

    def __reduce__(self) -> Any:
        """On a worker, where a dataset's function is, this is the strategy of one replica."""
        return default_strategy, ()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many workers' gradients make one update: in asynchronous training, 1."""
        return getattr(self._placement, "in_sync", 1)

    @property
    def remote_placement(self) -> RemotePlacement:
        """Where the variables are."""
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
        """Calls `fn` on one replica: in a scheduled function, that of the worker.

        See `Strategy.run`. Outside of scheduled functions it runs in the coordinator's process:
        the variables come here, and go back.
        """
        if not is_tracing():
            return super().run(fn, args, kwargs, options)
        context.require_cross_replica_context("strategy.run()")
        with self.replica_context():
            return fn(*args, **(kwargs or {}))

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """Combines the results of the workers that made a step; see `Strategy.reduce`."""
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
