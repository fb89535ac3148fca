"""Cluster resolvers: they determine the cluster of a process, and which of its tasks it is."""

from unison.runtime.cluster_resolvers.automatic import AutomaticClusterResolver
from unison.runtime.cluster_resolvers.cloud_tpu import CloudTPUClusterResolver
from unison.runtime.cluster_resolvers.gce import GCEClusterResolver
from unison.runtime.cluster_resolvers.kubernetes import (
    ExecutableLocation,
    KubernetesClusterResolver,
)
from unison.runtime.cluster_resolvers.kubernetes_job import KubernetesJobClusterResolver
from unison.runtime.cluster_resolvers.open_mpi import OpenMPIClusterResolver
from unison.runtime.cluster_resolvers.resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionClusterResolver,
)
from unison.runtime.cluster_resolvers.slurm import SlurmClusterResolver
from unison.runtime.cluster_resolvers.tf_config import TFConfigClusterResolver
from unison.runtime.cluster_resolvers.tpu import TPUClusterResolver

__all__ = [
    "AutomaticClusterResolver",
    "CloudTPUClusterResolver",
    "ClusterResolver",
    "ExecutableLocation",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesJobClusterResolver",
    "OpenMPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionClusterResolver",
]
