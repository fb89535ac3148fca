"""`MultiWorkerMirroredStrategy`: the replicas of several processes, on one machine or many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax

from unison.collectives import CommunicationImplementation, CommunicationOptions
from unison.data import InputWorkers
from unison.data.distribution.input_workers import workers_of_cluster, workers_of_group
from unison.runtime import devices
from unison.runtime.addresses import listen_at_own_address
from unison.runtime.cluster import check_cluster
from unison.runtime.cluster_resolvers import (
    AutomaticClusterResolver,
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from unison.runtime.elastic import (
    ElasticGroup,
    ElasticOptions,
    GroupClusterResolver,
    elastic_group,
)
from unison.runtime.process_group import TIMEOUT, join_cluster, training_tasks
from unison.runtime.shared_memory import share_memory
from unison.strategies import alone
from unison.strategies.base import Strategy
from unison.strategies.equal_copies import EqualCopies

#: Numbers the strategies of a process, which all processes create in the same order.
_strategies = itertools.count()


def devices_of_workers(resolver: ClusterResolver, timeout: float) -> list[jax.Device] | None:
    """Connects the workers of a cluster, and returns their devices, grouped by worker.

    Args:
        resolver: Describes the cluster.
        timeout: How many seconds this worker waits for the others.

    Returns:
        The devices; None if there are no other workers, for an evaluator, and if a step is only
        planned.

    Raises:
        ValueError: The cluster is invalid, or this process is not a training task of it.
        RuntimeError: JAX has started already.
        UnavailableError: The other workers did not join in time.
    """
    if devices.planned_devices():
        return None
    cluster, task = resolver.cluster_spec(), (resolver.task_type, resolver.task_id)
    check_cluster(cluster, *task)
    if resolver.task_type == "evaluator" or len(training_tasks(cluster)) < 2:
        return None
    listen_at_own_address(cluster, *task)
    join_cluster(cluster, *task, timeout)
    of_platform = jax.devices(devices.default_devices()[0].platform)
    return sorted(of_platform, key=lambda d: (d.process_index, d.id))


def found_resolver() -> ClusterResolver:
    """Returns the resolver of the launcher that has started this process.

    It is `TF_CONFIG`'s if there is no launcher, if this process is to train alone
    (`UNISON_ALONE=1`), and if a step is only planned.

    Raises:
        Exception: The error of the launcher's resolver.
    """
    found = None
    if not alone.is_requested() and not devices.planned_devices():
        found = AutomaticClusterResolver().found
    return TFConfigClusterResolver() if found is None else found


def says_alone(resolver: ClusterResolver) -> bool:
    """Whether a resolver states that this process trains alone, rather than knowing no others.

    This holds for an evaluator's, and for one by which the program describes a cluster of one.
    """
    return resolver.task_type == "evaluator" or isinstance(resolver, SimpleClusterResolver)


def input_of_workers(timeout: float, workers_per_replica: int = 1) -> InputWorkers:
    """Returns this process's place among connected workers, for a new strategy."""
    name, count = f"strategy {next(_strategies)}", jax.process_count()
    return workers_of_cluster(count, jax.process_index(), name, timeout, workers_per_replica)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of all workers of a cluster.

    Each worker runs the same program in its own process, with one replica on each of its devices.
    Variables are initialized with the first worker's values, and their copies stay equal on all
    workers. The cluster is that of the launcher that has started this process: `TF_CONFIG`, a job
    of `jax.distributed`, `torchrun`, `mpirun`, `srun` and others (`AutomaticClusterResolver`).
    Without one, in a cluster of a single worker, and for an evaluator, it behaves like a
    `MirroredStrategy` on this process's devices. In a process that was started as one of several by
    a launcher that does not describe the others, that is an error, unless `UNISON_ALONE=1` is set
    or the resolver is a `SimpleClusterResolver`.

    Create it before the first JAX computation: the workers connect when it is created.

    Args:
        cluster_resolver: Describes the cluster. Default: that of the launcher, or a
            `TFConfigClusterResolver` if `UNISON_ALONE=1` is set. Under `unison run --min-workers`
            it is ignored: the cluster consists of the workers that currently
            train together, and the strategy's `cluster_resolver` describes those.
        communication_options: How gradients are communicated, and whether to determine the fastest
            way in the first steps (`auto_tune`). `timeout_seconds` is how long this worker waits
            for the others.
        check_every: The interval, in steps (of `run` and of Keras' loops), at which the workers
            compare their variables, to find the first that differs; None for never. A comparison
            reads all variables.
        batch_shares: The proportions in which a global batch is divided among the replicas, if some
            workers are faster than others: a number for each replica or for each worker, the same
            on all workers; or `"measured"`. See `MirroredStrategy`. Default: equal parts.
        elastic: What is kept constant when the number of workers changes, under `unison run
            --min-workers`; elsewhere the number does not change.

    Raises:
        ValueError: The cluster is invalid, or this process is not a training task of it.
        RuntimeError: JAX has started already; or there is no cluster, and this process is one of
            several.
        UnavailableError: The other workers did not join in time.

    TF: `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        check_every: int | None = None,
        batch_shares: Sequence[float] | str | None = None,
        elastic: ElasticOptions | None = None,
    ):
        self.elastic_options = elastic or ElasticOptions()
        group = elastic_group()
        if group is not None:
            if communication_options is not None and communication_options.auto_tune:
                raise ValueError(
                    "auto_tune needs a fixed set of workers. Expected other communication options "
                    "under `unison run --min-workers`, such as those that auto_tune has chosen. "
                    f"Received: {communication_options!r}"
                )
            group.options = self.elastic_options
            self._begin_in(group, batch_shares, check_every)
            self._communicate_by(communication_options or CommunicationOptions())
            return
        resolver = cluster_resolver or found_resolver()
        self.cluster_resolver = resolver
        options = communication_options or CommunicationOptions()
        timeout = options.timeout_seconds or TIMEOUT
        replicas = devices_of_workers(resolver, timeout)
        if replicas is None:
            super().__init__(
                devices.default_devices(),
                batch_shares=batch_shares,
                may_be_alone=says_alone(resolver),
            )
        else:
            if options.implementation is CommunicationImplementation.AUTO:
                tasks = training_tasks(resolver.cluster_spec())
                share_memory(replicas, [f"{job} {index}" for job, index in tasks], timeout)
            super().__init__(
                replicas, batch_shares=batch_shares, input_workers=input_of_workers(timeout)
            )
            if check_every is not None:
                self.equal_copies = EqualCopies(check_every)
        self._communicate_by(options)

    def _begin_in(
        self,
        group: ElasticGroup,
        batch_shares: Sequence[float] | str | None,
        check_every: int | None,
    ) -> None:
        """Initializes this as the strategy of a job whose workers may change."""
        if batch_shares is not None:
            raise ValueError(
                "batch_shares need a fixed set of workers. Expected None under `unison run "
                f"--min-workers`, where the replicas' parts are equal. Received: {batch_shares!r}"
            )
        self.cluster_resolver = GroupClusterResolver(group)
        super().__init__(group.placement.local_devices, group=group)
        # Set after the comparison of batch shares, in which a joining worker would be alone.
        self.input_workers = workers_of_group(group)
        if check_every is not None:
            self.equal_copies = EqualCopies(check_every)
