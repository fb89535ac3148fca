"""Where a process learns which cluster it belongs to, and which of its tasks it is."""

from unison.runtime.cluster_resolvers.gce import GCEClusterResolver
from unison.runtime.cluster_resolvers.kubernetes import (
    ExecutableLocation,
    KubernetesClusterResolver,
)
from unison.runtime.cluster_resolvers.resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionClusterResolver,
)
from unison.runtime.cluster_resolvers.slurm import SlurmClusterResolver
from unison.runtime.cluster_resolvers.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "ExecutableLocation",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionClusterResolver",
]
