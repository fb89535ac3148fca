"""Cluster resolvers: they determine the cluster of a process, and which of its tasks it is."""

from unison.runtime.cluster_resolvers.automatic import AutomaticClusterResolver
from unison.runtime.cluster_resolvers.cloud_tpu import CloudTPUClusterResolver
from unison.runtime.cluster_resolvers.gce import GCEClusterResolver
from unison.runtime.cluster_resolvers.jax_processes import JAXClusterResolver
from unison.runtime.cluster_resolvers.kubernetes import (
    ExecutableLocation,
    KubernetesClusterResolver,
)
from unison.runtime.cluster_resolvers.kubernetes_job import KubernetesJobClusterResolver
from unison.runtime.cluster_resolvers.lsf import LSFClusterResolver
from unison.runtime.cluster_resolvers.mpi import MPIClusterResolver
from unison.runtime.cluster_resolvers.open_mpi import OpenMPIClusterResolver
from unison.runtime.cluster_resolvers.ray_train import RayTrainClusterResolver
from unison.runtime.cluster_resolvers.resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionClusterResolver,
)
from unison.runtime.cluster_resolvers.sagemaker import SageMakerClusterResolver
from unison.runtime.cluster_resolvers.slurm import SlurmClusterResolver
from unison.runtime.cluster_resolvers.tf_config import TFConfigClusterResolver
from unison.runtime.cluster_resolvers.torchrun import TorchrunClusterResolver
from unison.runtime.cluster_resolvers.tpu import TPUClusterResolver
from unison.runtime.cluster_resolvers.vertex import VertexClusterResolver

__all__ = [
    "AutomaticClusterResolver",
    "CloudTPUClusterResolver",
    "ClusterResolver",
    "ExecutableLocation",
    "GCEClusterResolver",
    "JAXClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesJobClusterResolver",
    "LSFClusterResolver",
    "MPIClusterResolver",
    "OpenMPIClusterResolver",
    "RayTrainClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionClusterResolver",
    "VertexClusterResolver",
]
