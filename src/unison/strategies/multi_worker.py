"""`MultiWorkerMirroredStrategy`, as far as one worker goes."""

from __future__ import annotations

from unison.runtime import devices
from unison.runtime.cluster_resolvers import ClusterResolver, TFConfigClusterResolver
from unison.strategies.base import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of all workers of a cluster.

    Without a cluster (no `TF_CONFIG`), or in one of a single worker, it is a `MirroredStrategy`
    on this process's devices. Clusters of several workers are not supported yet.

    Args:
        cluster_resolver: Names the cluster. Default: a `TFConfigClusterResolver`.
        communication_options: How collectives are tuned; on one worker there is nothing to tune.

    Raises:
        ValueError: The cluster has several workers.

    TF: `tf.distribute.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: object = None,
    ):
        del communication_options
        self.cluster_resolver = cluster_resolver or TFConfigClusterResolver()
        cluster = self.cluster_resolver.cluster_spec()
        workers = sum(cluster.num_tasks(job) for job in ("chief", "worker") if job in cluster.jobs)
        if workers > 1:
            raise ValueError(
                "MultiWorkerMirroredStrategy runs on one worker only in this release. Received: a "
                f"cluster of {workers} workers, {cluster.as_dict()}. Unset TF_CONFIG to train on "
                "the devices of this machine."
            )
        super().__init__(devices.default_devices())
