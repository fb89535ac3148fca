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
from unison.strategies.base import Strategy
from unison.strategies.equal_copies import EqualCopies

#: Tells the strategies of a process apart, which all processes make in the same order.
_strategies = itertools.count()


def devices_of_workers(resolver: ClusterResolver, timeout: float) -> list[jax.Device] | None:
    """Brings the workers of a cluster together, and returns their devices, those of one together.

    Args:
        resolver: Names the cluster.
        timeout: How many seconds this worker waits for the others.

    Returns:
        The devices; None where there are no others, for an evaluator, and where a step is only
        planned.

    Raises:
        ValueError: The cluster is none, or this process no training task of it.
        RuntimeError: JAX has started already.
        UnavailableError: The other workers did not come.
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


def says_alone(resolver: ClusterResolver) -> bool:
    """Whether a resolver says that this process trains alone, and not only that it knows no others.

    That is an evaluator's, and one by which the program itself describes a cluster of one.
    """
    return resolver.task_type == "evaluator" or isinstance(resolver, SimpleClusterResolver)


def input_of_workers(timeout: float) -> InputWorkers:
    """Returns this process's place among workers that have come together, for a new strategy."""
    name = f"strategy {next(_strategies)}"
    return workers_of_cluster(jax.process_count(), jax.process_index(), name, timeout)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of all workers of a cluster.

    Each worker runs the same program in a process of its own, and has the replicas of its own
    devices. Variables start with the first worker's values, and their copies stay equal on all
    workers. Without a cluster (no `TF_CONFIG`), in one of a single worker, and for an evaluator,
    it is a `MirroredStrategy` on this process's devices. In a process that another launcher has
    started as one of several, that is an error, unless `UNISON_ALONE=1` is set or the resolver is a
    `SimpleClusterResolver`.

    Create it before the first JAX computation: that is when the workers come together.

    Args:
        cluster_resolver: Names the cluster. Default: a `TFConfigClusterResolver`. Under `unison run
            --min-workers` it is not asked: the workers that train together are the cluster, and the
            strategy's `cluster_resolver` follows them.
        communication_options: How gradients travel, and whether the first steps are to find the
            fastest way (`auto_tune`). `timeout_seconds` is how long this worker waits for the
            others.
        check_every: After how many steps (of `run` and of Keras' loops) the workers compare their
            variables, to find the first that differs; None for never. It costs a pass over all
            variables.
        batch_shares: What the replicas' parts of a global batch are in proportion to, where some
            workers are faster than others: a number for each replica or for each worker, the same
            on all workers; or `"measured"`. See `MirroredStrategy`. Default: equal parts.
        elastic: What stays as it is when the number of workers changes, under `unison run
            --min-workers`; elsewhere it does not.

    Raises:
        ValueError: The cluster is none, or this process no training task of it.
        RuntimeError: JAX has started already; or there is no cluster, and this process is one of
            several.
        UnavailableError: The other workers did not come.

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
        group = elastic_group()
        if group is not None:
            if communication_options is not None and communication_options.auto_tune:
                raise ValueError(
                    "auto_tune is for workers that stay. Expected other communication options "
                    "under `unison run --min-workers`, such as those that auto_tune has chosen. "
                    f"Received: {communication_options!r}"
                )
            group.options = elastic or ElasticOptions()
            self._begin_in(group, batch_shares, check_every)
            self._communicate_by(communication_options or CommunicationOptions())
            return
        resolver = cluster_resolver or TFConfigClusterResolver()
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
        """Makes this the strategy of a job whose workers may change."""
        if batch_shares is not None:
            raise ValueError(
                "batch_shares are for workers that stay. Expected None under `unison run "
                f"--min-workers`, where the replicas' parts are equal. Received: {batch_shares!r}"
            )
        self.cluster_resolver = GroupClusterResolver(group)
        super().__init__(group.placement.local_devices, group=group)
        # Behind the question for batch shares, which a worker that joins would ask alone.
        self.input_workers = workers_of_group(group)
        if check_every is not None:
            self.equal_copies = EqualCopies(check_every)
