"""The cluster of the launcher that started this process."""

from __future__ import annotations

import os
from collections.abc import Callable

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.cloud_tpu import CloudTPUClusterResolver
from unison.runtime.cluster_resolvers.kubernetes_job import KubernetesJobClusterResolver
from unison.runtime.cluster_resolvers.open_mpi import OpenMPIClusterResolver
from unison.runtime.cluster_resolvers.resolver import ClusterResolver
from unison.runtime.cluster_resolvers.slurm import SlurmClusterResolver
from unison.runtime.cluster_resolvers.tf_config import TFConfigClusterResolver

#: Checks for where this process runs, in order, and the resolver of each. `mpirun` in a Slurm job
#: starts processes that look like a step of one task, and TPUs may belong to a Kubernetes job.
_PLACES: tuple[tuple[Callable[[], bool], Callable[[], ClusterResolver]], ...] = (
    (lambda: bool(os.environ.get("TF_CONFIG")), TFConfigClusterResolver),
    (OpenMPIClusterResolver.is_here, OpenMPIClusterResolver),
    (SlurmClusterResolver.is_here, SlurmClusterResolver),
    (CloudTPUClusterResolver.is_here, CloudTPUClusterResolver),
    (KubernetesJobClusterResolver.is_here, KubernetesJobClusterResolver),
)


class AutomaticClusterResolver(ClusterResolver):
    """The cluster of the launcher that started this process.

    `TF_CONFIG` has precedence, followed by Open MPI's `mpirun`, Slurm's `srun`, a Cloud TPU slice,
    and an indexed Kubernetes job; see the resolvers of each. If none of them applies, there is no
    cluster: one process trains alone.

    Raises:
        Exception: The error of the resolver that applies.

    Examples:
        >>> import unison
        >>> strategy = unison.MultiWorkerMirroredStrategy(AutomaticClusterResolver())
    """

    def __init__(self) -> None:
        found = next((resolver for is_here, resolver in _PLACES if is_here()), None)
        #: The resolver that applies to this process; None if it runs alone.
        self.found: ClusterResolver | None = found and found()
        if self.found is not None:
            self.task_type = self.found.task_type
            self.task_id = self.found.task_id
            self.rpc_layer = self.found.rpc_layer
            self.environment = self.found.environment

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({}) if self.found is None else self.found.cluster_spec()

    def num_accelerators(self) -> dict[str, int]:
        return {} if self.found is None else self.found.num_accelerators()
