"""The cluster of the launcher that started this process."""

from __future__ import annotations

import os
from collections.abc import Callable

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.cloud_tpu import CloudTPUClusterResolver
from unison.runtime.cluster_resolvers.jax_processes import JAXClusterResolver
from unison.runtime.cluster_resolvers.kubernetes_job import KubernetesJobClusterResolver
from unison.runtime.cluster_resolvers.lsf import LSFClusterResolver
from unison.runtime.cluster_resolvers.mpi import MPIClusterResolver
from unison.runtime.cluster_resolvers.open_mpi import OpenMPIClusterResolver
from unison.runtime.cluster_resolvers.ray_train import RayTrainClusterResolver
from unison.runtime.cluster_resolvers.resolver import ClusterResolver
from unison.runtime.cluster_resolvers.sagemaker import SageMakerClusterResolver
from unison.runtime.cluster_resolvers.slurm import SlurmClusterResolver
from unison.runtime.cluster_resolvers.tf_config import TFConfigClusterResolver
from unison.runtime.cluster_resolvers.torchrun import TorchrunClusterResolver
from unison.runtime.cluster_resolvers.vertex import VertexClusterResolver
from unison.runtime.private_jax import has_tpu_chips

#: Checks for where this process runs, in order, and the resolver of each. A launcher that another
#: one may start is first: `mpirun` in a Slurm job starts processes that look like a step of one
#: task, Ray Train sets torchrun's variables, SageMaker runs `torchrun`, and TPUs may belong to a
#: Kubernetes job.
_PLACES: tuple[tuple[Callable[[], bool], Callable[[], ClusterResolver]], ...] = (
    (lambda: bool(os.environ.get("TF_CONFIG")), TFConfigClusterResolver),
    (JAXClusterResolver.is_here, JAXClusterResolver),
    (RayTrainClusterResolver.is_here, RayTrainClusterResolver),
    (TorchrunClusterResolver.is_here, TorchrunClusterResolver),
    (OpenMPIClusterResolver.is_here, OpenMPIClusterResolver),
    (MPIClusterResolver.is_here, MPIClusterResolver),
    (LSFClusterResolver.is_here, LSFClusterResolver),
    (SlurmClusterResolver.is_here, SlurmClusterResolver),
    (SageMakerClusterResolver.is_here, SageMakerClusterResolver),
    (VertexClusterResolver.is_here, VertexClusterResolver),
    (lambda: _is_tpu_machine(), CloudTPUClusterResolver),
    (KubernetesJobClusterResolver.has_service, KubernetesJobClusterResolver),
)


class AutomaticClusterResolver(ClusterResolver):
    """The cluster of the launcher that started this process: the default of the strategies.

    `TF_CONFIG` has precedence, followed by a job of `jax.distributed` or JAX's variables, Ray
    Train, `torchrun`, Open MPI's `mpirun`, other MPI launchers, Horovod and Flux, LSF's `jsrun`,
    Slurm's `srun`, SageMaker, Vertex AI, Cloud TPU slices, and an indexed Kubernetes job with a
    service; see the resolvers of each. If none of them applies, there is no cluster: one process
    trains alone.

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


def _is_tpu_machine() -> bool:
    """Returns whether this is a machine of a TPU slice; asks the metadata only beside a chip."""
    return CloudTPUClusterResolver.is_described() or (
        has_tpu_chips() and CloudTPUClusterResolver.is_here()
    )
